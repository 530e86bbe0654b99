"""Compiled programs kept between processes, in the user's cache folder."""

import contextlib
import sys
from pathlib import Path

from jspec.checkpoints.fetch import cache_folder

_MAX_BYTES = 2 << 30
"""Beyond this the oldest programs are deleted at the next start."""


def enable_compilation_cache() -> Path | None:
    """Let JAX look up and keep every compiled program below `cache_folder()`.

    Call it before anything is compiled. A folder that the user gave JAX itself
    (JAX_COMPILATION_CACHE_DIR) stays in charge.

    Returns:
        The folder; None where it cannot be written, which is said on stderr and costs only time.
    """
    import jax

    chosen = jax.config.values["jax_compilation_cache_dir"]
    if chosen:
        return Path(chosen)
    folder = cache_folder() / "compilation"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        print(
            f"jspec: compiled programs are not kept: {folder}: {error.strerror or error}; "
            "set JSPEC_CACHE to a folder you can write to, or say --no-compilation-cache",
            file=sys.stderr,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: JAX's default leaves out what compiles in under a second, and a start
    # consists of dozens of those.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _prune(folder, _MAX_BYTES)
    return folder


def _prune(folder: Path, max_bytes: int) -> None:
    """Delete the oldest programs until half of `max_bytes` is left, where there are more.

    JAX can bound the folder itself, but then fails to add to it once any of its bookkeeping files
    is missing, as when a process was killed.
    """
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process deletes too
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    if total <= max_bytes:
        return
    for _, size, path in sorted(files):
        if total <= max_bytes // 2:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
