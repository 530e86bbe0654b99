"""Folders that appear whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into that becomes `path` when the block ends without an error.

    Everything written is flushed to disk before it gets its name. After an error nothing is left.

    Raises:
        ValueError: `path` exists already; nothing is ever overwritten.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} exists already; give a new folder, or remove it first.")
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield work
        # Temporary files are hidden from others; finished ones have the usual permissions.
        umask = os.umask(0)
        os.umask(umask)
        for file in (*work.rglob("*"), work):
            file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)
            _flush(file)
        os.rename(work, path)
        _flush(path.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
