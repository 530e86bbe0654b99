"""Figures as JSON: strict (no NaN), and written in one piece."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any


def without_nan(value: Any) -> Any:
    """NaN and infinity as None, at any depth: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return value


def check_writable(path: Path) -> None:
    """Refuse a place for figures before they are measured.

    Raises:
        ValueError: its folder is missing or cannot be written, or it is a folder.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected the name of a file to write.")
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist; create it first.")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"the folder {path.parent} cannot be written; choose another.")


def dump_json(figures: dict[str, Any]) -> str:
    """`figures` as indented JSON."""
    return json.dumps(without_nan(figures), indent=1, allow_nan=False)


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write `figures` in one piece."""
    write_text(path, dump_json(figures) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file; whoever reads it sees all of it or what was there before."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp made it private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
