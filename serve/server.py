"""Continuous batching: requests in at any time, each in a slot of its own until its text ends.

One thread enqueues work for the device: a chunk of the newcomers' prefill, then a piece of several
rounds of everybody, then the next. It reads a piece only after the next one is on its way, so the
device does not wait for the host. A second thread makes text of what was read.
"""

import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jspec.engine import Engine, Prompt
from jspec.engine.prefill import capacity_bucket
from jspec.engine.requests import Form, Slot
from jspec.engine.state import RUNNING
from jspec.sampling import SamplingParams, check_tokens
from serve.devices import Replica
from serve.memory import MemoryPlan, default_limit, plan_memory
from serve.seat import Handle, Seat, SlotReport, withdrawn
from serve.slots import Newcomers, Report, SlotTable

MAX_LOGPROBS = 20
"""The most likeliest tokens that a request may have scored; memory is planned for them."""

_WIDEST = Form(
    stop_width=64,
    columns=frozenset(("top_k", "top_p", "min_p", "repetition", "presence", "frequency", "bias")),
    forced=64,
    logprobs=MAX_LOGPROBS,
    limits_draft=True,
)
"""All that requests may ask for; memory is planned for it."""


@dataclass
class Counters:
    """What a server has done.

    Attributes:
        requests: finished, failed or withdrawn.
        tokens: emitted.
        rounds: of all slots together, those of the prefill not counted.
        seated: slots occupied, summed over pieces; occupancy is seated / (pieces · slots).
        pieces: enqueued.
    """

    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    seated: int = 0
    pieces: int = 0


class Server:
    """Serves one engine on its device.

    with serve.Server(engine, slots=8, capacity=1024) as server:
        handles = [server.submit(prompt) for prompt in prompts]
        texts = [handle.result().text for handle in handles]

    Every output equals the engine's own `generate` for that request, whatever its neighbours.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        slots: int = 8,
        capacity: int = 2048,
        rounds: int = 8,
        memory_limit: int | None = None,
        replica: Replica | None = None,
    ):
        """Plan the memory, take it, and start.

        Args:
            engine: a target, perhaps with a drafter.
            slots: B, requests that run side by side.
            capacity: tokens that a request's prompt and text may have together; rounded up, and
                never above the target's context.
            rounds: between looks of the host; what a slot is late to end is lost.
            memory_limit: bytes; default what the device has.
            replica: where the engine's weights are, from `serve.devices`; default JAX's own device.

        Raises:
            ValueError: slots or rounds below 1, or a plan above the limit, with the numbers.
        """
        for name, value in (("slots", slots), ("rounds", rounds), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"{name}={value}; expected at least 1.")
        self.engine = engine
        self.slots = slots
        self.max_tokens = min(capacity, engine.target.config.max_context)
        self.counters = Counters()
        room = capacity_bucket(self.max_tokens)
        split = replica.placement.size if replica is not None and replica.placement else 1
        self.plan: MemoryPlan = plan_memory(engine, slots, room, _WIDEST, split=split)
        self.plan.check(default_limit() if memory_limit is None else memory_limit)
        self._device = None if replica is None else replica.device
        self._rounds = rounds
        with self._on_device():
            placement = None if replica is None else replica.placement
            self._table = SlotTable(engine, slots, room, rounds, placement)
        self._seats: list[Seat | None] = [None] * slots
        self._waiting: deque[Seat] = deque()
        self._live: set[Seat] = set()
        self._newcomers: Newcomers | None = None
        self._arriving: list[Seat] = []
        self._unread: tuple[Report, list[tuple[int, Seat]]] | None = None
        self._inbox: queue.SimpleQueue[tuple[str, Seat | None]] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[tuple[Seat, SlotReport] | None] = queue.SimpleQueue()
        self._closed = False
        self._broken: BaseException | None = None
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="serve-text", daemon=True)
        self._loop = threading.Thread(target=self._serve, name="serve-device", daemon=True)
        self._reader.start()
        self._loop.start()

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        incremental: bool = True,
    ) -> Handle:
        """Ask for one text. May be called from any thread.

        Args:
            prompt: text, token ids or chat messages.
            sampling: default greedy, 128 tokens.
            incremental: build the text as it comes, for who iterates over the handle; without it
                only the end has text.

        Raises:
            ValueError: a request that cannot be served, with the reason.
            RuntimeError: the server is closed, or broke.
        """
        asked = SamplingParams() if sampling is None else sampling
        ids = self.engine.encode(prompt)
        check_tokens([asked], self.engine.target.config.vocab_size)
        if asked.logprobs is not None and asked.logprobs > MAX_LOGPROBS:
            raise ValueError(f"logprobs={asked.logprobs}; expected at most {MAX_LOGPROBS}.")
        slot = Slot.of(self.engine, ids, asked, incremental=incremental)
        for name, have in (("stop_token_ids", slot.ends), ("forced", asked.forced_token_ids)):
            if len(have) > _WIDEST.stop_width:
                raise ValueError(f"{len(have)} {name}; expected at most {_WIDEST.stop_width}.")
        if slot.limit > self.max_tokens:
            raise ValueError(
                f"the request needs {slot.limit} tokens (a prompt of {len(ids)} and "
                f"max_new_tokens={asked.max_new_tokens}), but a slot holds {self.max_tokens}; "
                "lower max_new_tokens or raise the server's capacity."
            )
        seat: Seat
        handle = Handle(lambda: self._inbox.put(("withdraw", seat)))
        seat = Seat(slot, handle, slot.limit - len(ids) - 1)
        with self._lock:
            if self._closed:
                raise RuntimeError("the server is closed.") from self._broken
            self._inbox.put(("serve", seat))
        return handle

    @property
    def idle(self) -> bool:
        """Whether every slot is free and nobody waits."""
        return not (self._waiting or self._arriving or self._unread or any(self._seats))

    def close(self, *, finish: bool = True) -> None:
        """Stop; requests are finished first, or withdrawn."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(("finish" if finish else "drop", None))
        self._loop.join()
        self._reader.join()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close(finish=kind is None)

    def _on_device(self):
        return nullcontext() if self._device is None else jax.default_device(self._device)

    def _serve(self) -> None:
        try:
            with self._on_device():
                while self._listen():
                    self._fill()
                    unread, self._unread = self._unread, self._run()
                    if unread is not None:
                        self._fetch(*unread)
        except BaseException as error:
            self._broken = error
        finally:
            with self._lock:
                self._closed = True
            self._to_read.put(None)
            self._reader.join()
            error = self._broken or withdrawn()
            left = list(self._live)
            while not self._inbox.empty():
                kind, seat = self._inbox.get()
                left += [seat] if kind == "serve" and seat is not None else []
            for seat in left:
                seat.handle._failed(error)

    def _listen(self) -> bool:
        """Take in what others asked; waits where there is nothing else to do."""
        while True:
            if self._closed and self.idle and self._inbox.empty():
                return False
            try:
                kind, seat = self._inbox.get(block=self.idle)
            except queue.Empty:
                return True
            if kind == "drop":
                return False
            if kind == "serve" and seat is not None:
                self._waiting.append(seat)
                self._live.add(seat)
            elif seat is not None:
                self._end(seat, withdraw=kind == "withdraw")

    def _end(self, seat: Seat, *, withdraw: bool) -> None:
        """Free a seat whose text is not wanted any more, or ended at a stop string."""
        if seat in self._waiting:
            self._waiting.remove(seat)
        if seat in self._seats:
            place = self._seats.index(seat)
            self._table.halt([place])
            self._seats[place] = None
        if not seat.done:
            self._finish(seat)
        if withdraw:
            seat.handle._failed(withdrawn())

    def _finish(self, seat: Seat) -> None:
        """Read nothing more for it."""
        seat.done = True
        self.counters.requests += 1
        self._live.discard(seat)

    def _fill(self) -> None:
        """Seat whom one chunk takes in before the next piece, in which an empty slot costs as much
        as a running one. Longer prompts go chunk by chunk, a piece of the others between two."""
        self._admit()
        while self._newcomers is None and self._waiting and None in self._seats:
            self._admit()

    def _admit(self) -> None:
        """Move waiting requests one step towards free slots."""
        if self._newcomers is None:
            free = self._seats.count(None)
            if not (free and self._waiting):
                return
            first = [seat.slot.prompt for _, seat in zip(range(free), self._waiting)]
            count = self._table.room(first)
            self._arriving = [self._waiting.popleft() for _ in range(count)]
            self._newcomers = self._table.welcome([seat.slot for seat in self._arriving])
        self._table.prefill(self._newcomers)
        if not self._newcomers.ready:
            return
        places = [place for place, seat in enumerate(self._seats) if seat is None]
        places = places[: len(self._arriving)]
        self._table.seat(self._newcomers, places)
        for place, seat in zip(places, self._arriving):
            self._seats[place] = seat
        withdrawn_ones = [seat for seat in self._arriving if seat.done]
        self._newcomers, self._arriving = None, []
        for seat in withdrawn_ones:
            self._end(seat, withdraw=False)

    def _run(self) -> tuple[Report, list[tuple[int, Seat]]] | None:
        """Enqueue a piece, where anybody is seated."""
        seated = [(place, seat) for place, seat in enumerate(self._seats) if seat is not None]
        if not seated:
            return None
        rounds = self._rounds
        if self._waiting or self._newcomers is not None:
            # A slot that is certain to end is refilled at once.
            rounds = max(1, min(rounds, *(seat.left for _, seat in seated)))
        sampled = any(seat.slot.sampling.temperature > 0 for _, seat in seated)
        report = self._table.run(rounds, sampled=sampled)
        self.counters.pieces += 1
        self.counters.seated += len(seated)
        for place, seat in seated:
            seat.left -= rounds
            if seat.left <= 0:
                self._seats[place] = None
        return report, seated

    def _fetch(self, report: Report, seated: Sequence[tuple[int, Seat]]) -> None:
        """Read a piece and hand it on."""
        got: Any = jax.device_get(report)
        for place, seat in seated:
            if seat.done:
                continue
            done = int(got.rounds[place])
            share = SlotReport(
                int(got.start[place]),
                got.tokens[place],
                int(got.lengths[place]),
                int(got.reason[place]),
                got.emitted[place, :done].tolist(),
                got.correct[place, :done].tolist(),
                got.drafted[place, :done].tolist(),
                *(None if x is None else x[place] for x in (got.chosen, got.top_ids, got.top)),
            )
            self.counters.rounds += done
            self.counters.tokens += sum(share.emitted)
            if share.reason != RUNNING:
                self._finish(seat)
                if self._seats[place] is seat:
                    self._seats[place] = None
            self._to_read.put((seat, share))

    def _read(self) -> None:
        """The second thread: tokens to text, and stop strings."""
        while (entry := self._to_read.get()) is not None:
            seat, share = entry
            if seat.handle.done:
                continue
            try:
                ended = seat.read(self.engine, share)
            except Exception as error:
                seat.handle._failed(error)
                ended = True
            if ended and share.reason == RUNNING:
                self._inbox.put(("ended", seat))


def occupancy(counters: Counters, slots: int) -> float:
    """Share of slots that were taken, mean over pieces; NaN before the first."""
    total = counters.pieces * slots
    return float(np.divide(counters.seated, total)) if total else float("nan")
