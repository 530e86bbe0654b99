"""A small model of the same vocabulary as the drafter.

Reference: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; grown into a tree as EAGLE-2
does (https://arxiv.org/abs/2406.16858).
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jspec.drafters.base import DraftContext, Drafter, Proposal, Rows
from jspec.drafters.expand import Frontier, Level, grow
from jspec.targets import KVCache, Prefix, Target
from jspec.targets.masks import causal_bits
from jspec.trees import TreeSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StandaloneState:
    """What the small model keeps of each slot.

    Attributes:
        cache: keys and values of the committed tokens and of the root.
        hidden: its post-norm hidden state at the root, [B, E].
    """

    cache: KVCache
    hidden: Float[Array, "B E"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Standalone(Drafter):
    """Drafts with a language model of its own.

    Attributes:
        model: any dense target of the same vocabulary.
        params: the model's.
        score_temperature: as of `FeatureDrafter`.
        description: see `Drafter`.
    """

    model: Target
    params: PyTree = field(repr=False)
    score_temperature: float = 1.0
    description: str = ""
    name = "standalone"
    can_sample = True

    def check(self, target: Target, tree: TreeSpec) -> None:
        vocab = self.model.config.vocab_size
        if vocab != target.config.vocab_size:
            raise ValueError(
                f"the draft model {self.model.name} has a vocabulary of {vocab} tokens, the target "
                f"{target.name} has {target.config.vocab_size}; take one of its family."
            )
        if tree.topk > vocab:
            raise ValueError(
                f"the tree asks for {tree.topk} children a node of {vocab} tokens; lower topk."
            )

    def init_state(self, params, batch: int, capacity: int) -> StandaloneState:
        size = self.model.config.hidden_size
        hidden = jnp.zeros((batch, size), self.model.dtype)
        return StandaloneState(self.model.empty_cache(batch, capacity + 1), hidden)

    def prefill(self, params, state: StandaloneState, rows: Rows) -> StandaloneState:
        state = self._take_in(params, state, rows.tokens, rows.start, rows.count)
        # The token after the chunk: the root, or one that the next chunk writes once more.
        last = jnp.maximum(rows.count - 1, 0)[:, None]
        after = jnp.take_along_axis(rows.next_tokens, last, axis=1)
        any_row = (rows.count > 0).astype(jnp.int32)
        return self._take_in(params, state, after, rows.start + rows.count, any_row)

    def extend(self, params, state: StandaloneState, rows: Rows, correct) -> StandaloneState:
        return self._take_in(params, state, rows.next_tokens, rows.start + 1, rows.count)

    def propose(self, params, state: StandaloneState, context: DraftContext, tree: TreeSpec):
        known = context.lengths + 1
        hidden = state.hidden[:, None]

        def advance(grown: KVCache | None, frontier: Frontier):
            position = jnp.broadcast_to(known[:, None] + frontier.step, frontier.token.shape)
            with jax.named_scope(f"draft_step_{frontier.step}"):
                passed = self.model.forward(
                    params,
                    frontier.token,
                    position,
                    Prefix(state.cache, known, grown),
                    frontier.ancestors,
                )
                said = Level(self.model.logits(params, passed.hidden), passed.hidden)
            return passed.new if grown is None else grown.join(passed.new), said

        grown = grow(
            tree,
            context,
            Level(self.model.logits(params, hidden), hidden),
            advance,
            tempered=self.score_temperature,
        )
        return Proposal(grown.tree, state, grown.probabilities)

    def _take_in(
        self,
        params,
        state: StandaloneState,
        tokens: Int[Array, "B R"],
        start: Int[Array, "B"],
        count: Int[Array, "B"],
    ) -> StandaloneState:
        batch, width = tokens.shape
        place = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
        passed = self.model.forward(
            params,
            tokens,
            start[:, None] + place,
            Prefix(state.cache, start),
            jnp.broadcast_to(causal_bits(width), (batch, width, -(-width // 32))),
        )
        cache = state.cache.commit(passed.new, place, count, start)
        last = jnp.take_along_axis(passed.hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[
            :, 0
        ]
        return StandaloneState(cache, jnp.where(count[:, None] > 0, last, state.hidden))


def standalone(model: Target, target: Target) -> Standalone:
    """A drafter out of a small model.

    Args:
        model: drafts.
        target: decides.

    Raises:
        ValueError: the two do not share a vocabulary: its size, or what a token stands for.
    """
    said = f"{model.config.family} model of {model.num_params / 1e6:.1f} M parameters"
    drafter = Standalone(model=model, params=model.params, description=said)
    ours, theirs = model.find_tokenizer(), target.find_tokenizer()
    if ours is not None and theirs is not None:
        differ = ours.first_difference(theirs)
        if differ is not None:
            raise ValueError(
                f"the draft model {model.name} and the target {target.name} do not share a "
                f"vocabulary: {differ}; a standalone drafter needs the same tokenizer."
            )
    return drafter
