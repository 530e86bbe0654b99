"""One generation of a fixed number of slots, as the host sees it."""

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jspec.engine.output import Output, Update
from jspec.engine.prefill import MAX_CHUNK, capacity_bucket, chunk_plan
from jspec.engine.state import (
    FAILED,
    FINISH_REASONS,
    RUNNING,
    STOPPED,
    DecodeState,
    Requests,
)
from jspec.engine.stats import read_stats
from jspec.engine.text import TextBuilder
from jspec.sampling import SamplingParams, Shaping
from jspec.trees.view import RoundView, view_round

if TYPE_CHECKING:
    from jspec.engine.engine import Engine


@dataclass
class Slot:
    """The host's record of one request."""

    prompt: list[int]
    sampling: SamplingParams
    limit: int
    ends: frozenset[int]
    text: TextBuilder | None
    taken: int = 0  # generated tokens read so far
    ended: int | None = None  # tokens up to the one that completed a stop string


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
        self.slots = [self._slot(ids, asked, incremental) for ids, asked in zip(prompts, sampling)]
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
            raise ValueError(
                f"request {slot} of the batch: no token is possible at place {place} of the "
                "output: logit_bias and banned_token_ids leave none, or the target's logits are "
                "not finite."
            )
        generated = self._tokens[slot, len(record.prompt) : known].tolist()
        count = len(generated) if record.ended is None else record.ended
        simulated = engine.round.simulate_accept_length is not None
        rule = engine.round.rule_for(record.sampling.temperature > 0).name
        stats = read_stats(
            self._log,
            slot,
            num_steps=engine.round.path_width - 1,
            drafter="none" if engine.drafter is None else engine.drafter.name,
            rule="simulated" if simulated else rule,
            max_tokens=count,
        )
        return Output(
            prompt_token_ids=record.prompt,
            token_ids=generated[:count],
            text=self._text(record, generated[:count]),
            finish_reason=FINISH_REASONS[int(self._reason[slot])],
            stats=stats,
            simulated=simulated,
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

    def _slot(self, ids: list[int], asked: SamplingParams, incremental: bool) -> Slot:
        target = self.engine.target
        limit = min(len(ids) + asked.max_new_tokens, target.config.max_context)
        ends = frozenset(asked.stop_token_ids)
        if not asked.ignore_eos:
            ends |= target.eos_token_ids
        if asked.stop or (incremental and self.tokenizer is not None):
            # Without a tokenizer this raises: stop strings need one.
            text = TextBuilder(target.tokenizer, asked.stop, ends)
        else:
            text = None
        return Slot(ids, asked, limit, ends, text)

    def _text(self, slot: Slot, token_ids: list[int]) -> str | None:
        if slot.text is not None:
            return slot.text.text
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(token for token in token_ids if token not in slot.ends)

    def _prefilled(self, slots: int) -> DecodeState:
        engine = self.engine
        longest = max(len(slot.prompt) for slot in self.slots)
        state = engine.run_start(
            *self._requests(slots),
            capacity=self._capacity(),
            max_rounds=self.max_rounds,
            logprobs=self._logprobs(),
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

    def _logprobs(self) -> int | None:
        """The most likeliest tokens that any request wants scored; None where none wants any."""
        wanted = [slot.sampling.logprobs for slot in self.slots]
        return max((count for count in wanted if count is not None), default=None)

    def _capacity(self) -> int:
        return capacity_bucket(max(slot.limit for slot in self.slots))

    def _requests(self, slots: int) -> tuple[Requests, jax.Array]:
        """What is asked of each slot, and its prompt, padded with zeros."""
        # Simulated text is not real: it runs to its limit.
        simulated = self.engine.round.simulate_accept_length is not None
        stop_lists = [[] if simulated else sorted(slot.ends) for slot in self.slots]
        width = 4 * max(1, -(-max(map(len, stop_lists)) // 4))
        prompts = np.zeros((slots, self._capacity() + MAX_CHUNK + 1), np.int32)
        prompt_lengths = np.zeros((slots,), np.int32)
        limits = np.zeros((slots,), np.int32)
        stop_ids = np.full((slots, width), -1, np.int32)
        temperature = np.zeros((slots,), np.float32)
        keys = np.zeros((slots, 2), np.uint32)
        for index, slot in enumerate(self.slots):
            prompts[index, : len(slot.prompt)] = slot.prompt
            prompt_lengths[index] = len(slot.prompt)
            limits[index] = slot.limit
            stop_ids[index, : len(stop_lists[index])] = stop_lists[index]
            temperature[index] = slot.sampling.temperature
            seed = slot.sampling.seed
            seed = secrets.randbits(63) if seed is None else seed
            keys[index] = seed >> 32, seed & 0xFFFFFFFF
        asked = (prompt_lengths, limits, stop_ids, temperature, keys)
        shaping = Shaping.of(
            [slot.sampling for slot in self.slots], slots, self.engine.target.config.vocab_size
        )
        return Requests(*map(jnp.asarray, asked), shaping=shaping), jnp.asarray(prompts)

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
            slot.taken = len(generated)
            return []
        marks = read_stats(
            self._log, index, num_steps=0, drafter="", rule="", max_tokens=len(generated)
        ).from_draft()
        pieces = []
        for place in range(slot.taken, len(generated)):
            pieces += slot.text.push(generated[place], marks[place])
            if slot.text.stopped:
                slot.ended = place + 1
                break
        slot.taken = len(generated)
        if self._reason[index] != RUNNING and slot.ended is None:
            pieces += slot.text.flush()
        return pieces

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
