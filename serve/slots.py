"""The device's side of a server: a fixed number of slots, refilled in place.

Newcomers are prefilled by the engine's own chunks in a small state of their own, beside the running
one. Their rows are then written over those of free slots, by one function over the whole state, so
that neither the number of slots nor a drafter's kind of state matters, and nothing recompiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.engine import Engine
from jspec.engine.prefill import MAX_CHUNK, chunk_plan
from jspec.engine.requests import Form, Slot, tabulate, widen
from jspec.engine.state import DecodeState
from serve.devices import Placement
from serve.memory import admission_size

_SMALL_GROUP = 4
"""Newcomers are prefilled alone, by fours, or as many as memory was planned for."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """What a piece of up to Q rounds brought; W = Q P + 1. Copies, which no later piece touches.

    Attributes:
        start: index of the root before the piece, [B] int32.
        tokens: from the root on, [B, W] int32.
        lengths, reason: after the piece, [B] int32.
        rounds: done in the piece, [B] int32.
        emitted, correct, drafted: of each, [B, Q] int32.
        chosen, top_ids, top: log-probabilities in the tokens' places, [B, W] and [B, W, N].
    """

    start: Int[Array, "B"]
    tokens: Int[Array, "B W"]
    lengths: Int[Array, "B"]
    reason: Int[Array, "B"]
    rounds: Int[Array, "B"]
    emitted: Int[Array, "B Q"]
    correct: Int[Array, "B Q"]
    drafted: Int[Array, "B Q"]
    chosen: Float[Array, "B W"] | None = None
    top_ids: Int[Array, "B W N"] | None = None
    top: Float[Array, "B W N"] | None = None


@dataclass
class Newcomers:
    """Requests on their way into slots.

    Attributes:
        slots: the requests.
        state: they are prefilled in; rows after the last request are empty.
        chunks: still to run.
        sampled: whether any of them samples.
    """

    slots: list[Slot]
    state: DecodeState
    chunks: list[tuple[int, int]]
    sampled: bool

    @property
    def ready(self) -> bool:
        """Whether every one has its root."""
        return not self.chunks


class SlotTable:
    """B slots of S tokens on the device."""

    def __init__(
        self,
        engine: Engine,
        count: int,
        capacity: int,
        rounds: int,
        placement: Placement | None = None,
    ):
        """Allocate empty slots.

        Args:
            engine: whose compiled functions run.
            count: B.
            capacity: S.
            rounds: Q, at most this many a piece.
            placement: over the devices that the weights are split over.
        """
        self.engine, self.count, self.capacity, self.rounds = engine, count, capacity, rounds
        self.form, self.placement = Form(), placement
        requests, prompts = tabulate(engine, [], count, capacity, self.form)
        self.state = engine.run_start(requests, prompts, capacity=capacity, max_rounds=capacity)
        if placement is not None:
            self.state = placement.put(self.state)

    def room(self, prompts: Sequence[list[int]]) -> int:
        """How many of the first waiting prompts to prefill together: those of the first's width."""
        widths = [_width(len(prompt)) for prompt in prompts]
        if widths[0] > MAX_CHUNK:
            return 1
        most = admission_size(self.count, widths[0])
        same = next((i for i, width in enumerate(widths) if width != widths[0]), len(widths))
        if same < most:  # a full group of the next smaller size, rather than one half empty
            most = min(most, _SMALL_GROUP)
        return min(same, most)

    def welcome(self, slots: list[Slot]) -> Newcomers:
        """Lay out the prompts of `room` requests; nothing has run yet."""
        self._fit(Form.of(slots))
        longest = max(len(slot.prompt) for slot in slots)
        width = _width(longest)
        chunks = chunk_plan(longest)
        capacity = width if width <= MAX_CHUNK else self.capacity
        if width <= MAX_CHUNK:
            chunks = [(0, width)]
        # Few sizes, so that few programs serve every number of newcomers.
        most = admission_size(self.count, width)
        size = next((size for size in (1, _SMALL_GROUP) if len(slots) <= size <= most), most)
        requests, prompts = tabulate(self.engine, slots, size, capacity, self.form)
        state = self.engine.run_start(
            requests, prompts, capacity=capacity, max_rounds=1, logprobs=self.form.logprobs
        )
        sampled = any(slot.sampling.temperature > 0 for slot in slots)
        return Newcomers(slots, state, chunks, sampled)

    def prefill(self, newcomers: Newcomers) -> None:
        """Enqueue the next chunk."""
        offset, width = newcomers.chunks.pop(0)
        newcomers.state = self.engine.run_prefill(
            self.engine.params,
            newcomers.state,
            jnp.asarray(offset, jnp.int32),
            width=width,
            first=offset == 0,
            sampled=newcomers.sampled,
        )

    def seat(self, newcomers: Newcomers, places: Sequence[int]) -> None:
        """Write them over the slots `places`, in order."""
        at = np.full((newcomers.state.tokens.shape[0],), self.count, np.int32)
        at[: len(places)] = places
        self.state = _put_rows(self.placement, self.state, newcomers.state, jnp.asarray(at))

    def run(self, rounds: int, *, sampled: bool) -> Report:
        """Enqueue up to `rounds` rounds of every running slot."""
        self.state, report = _piece(
            self.engine,
            self.rounds,
            self.placement,
            self.engine.params,
            self.state,
            jnp.asarray(rounds, jnp.int32),
            sampled=sampled,
        )
        return report

    def halt(self, places: Sequence[int]) -> None:
        """Enqueue the end of these slots."""
        halted = np.zeros((self.count,), bool)
        halted[list(places)] = True
        self.state = self.engine.halt_slots(self.state, jnp.asarray(halted))

    def _fit(self, form: Form) -> None:
        """Make room in the tables; they never shrink, so each form compiles once."""
        joined = self.form.join(form)
        if joined != self.form:
            self.form = joined
            self.state = widen(self.engine, self.state, joined)
            if self.placement is not None:
                self.state = self.placement.put(self.state)


def _width(tokens: int) -> int:
    """Of the single chunk that holds a short prompt; longer ones have chunks of several widths."""
    return max(32, 1 << (tokens - 1).bit_length())


@partial(
    jax.jit, static_argnames=("engine", "most", "placement", "sampled"), donate_argnames="state"
)
def _piece(
    engine: Engine,
    most: int,
    placement: Placement | None,
    params,
    state: DecodeState,
    rounds,
    *,
    sampled: bool,
):
    """Up to `rounds` rounds, and what is worth telling of them."""
    start, before = state.lengths, state.log.rounds
    state = engine.run_rounds(params, state, rounds, sampled=sampled)
    width = most * engine.round.path_width + 1

    def window(rows, first, size: int):
        place = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
        place = jnp.minimum(place, rows.shape[1] - 1)
        return rows[jnp.arange(rows.shape[0])[:, None], place]

    log = state.log
    report = Report(
        start=start,
        tokens=window(state.tokens, start, width),
        lengths=state.lengths,
        reason=state.reason,
        rounds=log.rounds - before,
        emitted=window(log.emitted, before, most),
        correct=window(log.correct, before, most),
        drafted=window(log.drafted, before, most),
    )
    if state.logprobs is not None:
        report = replace(
            report,
            chosen=window(state.logprobs.chosen, start, width),
            top_ids=window(state.logprobs.top_ids, start, width),
            top=window(state.logprobs.top, start, width),
        )
    # A copy each: the state's own buffers are given to the next piece.
    return _pinned(placement, state), jax.tree.map(jnp.copy, report)


def _pinned(placement: Placement | None, state: DecodeState) -> DecodeState:
    """Where it was, so that the next piece finds it as this one did."""
    return state if placement is None else placement.constrain(state)


@partial(jax.jit, static_argnames="placement", donate_argnames="state")
def _put_rows(
    placement: Placement | None, state: DecodeState, rows: DecodeState, at: Int[Array, "A"]
) -> DecodeState:
    """Row i of every leaf of `rows` over row at[i] of `state`; places past the last are dropped.

    Rows may differ along the second axis (caches, tokens, logs): what lies behind the shorter is
    not read before it is written.
    """

    def put(old, new):
        if old.shape[1:] == new.shape[1:]:
            return old.at[at].set(new, mode="drop")
        common = min(old.shape[1], new.shape[1])
        return old.at[at, :common].set(new[:, :common], mode="drop")

    return _pinned(placement, jax.tree.map(put, state, rows))
