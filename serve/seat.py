"""One request on its way through a server, and what its owner holds of it."""

import contextlib
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jspec.engine import Engine, Output, Update
from jspec.engine.requests import Slot, no_token
from jspec.engine.state import FAILED, FINISH_REASONS, RUNNING, STOPPED, RoundLog


class Handle:
    """A request that was submitted.

    for update in handle:      # as it is written
        print(update.token_ids)
    handle.result().text       # or at its end
    """

    def __init__(self, cancel: Callable[[], None]):
        """Of a request that `cancel` withdraws."""
        self._cancel = cancel
        self._future: Future[Output] = Future()
        self._updates: queue.SimpleQueue[Update | None] = queue.SimpleQueue()

    def result(self, timeout: float | None = None) -> Output:
        """The finished text; waits for it.

        Raises:
            ValueError: at some place no token was possible.
            concurrent.futures.CancelledError: it was withdrawn.
            TimeoutError: it is not finished after `timeout` seconds.
        """
        return self._future.result(timeout)

    def __iter__(self) -> Iterator[Update]:
        """News as they come; the last one holds the output. For one reader.

        Raises:
            ValueError, concurrent.futures.CancelledError: as `result`.
        """
        while (update := self._updates.get()) is not None:
            yield update
            if update.output is not None:
                return
        self._future.result()

    def cancel(self) -> None:
        """Withdraw the request; its slot is free after the rounds that are already on their way."""
        self._cancel()

    @property
    def done(self) -> bool:
        """Finished, failed or withdrawn."""
        return self._future.done()

    def when_done(self, tell: Callable[["Handle"], None]) -> None:
        """Call `tell(handle)` from the server's thread at the end, or now if it has ended."""
        self._future.add_done_callback(lambda _: tell(self))

    def _news(self, update: Update) -> None:
        if update.output is not None:
            with contextlib.suppress(InvalidStateError):
                self._future.set_result(update.output)
        self._updates.put(update)

    def _failed(self, error: BaseException) -> None:
        # Whoever ends it first decides: the text's own end, or its owner.
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(error)
            self._updates.put(None)


@dataclass(frozen=True)
class SlotReport:
    """One slot's share of a `Report`, on the host."""

    start: int
    tokens: np.ndarray
    length: int
    reason: int
    emitted: list[int]
    correct: list[int]
    drafted: list[int]
    chosen: np.ndarray | None
    top_ids: np.ndarray | None
    top: np.ndarray | None


@dataclass(eq=False)
class Seat:
    """A request in a server.

    Attributes:
        slot: the host's record, as the engine keeps it.
        handle: its owner's.
        left: tokens it may still make, at most, when everything enqueued has run.
        done: nothing more is read for it.
        tokens, marks: generated so far, and whether the drafter wrote each.
    """

    slot: Slot
    handle: Handle
    left: int
    done: bool = False
    tokens: list[int] = field(default_factory=list)
    marks: list[bool] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)

    def read(self, engine: Engine, report: SlotReport) -> bool:
        """Take in what a piece brought and tell the owner.

        Returns:
            Whether the text ended, perhaps at a stop string, which the device does not know.
        """
        slot, had = self.slot, len(self.tokens)
        first = len(slot.prompt) + had - report.start
        count = report.length + 1 - len(slot.prompt) - had
        if report.reason == FAILED:
            # Where the prefill failed, not even a root is known.
            rounds = len(self.emitted) + len(report.emitted)
            place = report.length + 1 - len(slot.prompt) - int(rounds == 0)
            self.handle._failed(ValueError(no_token(place)))
            return True
        self.tokens += report.tokens[first : first + count].tolist()
        self.emitted += report.emitted
        self.correct += report.correct
        self.drafted += report.drafted
        if not self.marks:
            self.marks.append(False)
        for emitted, correct in zip(report.emitted, report.correct):
            self.marks += [place < correct for place in range(emitted)]
        if slot.sampling.logprobs is not None:
            self._score(report, first, count)
        reason = report.reason
        pieces = slot.take_in(self.tokens, self.marks, finished=reason != RUNNING)
        if slot.ended is not None:
            reason = STOPPED
        output = None if reason == RUNNING else self._output(engine, reason)
        self.handle._news(Update(pieces=pieces, token_ids=self.tokens[had:], output=output))
        return output is not None

    def _score(self, report: SlotReport, first: int, count: int) -> None:
        assert report.chosen is not None
        assert report.top_ids is not None
        assert report.top is not None
        text, wanted = slice(first, first + count), self.slot.sampling.logprobs
        self.chosen += report.chosen[text].tolist()
        for ids, values in zip(report.top_ids[text], report.top[text]):
            self.tops.append(dict(zip(ids[:wanted].tolist(), values[:wanted].tolist())))

    def _output(self, engine: Engine, reason: int) -> Output:
        rows: list[Any] = [
            np.asarray([row], np.int32) for row in (self.emitted, self.correct, self.drafted)
        ]
        count: Any = np.asarray([len(self.emitted)], np.int32)
        log = RoundLog(count, *rows)
        logprobs: dict[str, list] = {}
        if self.slot.sampling.logprobs is not None:
            text = slice(self.slot.count(self.tokens))
            logprobs = {"logprobs": self.chosen[text], "top_logprobs": self.tops[text]}
        return self.slot.output(engine, self.tokens, FINISH_REASONS[reason], log, 0, **logprobs)


def withdrawn() -> CancelledError:
    """What a withdrawn request's owner gets."""
    return CancelledError("the request was withdrawn")
