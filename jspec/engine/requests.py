"""Requests as the host keeps them, and as tables on the device."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jspec.engine.output import Output
from jspec.engine.prefill import MAX_CHUNK
from jspec.engine.state import DecodeState, Requests, RoundLog
from jspec.engine.stats import read_stats
from jspec.engine.text import Piece, TextBuilder
from jspec.sampling import (
    History,
    LogprobLog,
    SamplingParams,
    Shaping,
    asked_columns,
    forced_width,
)

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

    @classmethod
    def of(
        cls, engine: "Engine", ids: list[int], asked: SamplingParams, *, incremental: bool
    ) -> "Slot":
        """Of a prompt that `Engine.encode` made.

        Args:
            engine: that will serve it.
            ids: of the prompt.
            asked: how to go on.
            incremental: build the text token by token, also where no stop string needs it.

        Raises:
            ValueError: stop strings, but no tokenizer.
        """
        target = engine.target
        limit = min(len(ids) + asked.max_new_tokens, target.config.max_context)
        ends = frozenset(asked.stop_token_ids)
        if not asked.ignore_eos:
            ends |= target.eos_token_ids
        if asked.stop or (incremental and target.find_tokenizer() is not None):
            # Without a tokenizer this raises: stop strings need one.
            text = TextBuilder(target.tokenizer, asked.stop, ends)
        else:
            text = None
        return cls(ids, asked, limit, ends, text)

    def take_in(self, generated: list[int], marks: list[bool], *, finished: bool) -> list[Piece]:
        """Carry the text forward.

        Args:
            generated: every token so far.
            marks: of each, whether the drafter wrote it.
            finished: no token follows.

        Returns:
            The text that became certain.
        """
        start, self.taken = self.taken, len(generated)
        pieces: list[Piece] = []
        if self.text is None or self.ended is not None:
            return pieces
        for place in range(start, len(generated)):
            pieces += self.text.push(generated[place], marks[place])
            if self.text.stopped:
                self.ended = place + 1
                break
        if finished and self.ended is None:
            pieces += self.text.flush()
            # Text that was held back may complete a stop string.
            self.ended = len(generated) if self.text.stopped else None
        return pieces

    def count(self, generated: list[int]) -> int:
        """How many of the tokens belong to the text."""
        return len(generated) if self.ended is None else self.ended

    def output(
        self,
        engine: "Engine",
        generated: list[int],
        finish_reason: str,
        log: RoundLog,
        row: int,
        **logprobs: list,
    ) -> Output:
        """The finished text.

        Args:
            engine: that made it.
            generated: every token, also those after a stop string.
            finish_reason: see `Output`.
            log: of the rounds, on the host.
            row: of the log.
            logprobs: of the tokens of the text, where they were wanted.
        """
        count, round_ = self.count(generated), engine.round
        simulated = round_.simulate_accept_length is not None
        rule = round_.rule_for(self.sampling.temperature > 0).name
        stats = read_stats(
            log,
            row,
            num_steps=round_.path_width - 1,
            drafter="none" if engine.drafter is None else engine.drafter.name,
            rule="simulated" if simulated else rule,
            max_tokens=count,
        )
        return Output(
            prompt_token_ids=self.prompt,
            token_ids=generated[:count],
            text=self._text(engine, generated[:count]),
            finish_reason=finish_reason,
            stats=stats,
            simulated=simulated,
            **logprobs,
        )

    def _text(self, engine: "Engine", token_ids: list[int]) -> str | None:
        if self.text is not None:
            return self.text.text
        tokenizer = engine.target.find_tokenizer()
        if tokenizer is None:
            return None
        return tokenizer.decode(token for token in token_ids if token not in self.ends)


def no_token(place: int) -> str:
    """Why a text failed at a place."""
    return (
        f"no token is possible at place {place} of the output: logit_bias and banned_token_ids "
        "leave none, or the target's logits are not finite."
    )


@dataclass(frozen=True)
class Form:
    """What the tables have room for beside what they always have; it decides their shapes.

    Attributes:
        stop_width: end tokens a request.
        columns: of `Shaping`, forced tokens apart.
        forced: forced tokens a request.
        logprobs: likeliest tokens scored at each place; None scores nothing.
        limits_draft: whether a request may draft less than the tree.
    """

    stop_width: int = 4
    columns: frozenset[str] = frozenset()
    forced: int = 0
    logprobs: int | None = None
    limits_draft: bool = False

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> "Form":
        """The smallest that holds these requests."""
        asked = [slot.sampling for slot in slots]
        widest = max((len(slot.ends) for slot in slots), default=0)
        wanted = [params.logprobs for params in asked if params.logprobs is not None]
        return cls(
            stop_width=4 * max(1, -(-widest // 4)),
            columns=asked_columns(asked),
            forced=forced_width(asked),
            logprobs=max(wanted, default=None),
            limits_draft=any(params.num_steps is not None for params in asked),
        )

    def join(self, other: "Form") -> "Form":
        """The smallest that holds both."""
        logprobs = [n for n in (self.logprobs, other.logprobs) if n is not None]
        return Form(
            max(self.stop_width, other.stop_width),
            self.columns | other.columns,
            max(self.forced, other.forced),
            max(logprobs, default=None),
            self.limits_draft or other.limits_draft,
        )


def tabulate(
    engine: "Engine", slots: Sequence[Slot], count: int, capacity: int, form: Form
) -> tuple[Requests, jax.Array]:
    """What is asked of each slot, and its prompt, padded with zeros to capacity + MAX_CHUNK + 1.

    Args:
        engine: that serves them.
        slots: the requests, at most `count`; the other slots have no prompt.
        count: B.
        capacity: S.
        form: at least theirs.
    """
    # Simulated text is not real: it runs to its limit.
    simulated = engine.round.simulate_accept_length is not None
    prompts = np.zeros((count, capacity + MAX_CHUNK + 1), np.int32)
    prompt_lengths = np.zeros((count,), np.int32)
    limits = np.zeros((count,), np.int32)
    stop_ids = np.full((count, form.stop_width), -1, np.int32)
    temperature = np.zeros((count,), np.float32)
    keys = np.zeros((count, 2), np.uint32)
    levels = np.full((count,), engine.round.path_width, np.int32)
    for index, slot in enumerate(slots):
        prompts[index, : len(slot.prompt)] = slot.prompt
        prompt_lengths[index] = len(slot.prompt)
        limits[index] = slot.limit
        stops = [] if simulated else sorted(slot.ends)
        stop_ids[index, : len(stops)] = stops
        temperature[index] = slot.sampling.temperature
        seed = slot.sampling.seed
        seed = secrets.randbits(63) if seed is None else seed
        keys[index] = seed >> 32, seed & 0xFFFFFFFF
        if slot.sampling.num_steps is not None:
            levels[index] = min(slot.sampling.num_steps, levels[index])
    shaping = Shaping.of(
        [slot.sampling for slot in slots],
        count,
        engine.target.config.vocab_size,
        columns=form.columns,
        forced=form.forced,
    )
    asked = (prompt_lengths, limits, stop_ids, temperature, keys)
    requests = Requests(
        *map(jnp.asarray, asked),
        shaping=shaping,
        num_steps=jnp.asarray(levels) if form.limits_draft else None,
    )
    return requests, jnp.asarray(prompts)


def widen(engine: "Engine", state: DecodeState, form: Form) -> DecodeState:
    """The same slots in tables of a wider form; what is new asks nothing of them.

    Args:
        engine: that runs them.
        state: in any form that `form` holds.
        form: to bring it to.
    """
    requests, slots = state.requests, state.tokens.shape[0]
    nothing, _ = tabulate(engine, [], slots, 0, form)

    def filled(old, new):
        """New where there was nothing, else old, padded as new is."""
        if old is None or new is None:
            return new
        if old.shape == new.shape:
            return old
        return jnp.concatenate([old, new[:, old.shape[1] :]], axis=1)

    shaping = Shaping(
        **{
            name: filled(getattr(requests.shaping, name), column)
            for name, column in vars(nothing.shaping).items()
        }
    )
    history, logprobs = state.history, state.logprobs
    if history is None and shaping.looks_back:
        # Slots that ask for no penalty do not care what is in it.
        vocabulary = engine.target.config.vocab_size
        history = History.of_prompts(
            jnp.zeros((slots, 1), jnp.int32), jnp.zeros((slots,), jnp.int32), vocabulary
        )
    if form.logprobs is not None:
        wide = LogprobLog.empty(slots, state.tokens.shape[1], form.logprobs)
        if logprobs is not None and logprobs.top.shape[2] < form.logprobs:
            have = logprobs.top.shape[2]
            wide = LogprobLog(
                logprobs.chosen,
                wide.top_ids.at[:, :, :have].set(logprobs.top_ids),
                wide.top.at[:, :, :have].set(logprobs.top),
            )
        elif logprobs is not None:
            wide = logprobs
        logprobs = wide
    return replace(
        state,
        requests=replace(
            requests,
            stop_ids=filled(requests.stop_ids, nothing.stop_ids),
            shaping=shaping,
            num_steps=filled(requests.num_steps, nothing.num_steps),
        ),
        history=history,
        logprobs=logprobs,
    )
