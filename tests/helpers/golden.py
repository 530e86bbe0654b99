"""Numbers recorded by running the reference implementations, found by listing."""

import functools
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(
    os.environ.get("JSPEC_GOLDEN", Path(__file__).resolve().parents[3] / "shared/golden/dev")
)


def parametrize(name, found, what, ids=None):
    """`pytest.mark.parametrize` over what was found, or one case that skips and says so."""
    missing = [pytest.param(None, marks=pytest.mark.skip(reason=f"no {what} below {ROOT}"))]
    return pytest.mark.parametrize(name, list(found) or missing, ids=ids if found else None)


def folders_with(*files):
    """Folders below the root that hold all of these files or folders."""
    first, *rest = files
    return sorted(
        path.parent
        for path in ROOT.rglob(first)
        if all((path.parent / name).exists() for name in rest)
    )


def label(path):
    """A short name for test ids."""
    return str(path.relative_to(ROOT))


@functools.cache
def arrays(path):
    """All arrays of an npz file."""
    with np.load(path) as file:
        return dict(file)


@functools.cache
def facts(path):
    """A JSON file."""
    return json.loads(path.read_text())


def target_folder(folder):
    """The target of a set: its own, or that of the set whose name this one extends."""
    name = folder.name
    while not (folder.parent / name / "target").exists():
        name, cut, _ = name.rpartition("_")
        assert cut, f"no target for {folder}"
    return folder.parent / name / "target"


def prompts(recorded, ending):
    """Prefixes `p0_`, `p1_`, … of the prompts an npz has `ending` for."""
    return [f"p{i}_" for i in range(len(recorded)) if f"p{i}_{ending}" in recorded]


def int32(x):
    """Recorded ids are int64, ours int32."""
    return jnp.asarray(np.asarray(x), jnp.int32)


def padded(rows, width):
    """[1, R, ...] arrays of different R as one [B, width, ...]."""
    out = np.zeros((len(rows), width, *rows[0].shape[2:]), rows[0].dtype)
    for slot, row in enumerate(rows):
        out[slot, : row.shape[1]] = row[0]
    return out
