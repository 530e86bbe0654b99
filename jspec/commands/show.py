"""Generated text for people: accepted draft tokens marked, rounds drawn, one line at the end."""

import math
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from jspec.engine.text import Piece

DRAFTED = "underline green"
"""How an accepted draft token looks in color."""

NOT_REAL = "simulated acceptance, not real text"

# Anything that could move the cursor or ring a bell; line feeds and tabs are text.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class PlainConsole(Console):
    """Prints what it is given: nothing is wrapped, highlighted or taken for markup."""

    def __init__(self, **settings: Any):
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, **settings)

    def on_broken_pipe(self) -> None:
        """Leave it to the command line; rich would end the process."""
        raise BrokenPipeError


class TextWriter:
    """Writes pieces as they come, marking runs of accepted draft tokens."""

    def __init__(self, mark: str, stream=None):
        """Decide how to mark: `auto`, `color`, `brackets` or `none`."""
        stream = sys.stdout if stream is None else stream
        if mark == "auto":
            mark = "color" if stream.isatty() else "brackets"
        self.mark = mark
        self.console = PlainConsole(file=stream, force_terminal=mark == "color" or None)

    def pieces(self, pieces: Sequence[Piece]) -> None:
        """Write what one round brought."""
        text = Text(end="")
        runs: list[Piece] = []
        for piece in pieces:
            if runs and runs[-1].drafted == piece.drafted:
                runs[-1] = Piece(runs[-1].text + piece.text, piece.drafted)
            else:
                runs.append(piece)
        for run in runs:
            shown = run.text.translate(_CONTROLS)
            if not run.drafted or self.mark == "none":
                text.append(shown)
            elif self.mark == "color":
                text.append(shown, style=DRAFTED)
            else:
                text.append(f"[{shown}]")
        if text:
            self.console.print(text, end="")
            self.console.file.flush()

    def line(self, line: str | Text = "", style: str = "") -> None:
        """Write a whole line, such as a heading, a drawing or the summary."""
        self.console.print(line, style=style)
        self.console.file.flush()


def summary(tokens: int, tokens_per_second: float, accept_length: float, rounds: int) -> str:
    """The last line of a text."""
    counted = f"{tokens} token" + ("" if tokens == 1 else "s")
    passes = f"{rounds} round" + ("" if rounds == 1 else "s")
    if math.isnan(tokens_per_second):
        speed = "too short to time"
    else:
        speed = f"{tokens_per_second:.1f} tokens/s while decoding"
    return f"{counted}, {speed}, τ {_figure(accept_length)}, {passes}"


def _figure(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.2f}"
