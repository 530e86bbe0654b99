"""Drafters that continue from the target's features with a small decoder and a cache of their own.

Row t of such a drafter pairs the feature of position t with the token of position t + 1 and stands
at position t, so after L committed tokens and a root its cache holds L rows, every one made from
true features. Its guesses live in the round only: they are grown beside the cache and dropped.

References:
    EAGLE, https://arxiv.org/abs/2401.15077, section 4. EAGLE-2, https://arxiv.org/abs/2406.16858.
    EAGLE-3, https://arxiv.org/abs/2503.01840. DeepSeek-V3's MTP, https://arxiv.org/abs/2412.19437.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, UInt32

from jspec.drafters.base import DraftContext, Drafter, Proposal, Rows
from jspec.drafters.expand import Frontier, Level, grow
from jspec.targets import KVCache, Prefix, Target
from jspec.targets.masks import causal_bits
from jspec.trees import TreeSpec


class DraftModel(Protocol):
    """The module behind a feature drafter."""

    def fuse(self, rows: Rows) -> Float[Array, "B R E"]:
        """What the decoder reads of the target, one vector a committed token."""
        ...

    def __call__(
        self,
        tokens: Int[Array, "B R"],
        hidden: Float[Array, "B R E"],
        positions: Int[Array, "B R"],
        prefix: Prefix,
        ancestors: UInt32[Array, "B R W"],
    ) -> tuple[Float[Array, "B R E"], KVCache]:
        """What is carried on from each row, and the rows' keys and values."""
        ...

    def logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B Vd"]:
        """Of the token after each row, float32, from what was carried on."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FeatureState:
    """What a feature drafter keeps of each slot.

    Attributes:
        cache: keys and values of one row a committed token.
        hidden: carried on from the last of them, [B, E].
    """

    cache: KVCache
    hidden: Float[Array, "B E"]


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureDrafter(Drafter):
    """A drafter around a `DraftModel`.

    Attributes:
        name: the method.
        description: see `Drafter`.
        feature_layers: target layers it reads, by output.
        graphdef: the static half of the module.
        params: the arrays; the target's embedding and head are the target's own arrays.
        num_layers: layers with a cache.
        num_kv_heads, head_dim: shape of a cache row.
        cached_values: whether a cache row has values beside its keys.
        hidden_size: width of what is carried on.
        draft_vocab_size: Vd.
        token_map: target ids of the draft vocabulary, [Vd]; None where both are one.
        trained_length: positions the head was trained on; further ones are drafted too, less well.
        score_temperature: divides the logits that the scores of a dynamic tree come from; above 1
            the tree grows wider, below 1 deeper. Never changes what is emitted.
        tree: what suits the head best, None for the method's own default.
    """

    name: str
    description: str = ""
    feature_layers: tuple[int, ...] = ()
    graphdef: nnx.GraphDef = field(repr=False)
    params: PyTree = field(repr=False)
    num_layers: int
    num_kv_heads: int
    head_dim: int
    cached_values: bool = True
    hidden_size: int
    draft_vocab_size: int
    token_map: np.ndarray | None = field(default=None, repr=False)
    trained_length: int
    score_temperature: float = 1.0
    tree: TreeSpec | None = None
    can_sample = True

    def default_tree(self) -> TreeSpec:
        return self.tree or super().default_tree()

    def check(self, target: Target, tree: TreeSpec) -> None:
        if tree.topk > self.draft_vocab_size:
            raise ValueError(
                f"the tree asks for {tree.topk} children a node, but the draft vocabulary of "
                f"{self.name} has {self.draft_vocab_size} tokens; lower topk."
            )
        deepest = max(self.feature_layers, default=0)
        if deepest >= target.config.num_layers:
            raise ValueError(
                f"{self.name} reads the output of layer {deepest}, but {target.name} has "
                f"{target.config.num_layers} layers; the drafter belongs to another target."
            )

    def init_state(self, params, batch: int, capacity: int) -> FeatureState:
        dtype = jax.tree.leaves(params)[0].dtype
        cache = KVCache.empty(
            self.num_layers,
            batch,
            capacity,
            self.num_kv_heads,
            self.head_dim,
            dtype,
            values=self.cached_values,
        )
        return FeatureState(cache, jnp.zeros((batch, self.hidden_size), dtype))

    def prefill(self, params, state: FeatureState, rows: Rows) -> FeatureState:
        model = self._model(params)
        batch, width = rows.tokens.shape
        place = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
        carried, new = model(
            rows.next_tokens,
            model.fuse(rows),
            rows.start[:, None] + place,
            Prefix(state.cache, rows.start),
            jnp.broadcast_to(causal_bits(width), (batch, width, -(-width // 32))),
        )
        cache = state.cache.commit(new, place, rows.count, rows.start)
        last = jnp.take_along_axis(carried, jnp.maximum(rows.count - 1, 0)[:, None, None], axis=1)
        return FeatureState(cache, jnp.where(rows.count[:, None] > 0, last[:, 0], state.hidden))

    def extend(self, params, state: FeatureState, rows: Rows, correct) -> FeatureState:
        # The guesses' keys and values were never kept, so a path is taken in like a prompt.
        return self.prefill(params, state, rows)

    def propose(self, params, state: FeatureState, context: DraftContext, tree: TreeSpec):
        model = self._model(params)
        hidden = state.hidden[:, None]

        def advance(grown: KVCache | None, frontier: Frontier):
            position = jnp.broadcast_to(
                context.lengths[:, None] + frontier.step, frontier.token.shape
            )
            with jax.named_scope(f"draft_step_{frontier.step}"):
                carried, new = model(
                    frontier.token,
                    frontier.hidden,
                    position,
                    Prefix(state.cache, context.lengths, grown),
                    frontier.ancestors,
                )
                said = Level(model.logits(carried), carried)
            return new if grown is None else grown.join(new), said

        token_map = None if self.token_map is None else jnp.asarray(self.token_map, jnp.int32)
        grown = grow(
            tree,
            context,
            Level(model.logits(hidden), hidden),
            advance,
            token_map=token_map,
            tempered=self.score_temperature,
        )
        return Proposal(grown.tree, state, grown.probabilities, token_map)

    def _model(self, params) -> Any:
        return nnx.merge(self.graphdef, params)
