"""What a run tells: JSONL always, TensorBoard if asked, a progress line on a terminal."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Journal:
    """Writes `metrics.jsonl`, one object a step or evaluation, each flushed as it is written."""

    def __init__(self, folder: Path, *, tensorboard: bool, steps: int, done: int, quiet: bool):
        """Open the run's files.

        Args:
            folder: of the run.
            tensorboard: also write event files, which needs tensorboardX.
            steps, done: of the progress bar.
            quiet: nothing on the terminal.

        Raises:
            ValueError: TensorBoard without its package.
        """
        self._file: TextIO = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = _board(folder) if tensorboard else None
        self.console = Console(stderr=True, quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=steps, completed=done)
        self._progress.start()
        self._began = time.time()

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Add a line.

        Args:
            kind: `train` or `eval`.
            step: its number.
            values: numbers, or lists of numbers by depth; what is not finite becomes null.
        """
        line = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(_finite(line)) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _flat(values):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def show(self, step: int, text: str) -> None:
        """Move the progress bar; without a terminal, print a line."""
        self._progress.update(self._task, completed=step, description=text)
        if self._progress.disable:
            self.console.print(f"[{time.time() - self._began:8.1f} s] {text}", highlight=False)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False)

    def close(self) -> None:
        """End the progress bar and close the files."""
        self._progress.stop()
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(folder: Path):
    try:
        from tensorboardX import SummaryWriter  # type: ignore[import-not-found]
    except ImportError as error:
        raise ValueError("--tensorboard needs tensorboardX: pip install tensorboardX") from error
    return SummaryWriter(str(folder / "tensorboard"))


def _flat(values: Mapping[str, Any]):
    for name, value in values.items():
        if isinstance(value, list):
            yield from ((f"{name}/{depth}", x) for depth, x in enumerate(value))
        elif isinstance(value, int | float):
            yield name, value


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
