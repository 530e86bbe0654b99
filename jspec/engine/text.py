"""From a request's tokens to its text: incremental, cut exactly at the first stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from jspec.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """Text that a token completed; `drafted` tells who wrote it.

    Attributes:
        text: may be empty while a code point or a possible stop string is incomplete.
        drafted: an accepted draft token, as opposed to one the target sampled itself.
    """

    text: str
    drafted: bool


class TextBuilder:
    """Collects one request's text token by token.

    Text that may turn out to begin a stop string is held back until it is decided.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], hidden: frozenset[int]):
        """Start an empty text.

        Args:
            tokenizer: decodes.
            stop: strings that end the text.
            hidden: ids whose text is not shown: the tokens that end a text.
        """
        self._decoder = tokenizer.stream_decoder()
        self._stop = tuple(stop)
        self._hidden = hidden
        self._held: list[Piece] = []
        self.text = ""
        self.stopped = False

    def push(self, token: int, drafted: bool) -> list[Piece]:
        """Take a token; return the pieces now certain. Sets `stopped` at a stop string."""
        if self.stopped or token in self._hidden:
            return []
        self._held.append(Piece(self._decoder.push([token]), drafted))
        return self._release(final=False)

    def flush(self) -> list[Piece]:
        """The rest, at the end of the text."""
        if self.stopped:
            return []
        self._held.append(Piece(self._decoder.flush(), False))
        return self._release(final=True)

    def _release(self, *, final: bool) -> list[Piece]:
        pending = "".join(piece.text for piece in self._held)
        at = min((i for i in map(pending.find, self._stop) if i >= 0), default=-1)
        if at >= 0:
            self.stopped = True
            sure = at
        else:
            sure = len(pending) - (0 if final else self._undecided(pending))
        released, kept = [], []
        for piece in self._held:
            now, sure = piece.text[:sure], sure - min(sure, len(piece.text))
            later = piece.text[len(now) :]
            if now:
                released.append(Piece(now, piece.drafted))
            if later:
                kept.append(Piece(later, piece.drafted))
        self._held = [] if self.stopped else kept
        self.text += "".join(piece.text for piece in released)
        return released

    def _undecided(self, pending: str) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(pending)), longest, -1):
                if pending.endswith(stop[:size]):
                    longest = size
                    break
        return longest
