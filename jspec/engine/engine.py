"""Generation: prompts in, texts out, through one jitted loop over rounds."""

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import Drafter, load_drafter
from jspec.engine.output import Output, Update
from jspec.engine.prefill import MAX_CHUNK, capacity_bucket, chunk_plan, prefill_chunk
from jspec.engine.state import (
    FINISH_REASONS,
    RUNNING,
    STOPPED,
    DecodeState,
    LastRound,
    Requests,
    RoundLog,
)
from jspec.engine.stats import read_stats
from jspec.engine.step import Round, lone_root
from jspec.engine.text import TextBuilder
from jspec.sampling import SamplingParams
from jspec.targets import Target
from jspec.trees import TreeConfig, TreeSpec, build
from jspec.trees.view import view_round

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages (`role` and `content`)."""

_ROUNDS_PER_VISIT = 8
"""Rounds between looks of the host at stop strings; what it overshoots is cut off again."""


class Engine:
    """Speculative generation with one target, one drafter and one tree shape.

    The output is the target's own: greedy tokens equal plain greedy decoding, sampled ones follow
    its distribution, whatever the drafter proposes.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | str | None = None,
        *,
        tree: TreeSpec | None = None,
        batch_size: int = 8,
        implementation: str | None = None,
        simulate_accept_length: float | None = None,
    ):
        """Check that the parts fit; nothing is compiled before the first prompt.

        Args:
            target: from `load_target`.
            drafter: from `load_drafter`, or its name, or None for plain decoding.
            tree: `TreeConfig` or `StaticTree`; default `TreeConfig()`.
            batch_size: prompts generated side by side; more wait for the next batch.
            implementation: of the kernels: None picks by platform, see `pallas_kernels`.
            simulate_accept_length: emit this many tokens a round on average, whatever the target
                says, to time the machinery. The output is marked and is not real text.

        Raises:
            ValueError, NotImplementedError: a combination that cannot work, with the reason.
        """
        if isinstance(drafter, str):
            drafter = None if drafter == "none" else load_drafter(drafter, target)
        if drafter is None and tree is not None:
            raise ValueError("a tree needs a drafter; leave `tree` out for plain decoding.")
        if drafter is not None:
            tree = tree or TreeConfig()
            drafter.check(target, tree)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}; expected at least 1.")
        _check_simulation(simulate_accept_length, tree)
        self.target = target
        self.drafter = drafter
        self.tree = tree
        self.batch_size = batch_size
        self.round = Round(target, drafter, tree, implementation, simulate_accept_length)
        self.params = (target.params, () if drafter is None else drafter.params)
        self.traces: Counter[str] = Counter()
        """How often each stage was traced: once a shape bucket, or something recompiles."""
        self._prefill = jax.jit(
            self._trace_prefill, static_argnames=("width", "first"), donate_argnames="state"
        )
        self._rounds = jax.jit(self._trace_rounds, donate_argnames="state")
        self._halt = jax.jit(_halt, donate_argnames="state")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Continue every prompt.

        Args:
            prompts: texts, token-id lists or chat message lists; a lone text is one prompt.
            sampling: one for all, or one per prompt; default greedy, 128 tokens.

        Returns:
            One `Output` per prompt, in order.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, a prompt as long as the
                context, or a different number of sampling parameters; nothing was generated.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        ids = [self.encode(prompt) for prompt in prompts]
        asked = self._sampling(sampling, len(ids))
        outputs: list[Output] = []
        for start in range(0, len(ids), self.batch_size):
            group = slice(start, start + self.batch_size)
            slots = min(self.batch_size, len(ids))
            batch = _Batch(self, ids[group], asked[group], slots)
            every = _ROUNDS_PER_VISIT if any(p.stop for p in asked[group]) else batch.max_rounds
            while batch.running:
                batch.advance(every)
            outputs += [batch.output(slot) for slot in range(len(ids[group]))]
        return outputs

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, rounds: int = 1
    ) -> Iterator[Update]:
        """Continue one prompt, yielding an `Update` after the prefill and after every round.

        Args:
            prompt: text, token ids or chat messages.
            sampling: default greedy, 128 tokens.
            rounds: between updates.

        Raises:
            ValueError: as `generate`, and rounds below 1.
        """
        if rounds < 1:
            raise ValueError(f"rounds={rounds}; expected at least 1.")
        batch = _Batch(self, [self.encode(prompt)], self._sampling(sampling, 1), 1)
        while True:
            update = batch.update(0)
            yield update
            if update.output is not None:
                return
            batch.advance(rounds)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as it is, messages through the chat template.

        Raises:
            ValueError: empty, outside the vocabulary, or too long for the context.
        """
        if isinstance(prompt, str):
            ids = self.target.tokenizer.encode(prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self.target.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        else:
            ids = [int(token) for token in prompt]  # type: ignore[arg-type]
        config = self.target.config
        if not ids:
            raise ValueError("the prompt is empty; give at least one token.")
        outside = next((token for token in ids if not 0 <= token < config.vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"token id {outside} in the prompt is outside the vocabulary; "
                f"expected 0 to {config.vocab_size - 1}."
            )
        if len(ids) >= config.max_context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and the context of {self.target.name} holds "
                f"{config.max_context} with at least one new token; shorten the prompt."
            )
        return ids

    def _sampling(self, sampling, count: int) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or SamplingParams()] * count
        if len(sampling) != count:
            raise ValueError(f"got {len(sampling)} sampling parameters for {count} prompts.")
        return list(sampling)

    def _trace_prefill(self, params, state, offset, *, width: int, first: bool):
        self.traces[f"prefill {width}{'' if first else '+'}"] += 1
        return prefill_chunk(self.round, params, state, offset, width=width, first=first)

    def _trace_rounds(self, params, state, rounds):
        self.traces["rounds"] += 1

        def unfinished(carry):
            done, state = carry
            return (done < rounds) & jnp.any(state.active)

        def advance(carry):
            done, state = carry
            return done + 1, self.round.step(params, state)

        return jax.lax.while_loop(unfinished, advance, (jnp.zeros((), jnp.int32), state))[1]


@dataclass
class _Slot:
    """The host's record of one request."""

    prompt: list[int]
    sampling: SamplingParams
    limit: int
    text: TextBuilder | None
    taken: int = 0  # generated tokens read so far
    ended: int | None = None  # tokens up to the one that completed a stop string


class _Batch:
    """One generation of a fixed number of slots; unused slots are finished from the start."""

    def __init__(self, engine: Engine, prompts, sampling, slots: int):
        self.engine = engine
        self.slots = [self._slot(ids, asked) for ids, asked in zip(prompts, sampling)]
        self.max_rounds = 1 << max(4, max(slot.limit for slot in self.slots).bit_length())
        self.state = self._prefilled(slots)
        self._read()

    @property
    def running(self) -> bool:
        """Whether any request is unfinished."""
        return bool(np.any(self._reason == RUNNING))

    def advance(self, rounds: int) -> None:
        """Run up to `rounds` rounds, then look at the texts."""
        self.state = self.engine._rounds(
            self.engine.params, self.state, jnp.asarray(rounds, jnp.int32)
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
        """The finished text of a slot."""
        record, engine = self.slots[slot], self.engine
        known = int(self._lengths[slot]) + 1
        generated = self._tokens[slot, len(record.prompt) : known].tolist()
        count = len(generated) if record.ended is None else record.ended
        simulated = engine.round.simulate_accept_length is not None
        stats = read_stats(
            self._log,
            slot,
            num_steps=engine.round.path_width - 1,
            drafter="none" if engine.drafter is None else engine.drafter.name,
            rule="simulated" if simulated else "target-sampling",
            max_tokens=count,
        )
        return Output(
            prompt_token_ids=record.prompt,
            token_ids=generated[:count],
            text=None if record.text is None else record.text.text,
            finish_reason=FINISH_REASONS[int(self._reason[slot])],
            stats=stats,
            simulated=simulated,
        )

    def _slot(self, ids: list[int], asked: SamplingParams) -> _Slot:
        target = self.engine.target
        has_text = target.path is not None
        if asked.stop and not has_text:
            target.tokenizer  # raises: stop strings need one  # noqa: B018
        limit = min(len(ids) + asked.max_new_tokens, target.config.max_context)
        ends = frozenset(asked.stop_token_ids) | (
            frozenset() if asked.ignore_eos else target.eos_token_ids
        )
        text = TextBuilder(target.tokenizer, asked.stop, ends) if has_text else None
        return _Slot(ids, asked, limit, text)

    def _prefilled(self, slots: int) -> DecodeState:
        engine = self.engine
        longest = max(len(slot.prompt) for slot in self.slots)
        state = self._initial(slots)
        for index, (offset, width) in enumerate(chunk_plan(longest)):
            state = engine._prefill(
                engine.params, state, jnp.asarray(offset, jnp.int32), width=width, first=index == 0
            )
        return state

    def _initial(self, slots: int) -> DecodeState:
        engine = self.engine
        capacity = capacity_bucket(max(slot.limit for slot in self.slots))
        tokens = np.zeros((slots, capacity + MAX_CHUNK + 1), np.int32)
        prompt_lengths = np.ones((slots,), np.int32)
        limits = np.full((slots,), capacity, np.int32)
        temperature = np.zeros((slots,), np.float32)
        keys = np.zeros((slots, 2), np.uint32)
        reason = np.full((slots,), STOPPED, np.int32)
        stop_lists = [self._stop_ids(slot) for slot in self.slots]
        width = 4 * max(1, -(-max(map(len, stop_lists)) // 4))
        stop_ids = np.full((slots, width), -1, np.int32)
        for index, slot in enumerate(self.slots):
            tokens[index, : len(slot.prompt)] = slot.prompt
            prompt_lengths[index] = len(slot.prompt)
            limits[index] = slot.limit
            temperature[index] = slot.sampling.temperature
            seed = slot.sampling.seed
            seed = secrets.randbits(63) if seed is None else seed
            keys[index] = seed >> 32, seed & 0xFFFFFFFF
            stop_ids[index, : len(stop_lists[index])] = stop_lists[index]
            reason[index] = RUNNING
        num_nodes, path_width = engine.round.num_nodes, engine.round.path_width
        empty = jnp.zeros((slots, num_nodes), jnp.int32)
        root_only = jnp.zeros((slots, num_nodes), bool).at[:, 0].set(True)
        tree = build(empty, empty - 1, root_only)
        drafter = engine.drafter
        return DecodeState(
            tokens=jnp.asarray(tokens),
            lengths=jnp.zeros((slots,), jnp.int32),
            cache=engine.target.empty_cache(slots, capacity),
            drafter=() if drafter is None else drafter.init_state(drafter.params, slots, capacity),
            reason=jnp.asarray(reason),
            requests=Requests(
                jnp.asarray(prompt_lengths),
                jnp.asarray(limits),
                jnp.asarray(stop_ids),
                jnp.asarray(temperature),
                jnp.asarray(keys),
            ),
            log=RoundLog.empty(slots, self.max_rounds),
            last=LastRound(
                tree,
                jnp.zeros((slots, path_width), jnp.int32),
                jnp.zeros((slots,), jnp.int32),
            ),
        )

    def _stop_ids(self, slot: _Slot) -> list[int]:
        if self.engine.round.simulate_accept_length is not None:
            return []  # not real text: it runs to its limit
        ends = set(slot.sampling.stop_token_ids)
        if not slot.sampling.ignore_eos:
            ends |= self.engine.target.eos_token_ids
        return sorted(ends)

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
            self._new.append(generated[slot.taken :])
            self._pieces.append(self._texts(index, slot, generated))
            if slot.ended is not None and self._reason[index] == RUNNING:
                halted[index] = True
            if slot.ended is not None:
                self._reason[index] = STOPPED
        if halted.any():
            self.state = self.engine._halt(self.state, jnp.asarray(halted))

    def _texts(self, index: int, slot: _Slot, generated: list[int]) -> list:
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

    def _view(self, slot: int):
        length = int(self._last.path_length[slot])
        if length == 0:
            return None
        bonus = int(self._tokens[slot, int(self._lengths[slot])])
        return view_round(self._last.tree, self._last.path[slot], length, slot, bonus)


def _halt(state: DecodeState, slots) -> DecodeState:
    """End slots whose text met a stop string."""
    return replace(state, reason=jnp.where(slots, STOPPED, state.reason))


def _check_simulation(length: float | None, tree: TreeSpec | None) -> None:
    if length is None:
        return
    longest = 1 if tree is None else tree.path_width
    if not 1.0 <= length <= longest:
        raise ValueError(
            f"simulate_accept_length={length}; expected 1 to {longest}, the longest path of the "
            "tree with its bonus."
        )
