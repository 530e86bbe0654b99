"""The batch job: lines in, answers out, nothing lost.

The main thread reads lines and submits them, a bounded number ahead; the servers' threads hand
answers over; one writer appends them and makes them durable. A line counts as answered once its
record is on disk.
"""

import gzip
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from jspec.engine import Prompt
from serve.answers import answer, refusal
from serve.journal import Journal
from serve.lines import LineError, LineRequest, parse_line
from serve.seat import Handle
from serve.server import Server

_AHEAD = 4
"""Requests submitted for each slot: enough to refill it at once, few enough to hold."""


@dataclass
class Tally:
    """What a job has done so far.

    Attributes:
        answered: lines with a text.
        failed: lines with an error record.
        skipped: lines that the output had already.
        prompt_tokens, completion_tokens: of the texts.
        rounds: of the texts.
        started: `time.perf_counter()` at the start.
    """

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def done(self) -> int:
        """Lines that are in the output."""
        return self.answered + self.failed + self.skipped

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.started

    @property
    def accept_length(self) -> float:
        """τ over all rounds, which did not make the first token of a text; NaN without any."""
        if not self.rounds:
            return float("nan")
        return (self.completion_tokens - self.answered) / self.rounds


class _Stop(BaseException):
    """A signal came while the next line was waited for."""


class Job:
    """One input file on its way through some servers.

    Attributes:
        tally: counts.
        stopped: the signal that ended the job early.
    """

    def __init__(
        self,
        servers: list[Server],
        journal: Journal,
        defaults: Mapping[str, Any],
        to_prompt: Callable[[LineRequest], Prompt],
        *,
        ordered: bool = False,
        progress: Callable[[Tally], None] = lambda tally: None,
    ):
        """Prepare.

        Args:
            servers: replicas; a request goes to the one with the fewest.
            journal: the output.
            defaults: of `SamplingParams`.
            to_prompt: what the engine takes; raises ValueError for what cannot be.
            ordered: write in the order of the lines.
            progress: told after every write.
        """
        self.tally, self.stopped = Tally(), None
        self._servers, self._journal, self._defaults = servers, journal, defaults
        self._to_prompt, self._ordered, self._progress = to_prompt, ordered, progress
        self._ahead = threading.Semaphore(_AHEAD * sum(server.slots for server in servers))
        self._load, self._lock = [0] * len(servers), threading.Lock()
        self._reading = False
        self._records: queue.SimpleQueue[tuple[int, dict | None, Any] | None] = queue.SimpleQueue()
        self._broken: BaseException | None = None
        self._shows = servers[0].engine.target.find_tokenizer()

    def run(self, lines: Iterator[tuple[int, bytes]]) -> Tally:
        """Answer every line.

        Args:
            lines: numbered from 1.

        Raises:
            OSError: the output could not be written.
            RuntimeError: a server broke.
        """
        writer = threading.Thread(target=self._write, name="serve-writer", daemon=True)
        writer.start()
        try:
            with self._signals():
                with suppress(_Stop):
                    self._submit_all(lines)
                for server in self._servers:
                    server.close(finish=self.stopped is None)
        except BaseException:
            for server in self._servers:
                server.close(finish=False)
            raise
        finally:
            self._records.put(None)
            writer.join()
        if self._broken is not None:
            raise self._broken
        return self.tally

    def _submit_all(self, lines: Iterator[tuple[int, bytes]]) -> None:
        names: dict[str | int, int] = {}
        order = 0
        while (line := self._next(lines)) is not None:
            number, data = line
            request, error = None, None
            openai = b'"custom_id"' in data
            try:
                request = parse_line(data, number, self._defaults)
                openai = request.form != "native"
                self._check_name(request, names)
            except LineError as wrong:
                error = wrong
            if number in self._journal.answered:
                self._check_same(number, request)
                self.tally.skipped += 1
                continue
            if not self._may_submit():
                return
            if request is not None and error is None:
                error = self._submit(request, order)
            if error is not None:
                self._records.put((order, refusal(error, number, openai=openai), None))
            order += 1
        self._wait()

    def _next(self, lines: Iterator[tuple[int, bytes]]) -> tuple[int, bytes] | None:
        """The next line; a signal ends the wait for it, which may be long on a pipe."""
        self._reading = True
        try:
            return next(lines, None)
        finally:
            self._reading = False

    def _submit(self, request: LineRequest, order: int) -> LineError | None:
        least = min(range(len(self._servers)), key=self._load.__getitem__)
        try:
            prompt = self._to_prompt(request)
            handle = self._servers[least].submit(prompt, request.sampling, incremental=False)
        except ValueError as error:
            return LineError(_blame(request, str(error)), str(error), request.name)
        self._add_load(least, 1)
        handle.when_done(lambda done: self._ended(request, order, least, done))
        return None

    def _ended(self, request: LineRequest, order: int, replica: int, handle: Handle) -> None:
        """In the server's thread: hand the answer to the writer."""
        self._add_load(replica, -1)
        try:
            output = handle.result(0)
        except CancelledError:
            self._records.put((order, None, None))
        except ValueError as error:
            wrong = LineError(_blame(request, str(error)), str(error), request.name)
            record = refusal(wrong, request.number, openai=request.form != "native")
            self._records.put((order, record, None))
        except BaseException as error:
            self._broken = self._broken or error
            self._records.put((order, None, None))
        else:
            try:
                record = answer(request, output, self._token_text)
            except Exception as error:
                self._broken = self._broken or error
                record = None
            self._records.put((order, record, output))

    def _add_load(self, replica: int, change: int) -> None:
        with self._lock:
            self._load[replica] += change

    def _token_text(self, token: int) -> str:
        return "" if self._shows is None else self._shows.decode([token])

    def _write(self) -> None:
        """The writer thread: whatever is there goes out together, and is then on disk."""
        waiting: dict[int, tuple[dict | None, Any]] = {}
        following, ended = 0, False
        while not ended:
            entries = [self._records.get()]
            while not self._records.empty():
                entries.append(self._records.get())
            ended = None in entries
            ready = []
            for entry in entries:
                if entry is None:
                    continue
                if self._ordered:
                    waiting[entry[0]] = entry[1:]
                else:
                    ready.append(entry[1:])
            while following in waiting:
                ready.append(waiting.pop(following))
                following += 1
                # An answer that a stop left out ends the order here; the rest is for --resume.
                if ready[-1][0] is None:
                    following = -1
            records = [record for record, _ in ready if record is not None]
            if records and self._broken is None:
                try:
                    self._journal.write(records)
                except BaseException as error:
                    self._broken = error
            self._count(ready)
            if ready:
                self._ahead.release(len(ready))
            self._progress(self.tally)

    def _count(self, ready: list[tuple[dict | None, Any]]) -> None:
        for record, output in ready:
            if record is None:
                continue
            if output is None:
                self.tally.failed += 1
                continue
            self.tally.answered += 1
            self.tally.prompt_tokens += len(output.prompt_token_ids)
            self.tally.completion_tokens += len(output.token_ids)
            self.tally.rounds += output.stats.rounds

    def _may_submit(self) -> bool:
        """Wait for room; False where the job is over."""
        while self.stopped is None and self._broken is None:
            if self._ahead.acquire(timeout=0.1):
                return True
        return False

    def _wait(self) -> None:
        """Until everything submitted has ended, or the job is over."""
        while self.stopped is None and self._broken is None and any(self._load):
            time.sleep(0.02)

    def _check_name(self, request: LineRequest, names: dict[str | int, int]) -> None:
        first = names.setdefault(request.name, request.number)
        if first != request.number:
            field = "id" if request.form == "native" else "custom_id"
            raise LineError(field, f"line {first} has the same one.", request.name)

    def _check_same(self, number: int, request: LineRequest | None) -> None:
        had = self._journal.answered[number]
        if request is not None and had != request.name:
            raise ValueError(
                f"line {number} is {request.name!r}, but {self._journal.path} answers it as "
                f"{had!r}; the output belongs to another input."
            )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM leave what is not written for --resume; a second one ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number, frame):
            if self.stopped is not None:
                raise KeyboardInterrupt
            self.stopped = number
            if self._reading:
                raise _Stop

        before = {kind: signal.signal(kind, stop) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)


def _blame(request: LineRequest, said: str) -> str:
    """The field that a refusal of the engine is about."""
    prefix = "" if request.form == "native" else "body."
    for name, words in (
        ("logit_bias", "logit_bias"),
        ("max_new_tokens" if not prefix else "max_tokens", "max_new_tokens="),
        ("stop_token_ids", "stop_token_ids"),
        ("logprobs", "logprobs"),
    ):
        if words in said:
            return prefix + name
    return request.prompt_field


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a file, gzipped or not, or of stdin for `-`; blank ones left out.

    Raises:
        ValueError: it cannot be read, or its compression is broken.
    """
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"cannot read {path}: {reason}; expected a JSONL file of requests, perhaps gzipped."
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    file: Any = gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
    with file:
        yield file


def count_lines(path: Path) -> int | None:
    """How many requests a file holds; None for what can be read only once.

    Raises:
        ValueError: as `read_lines`.
    """
    if str(path) == "-" or (path.exists() and not path.is_file()):
        return None
    return sum(1 for _ in read_lines(path))
