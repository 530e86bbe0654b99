"""Several prediction modules run in turn: module k predicts k + 1 tokens ahead.

Row i of module k pairs what module k - 1 made of position i (module 0: the target's hidden state)
with token i + k + 1, at position i + k. After L committed tokens and a root module k can have L - k
true rows; its last k rows take guesses as tokens and are run again once the truth is known. This
is how transformers' `MtpModel` runs modules; engines that run only a module's newest row leave the
caches of all but the first one incomplete.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, UInt32

from jspec.drafters.base import DraftContext, Drafter, Proposal, Rows
from jspec.drafters.expand import Frontier, Level, grow
from jspec.targets import KVCache, Prefix, Target
from jspec.targets.layers import product
from jspec.targets.masks import causal_bits
from jspec.targets.mtp import MTPFamily, MTPModule
from jspec.trees import StaticTree, TreeConfig, TreeSpec


class MTPStack(nnx.Module):
    """D modules between the target's own embedding and head."""

    def __init__(self, config, family: MTPFamily, count: int, *, dtype):
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jnp.zeros(shape, dtype))
        self.head = nnx.Param(jnp.zeros(shape, dtype))
        self.modules = nnx.List([MTPModule(config, family, dtype=dtype) for _ in range(count)])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainState:
    """What a module chain keeps of each slot.

    Attributes:
        caches: of module k, one row a true token, from its first row on.
        hidden: what module k made of its last true row, [B, E] each.
    """

    caches: tuple[KVCache, ...]
    hidden: tuple[Float[Array, "B E"], ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class MTPChain(Drafter):
    """D modules in turn: a chain of at most D tokens.

    Attributes:
        name: the method.
        description: see `Drafter`.
        graphdef: the static half of an `MTPStack`.
        params: its arrays; embedding and head are the target's own.
        count: D.
        cache_shape: KV heads and width of a cache row.
        cached_values: whether a cache row has values beside its keys.
        tree: what suits the modules best, None for one token a module.
    """

    name: str = "mtp"
    description: str = ""
    graphdef: nnx.GraphDef = field(repr=False)
    params: PyTree = field(repr=False)
    count: int
    cache_shape: tuple[int, int]
    cached_values: bool
    tree: TreeSpec | None = None
    can_sample = True

    def default_tree(self) -> TreeSpec:
        """One token a module."""
        return self.tree or TreeConfig(num_steps=self.count, topk=1)

    def check(self, target: Target, tree: TreeSpec) -> None:
        if tree.topk > 1 or (isinstance(tree, StaticTree) and tree.num_nodes != tree.path_width):
            raise NotImplementedError(
                f"{self.name}: {self.count} modules run in turn draft a chain, not a tree with "
                f"topk={tree.topk}; use topk=1."
            )
        if tree.num_steps > self.count:
            raise NotImplementedError(
                f"{self.name}: {self.count} modules run in turn draft at most {self.count} tokens, "
                f"got num_steps={tree.num_steps}; lower num_steps."
            )

    def init_state(self, params, batch: int, capacity: int) -> ChainState:
        embedding = params["embedding"][...]
        dtype, size = embedding.dtype, embedding.shape[1]
        caches = [
            KVCache.empty(1, batch, capacity, *self.cache_shape, dtype, values=self.cached_values)
            for _ in range(self.count)
        ]
        return ChainState(
            tuple(caches), tuple(jnp.zeros((batch, size), dtype) for _ in range(self.count))
        )

    def prefill(self, params, state: ChainState, rows: Rows) -> ChainState:
        stack = self._stack(params)
        batch, width = rows.tokens.shape
        place = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
        embedded = _embed(stack, rows.next_tokens)
        last = jnp.maximum(rows.count - 1, 0)[:, None, None]
        hidden = rows.hidden
        caches, kept = [], []
        for index, module in enumerate(stack.modules):
            if index:
                # The rows of this module begin one earlier: at the one kept from before.
                hidden = jnp.concatenate([state.hidden[index - 1][:, None], hidden[:, :-1]], axis=1)
            committed, absent = _own_rows(rows.start, index)
            out, new = module(
                hidden,
                embedded,
                rows.start[:, None] + place,
                Prefix(state.caches[index], committed),
                _without_first(causal_bits(width), absent),
            )
            caches.append(
                state.caches[index].commit(
                    new, place + absent[:, None], jnp.maximum(rows.count - absent, 0), committed
                )
            )
            hidden = module.carried(out)
            newest = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
            kept.append(jnp.where(rows.count[:, None] > 0, newest, state.hidden[index]))
        return ChainState(tuple(caches), tuple(kept))

    def extend(self, params, state: ChainState, rows: Rows, correct: Int[Array, "B"]):
        return self.prefill(params, state, rows)

    def propose(self, params, state: ChainState, context: DraftContext, tree: TreeSpec):
        stack = self._stack(params)

        def say(index: int, hidden: Float[Array, "B 1 E"]) -> Level:
            normed = stack.modules[index].normed(hidden)
            return Level(product(stack.head[...], normed), hidden)

        def advance(left: tuple[Array, Array] | None, frontier: Frontier):
            index = frontier.step + 1
            token, hidden = frontier.token, state.hidden[index - 1][:, None]
            if left is not None:
                token = jnp.concatenate([left[0], token], axis=1)
                hidden = jnp.concatenate([hidden, left[1]], axis=1)
            committed, absent = _own_rows(context.lengths, index)
            place = jnp.arange(index, dtype=jnp.int32)[None, :]
            with jax.named_scope(f"draft_module_{index}"):
                out, _ = stack.modules[index](
                    hidden,
                    _embed(stack, token),
                    context.lengths[:, None] + place,
                    Prefix(state.caches[index], committed),
                    _without_first(causal_bits(index), absent),
                )
            carried = stack.modules[index].carried(out)
            return (token, carried), say(index, carried[:, -1:])

        grown = grow(tree, context, say(0, state.hidden[0][:, None]), advance)
        return Proposal(grown.tree, state, grown.probabilities)

    def _stack(self, params) -> Any:
        return nnx.merge(self.graphdef, params)


def _embed(stack: MTPStack, tokens: Int[Array, "B R"]) -> Float[Array, "B R E"]:
    return jnp.take(stack.embedding[...], tokens, axis=0)


def _own_rows(committed: Int[Array, "B"], index: int) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Rows of module `index` in its cache, and how many of the next ones lie before its first."""
    return jnp.maximum(committed - index, 0), jnp.maximum(index - committed, 0)


def _without_first(bits: UInt32[Array, "1 T W"], absent: Int[Array, "B"]) -> UInt32[Array, "B T W"]:
    """No row sees the first `absent` ones (fewer than 32, since there are few modules)."""
    mask = ~((jnp.uint32(1) << absent.astype(jnp.uint32)) - jnp.uint32(1))
    first = jnp.arange(bits.shape[2]) == 0
    return jnp.where(first[None, None, :], bits & mask[:, None, None], bits)


def with_modules(target: Target, family: MTPFamily, modules: list[PyTree], source: str) -> MTPChain:
    """The drafter of several modules.

    Args:
        target: its embedding and head are used, not copied.
        family: of the modules.
        modules: parameters of an `MTPModule` each, in order.
        source: where they came from, for the description.
    """
    config, count = target.config, len(modules)
    graphdef, _ = nnx.split(
        nnx.eval_shape(lambda: MTPStack(config, family, count, dtype=target.dtype))
    )
    flat = [
        (("embedding",), nnx.Param(target.embedding)),
        (("head",), nnx.Param(target.head)),
        *(
            (("modules", index, *path), variable)
            for index, module in enumerate(modules)
            for path, variable in nnx.to_flat_state(module)
        ),
    ]
    return MTPChain(
        description=f"{count} MTP modules of {source} ({config.family}), run in turn",
        graphdef=graphdef,
        params=nnx.from_flat_state(flat),
        count=count,
        cache_shape=(config.num_kv_heads, config.head_dim),
        cached_values=config.latent is None,
    )
