"""Generation: prompts in, texts out, through one jitted loop over rounds."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jspec.drafters import Drafter, load_drafter
from jspec.engine.batch import Batch, halt
from jspec.engine.output import Output, Update
from jspec.engine.prefill import empty_state, prefill_chunk
from jspec.engine.step import Round
from jspec.sampling import SamplingParams
from jspec.targets import Target
from jspec.trees import TreeSpec
from jspec.verify import Rule, choose_rule

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages (`role` and `content`)."""

_ROUNDS_PER_VISIT = 8
"""Rounds between looks of the host at stop strings; what it overshoots is cut off again."""


class Engine:
    """Speculative generation with one target, one drafter and one tree shape.

    The output is the target's own: greedy tokens equal plain greedy decoding, sampled ones follow
    its distribution, whatever the drafter proposes (unless a lossy rule is asked for by name).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | str | None = None,
        *,
        tree: TreeSpec | None = None,
        batch_size: int = 8,
        implementation: str | None = None,
        verification: str | Rule | None = None,
        draft_temperature: float | None = None,
        simulate_accept_length: float | None = None,
    ):
        """Check that the parts fit; nothing is compiled before the first prompt.

        Args:
            target: from `load_target`.
            drafter: from `load_drafter`, or its name, or None for plain decoding.
            tree: `TreeConfig` or `StaticTree`; default the drafter's (`TreeConfig()` where
                its depth has no limit).
            batch_size: prompts generated side by side; more wait for the next batch.
            implementation: of the kernels: None picks by platform, see `pallas_kernels`.
            verification: how a sampled request's draft is checked: a name in `jspec.verify.RULES`
                or a rule of one's own settings. Default `rejection` with a draft_temperature, else
                `target-sampling`.
            draft_temperature: the drafter draws its children at this temperature, in requests that
                sample. Default each request's own for rules that need drawn children, and no
                drawing, only the likeliest children, for the others.
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
            tree = tree or drafter.default_tree()
            drafter.check(target, tree)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}; expected at least 1.")
        _check_simulation(simulate_accept_length, tree)
        self.target = target
        self.drafter = drafter
        self.tree = tree
        self.batch_size = batch_size
        rule = choose_rule(verification, draft_temperature, drafter, tree)
        self.round = Round(
            target,
            drafter,
            tree,
            implementation,
            simulate_accept_length,
            rule,
            draft_temperature,
        )
        self.params = (target.params, () if drafter is None else drafter.params)
        self.traces: Counter[str] = Counter()
        """How often each stage was traced: once a shape bucket, or something recompiles."""
        self.run_start = jax.jit(
            partial(empty_state, self.round),
            static_argnames=("capacity", "max_rounds", "logprobs"),
        )
        self.run_prefill = jax.jit(
            self._trace_prefill,
            static_argnames=("width", "first", "sampled"),
            donate_argnames="state",
        )
        self.run_rounds = jax.jit(
            self._trace_rounds, static_argnames="sampled", donate_argnames="state"
        )
        self.halt_slots = jax.jit(halt, donate_argnames="state")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Continue every prompt.

        Args:
            prompts: texts, token-id lists or chat message lists; a lone one stands for itself.
            sampling: one for all, or one per prompt; default greedy, 128 tokens.

        Returns:
            One `Output` per prompt, in order.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, a prompt as long as the
                context, a different number of sampling parameters, or one that names a token
                outside the vocabulary: nothing was generated. Or a request for which, at some
                place, no token was possible.
        """
        ids = [self.encode(prompt) for prompt in _as_list(prompts)]
        asked = self._sampling(sampling, len(ids))
        outputs: list[Output] = []
        for start in range(0, len(ids), self.batch_size):
            group = slice(start, start + self.batch_size)
            slots = min(self.batch_size, len(ids))
            has_stop = any(params.stop for params in asked[group])
            batch = Batch(self, ids[group], asked[group], slots, incremental=has_stop)
            every = _ROUNDS_PER_VISIT if has_stop else batch.max_rounds
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
        batch = Batch(self, [self.encode(prompt)], self._sampling(sampling, 1), 1, incremental=True)
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

    def _trace_prefill(self, params, state, offset, *, width: int, first: bool, sampled: bool):
        self.traces[f"prefill {width}{'' if first else '+'}"] += 1
        return prefill_chunk(
            self.round, params, state, offset, width=width, first=first, sampled=sampled
        )

    def _trace_rounds(self, params, state, rounds, *, sampled: bool):
        self.traces["rounds"] += 1

        def unfinished(carry):
            done, state = carry
            return (done < rounds) & jnp.any(state.active)

        def advance(carry):
            done, state = carry
            return done + 1, self.round.step(params, state, sampled=sampled)

        return jax.lax.while_loop(unfinished, advance, (jnp.zeros((), jnp.int32), state))[1]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt of any kind becomes a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _check_simulation(length: float | None, tree: TreeSpec | None) -> None:
    if length is None:
        return
    longest = 1 if tree is None else tree.path_width
    if not 1.0 <= length <= longest:
        raise ValueError(
            f"simulate_accept_length={length}; expected 1 to {longest}, the longest path of the "
            "tree with its bonus."
        )
