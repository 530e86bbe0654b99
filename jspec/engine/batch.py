"""One generation of a fixed number of slots, as the host sees it."""

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jspec.engine.output import Output, Update
from jspec.engine.prefill import capacity_bucket, chunk_plan
from jspec.engine.requests import Form, Slot, no_token, tabulate
from jspec.engine.state import (
    FAILED,
    FINISH_REASONS,
    RUNNING,
    STOPPED,
    DecodeState,
)
from jspec.engine.stats import read_stats
from jspec.sampling import SamplingParams
from jspec.trees.view import RoundView, view_round

if TYPE_CHECKING:
    from jspec.engine.engine import Engine


class Batch:
    """One generation of a fixed number of slots; unused slots are finished from the start."""

    def __init__(
        self,
        engine: "Engine",
        prompts: list[list[int]],
        sampling: list[SamplingParams],
        slots: int,
        *,
        incremental: bool,
    ):
        """Prefill the prompts.

        Args:
            engine: whose target, drafter and compiled functions are used.
            prompts: token ids, at most `slots` of them.
            sampling: one per prompt.
            slots: B.
            incremental: build the texts token by token, as streaming and stop strings need.
        """
        self.engine = engine
        self.tokenizer = engine.target.find_tokenizer()
        self.slots = [
            Slot.of(engine, ids, asked, incremental=incremental)
            for ids, asked in zip(prompts, sampling)
        ]
        self.sampled = any(params.temperature > 0 for params in sampling)
        self.max_rounds = 16
        while self.max_rounds < max(slot.limit - len(slot.prompt) for slot in self.slots):
            self.max_rounds *= 2
        self.state = self._prefilled(slots)
        self._read()

    @property
    def running(self) -> bool:
        """Whether any request is unfinished."""
        return bool(np.any(self._reason == RUNNING))

    def advance(self, rounds: int) -> None:
        """Run up to `rounds` rounds, then look at the texts."""
        self.state = self.engine.run_rounds(
            self.engine.params, self.state, jnp.asarray(rounds, jnp.int32), sampled=self.sampled
        )
        self._read()

    def update(self, slot: int) -> Update:
        """What slot's last `advance` brought."""
        new = self._new[slot]
        finished = self._reason[slot] != RUNNING
        pieces = list(self._pieces[slot])
        output = self.output(slot) if finished else None
        return Update(pieces=pieces, token_ids=new, round=self._view(slot), output=output)

    def output(self, slot: int) -> Output:
        """The finished text of a slot.

        Raises:
            ValueError: at some place no token was possible.
        """
        record, engine = self.slots[slot], self.engine
        known = int(self._lengths[slot]) + 1
        if self._reason[slot] == FAILED:
            # Where the prefill failed, not even a root is known.
            place = known - len(record.prompt) - int(self._log.rounds[slot] == 0)
            raise ValueError(f"request {slot} of the batch: {no_token(place)}")
        generated = self._tokens[slot, len(record.prompt) : known].tolist()
        count = record.count(generated)
        return record.output(
            engine,
            generated,
            FINISH_REASONS[int(self._reason[slot])],
            self._log,
            slot,
            **self._logprobs_of(record, slot, count),
        )

    def _logprobs_of(self, record: Slot, slot: int, count: int) -> dict[str, list]:
        log, wanted = self.state.logprobs, record.sampling.logprobs
        if log is None or wanted is None:
            return {}
        text = slice(len(record.prompt), len(record.prompt) + count)
        chosen, ids, top = jax.device_get(
            (log.chosen[slot, text], log.top_ids[slot, text], log.top[slot, text])
        )
        tops = [dict(zip(i[:wanted].tolist(), t[:wanted].tolist())) for i, t in zip(ids, top)]
        return {"logprobs": chosen.tolist(), "top_logprobs": tops}

    def _prefilled(self, slots: int) -> DecodeState:
        engine = self.engine
        longest = max(len(slot.prompt) for slot in self.slots)
        form, capacity = Form.of(self.slots), self._capacity()
        state = engine.run_start(
            *tabulate(engine, self.slots, slots, capacity, form),
            capacity=capacity,
            max_rounds=self.max_rounds,
            logprobs=form.logprobs,
        )
        for index, (offset, width) in enumerate(chunk_plan(longest)):
            state = engine.run_prefill(
                engine.params,
                state,
                jnp.asarray(offset, jnp.int32),
                width=width,
                first=index == 0,
                sampled=self.sampled,
            )
        return state

    def _capacity(self) -> int:
        return capacity_bucket(max(slot.limit for slot in self.slots))

    def _read(self) -> None:
        """Bring the round's results to the host and carry the texts forward."""
        state = self.state
        self._tokens, self._lengths, self._reason, self._log, self._last = jax.device_get(
            (state.tokens, state.lengths, state.reason, state.log, state.last)
        )
        self._reason = np.array(self._reason)
        self._new: list[list[int]] = []
        self._pieces: list[list] = []
        halted = np.zeros(self._reason.shape, bool)
        for index, slot in enumerate(self.slots):
            known = int(self._lengths[index]) + 1
            generated = self._tokens[index, len(slot.prompt) : known].tolist()
            if self._reason[index] == FAILED:
                generated = generated[: slot.taken]
            self._new.append(generated[slot.taken :])
            self._pieces.append(self._texts(index, slot, generated))
            if slot.ended is not None and self._reason[index] == RUNNING:
                halted[index] = True
            if slot.ended is not None:
                self._reason[index] = STOPPED
        if halted.any():
            self.state = self.engine.halt_slots(self.state, jnp.asarray(halted))

    def _texts(self, index: int, slot: Slot, generated: list[int]) -> list:
        if slot.text is None or slot.ended is not None:
            return slot.take_in(generated, [], finished=False)
        marks = read_stats(
            self._log, index, num_steps=0, drafter="", rule="", max_tokens=len(generated)
        ).from_draft()
        return slot.take_in(generated, marks, finished=bool(self._reason[index] != RUNNING))

    def _view(self, slot: int) -> RoundView | None:
        length = int(self._last.path_length[slot])
        if length == 0:
            return None
        emitted = int(self._log.emitted[slot, int(self._log.rounds[slot]) - 1])
        # A run that a stop or a limit cut ends with a drafted token.
        whole = emitted == length
        bonus = int(self._tokens[slot, int(self._lengths[slot])]) if whole else None
        return view_round(self._last.tree, self._last.path[slot], length, slot, bonus)


def halt(state: DecodeState, slots) -> DecodeState:
    """End slots whose text met a stop string."""
    return replace(state, reason=jnp.where(slots, STOPPED, state.reason))
