"""The output file: only ever appended to, on disk before anybody counts on it, resumable."""

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serve.answers import dump, identify


class Journal:
    """An output file that this process alone writes."""

    def __init__(self, path: Path, *, resume: bool):
        """Open it.

        Args:
            path: the file.
            resume: go on with a file that is there; a last line that was not finished is cut off.

        Raises:
            ValueError: it holds answers and is not to be resumed, it holds something else, or
                another job writes it.
            OSError: it cannot be written.
        """
        self.path = path
        self.answered: dict[int, Any] = {}
        """Line number to name, of every record that was there."""
        self.failed = 0
        """Records of errors that were there."""
        self._file = open(path, "a+b")  # noqa: SIM115 (held for the whole job)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(f"{path} is being written by another job.") from error
            if os.fstat(self._file.fileno()).st_size and not resume:
                raise ValueError(
                    f"{path} is there already; --resume goes on with it, or choose another."
                )
            self._recover()
        except BaseException:
            self._file.close()
            raise

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Append; returns when they are on disk."""
        self._file.write(b"".join(map(dump, records)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def _recover(self) -> None:
        self._file.seek(0)
        whole = 0
        for place, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                found = identify(record)
            except (ValueError, RecursionError):
                record, found = None, None
            if record is None or found is None:
                raise ValueError(
                    f"{self.path}:{place} is no answer of this command; choose another file."
                )
            self.answered[found[0]] = found[1]
            self.failed += record.get("error") is not None
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
