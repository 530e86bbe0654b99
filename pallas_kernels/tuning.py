"""Configs measured by `python -m pallas_kernels.tune`, looked up by device, op and shape.

The file is JSON: `{device kind: {op: {shape key: config fields}}}`. It is read from the path in
the environment variable JSPEC_TUNING, else from the user's cache folder; without a file the
heuristics decide alone.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import jax
import platformdirs

VARIABLE = "JSPEC_TUNING"
Table = dict[str, dict[str, dict[str, dict[str, Any]]]]


def default_path() -> Path:
    """Where measured configs are read from and written to."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(platformdirs.user_cache_dir("jspec")) / "tuning.json"


def device_kind() -> str:
    """The name under which this device's measurements are stored."""
    return jax.devices()[0].device_kind


def read(path: Path) -> Table:
    """The table in a file; empty where there is none.

    Raises:
        ValueError: a file that is not such a table.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
        for ops in table.values():
            for shapes in ops.values():
                for fields in shapes.values():
                    dict(**fields)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} is no table of measured configs ({error}); delete it or run "
            "`python -m pallas_kernels.tune` again"
        ) from error
    return table


def write(path: Path, table: Table) -> None:
    """Replaces the file in one step, so that a reader never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(path.suffix + ".new")
    scratch.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    scratch.replace(path)


def lookup(op: str, key: str) -> dict[str, Any] | None:
    """The measured fields for this op and shape on this device, or None."""
    path = default_path()
    stamp = path.stat().st_mtime_ns if path.exists() else None
    if stamp is None:
        return None
    return _read_once(path, stamp).get(device_kind(), {}).get(op, {}).get(key)


@functools.lru_cache(maxsize=4)
def _read_once(path: Path, stamp: int) -> Table:
    del stamp  # part of the key: a rewritten file is read again
    return read(path)
