"""Medusa: K small heads on the target's last hidden state, one for each of the next K places.

After the root, token t + 1, head i (from 0) guesses token t + 2 + i from the hidden state that gave
the root; no head knows what the others guessed. So a draft costs no pass of any model, and every
node of a depth has the same candidates below it.

Reference: Cai et al. 2024, https://arxiv.org/abs/2401.10774.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jspec.drafters.base import DraftContext, Drafter, Proposal, Rows
from jspec.drafters.draw import pick_children
from jspec.targets import Target
from jspec.targets.layers import Linear, product
from jspec.trees import StaticTree, Tree, TreeConfig, TreeSpec, chain, fill_static, select_nodes


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Shapes and switches of a set of heads.

    Attributes:
        num_heads: K.
        num_layers: residual blocks a head.
        hidden_size: E, the target's.
        vocab_size: V, the target's.
        draft_vocab_size: Vd.
        bias: whether the residual blocks have one.
        projection: to logits: a matrix for each head (`own`), `one` of the heads' for all of them,
            or the `target`'s.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    bias: bool
    projection: Literal["own", "one", "target"]


class MedusaHeads(nnx.Module):
    """Head i: n times x ← x + SiLU(W x + b), then a projection to logits.

    The projections stay separate arrays: slicing them out of a stack would copy them every round,
    and a batched product of the stack is no faster on a CPU.
    """

    def __init__(self, config: MedusaConfig, *, dtype):
        size, heads = config.hidden_size, range(config.num_heads)

        def block():
            return Linear(size, size, bias=config.bias, dtype=dtype)

        self.blocks = nnx.List(
            [nnx.List([block() for _ in range(config.num_layers)]) for _ in heads]
        )
        shape = (config.draft_vocab_size, size)
        projections = heads if config.projection == "own" else range(1)
        self.projections = nnx.List([nnx.Param(jnp.zeros(shape, dtype)) for _ in projections])

    def __call__(self, hidden: Float[Array, "*B E"], num_heads: int) -> Float[Array, "*B L Vd"]:
        """Float32 logits of the first L = num_heads heads."""
        states = []
        for blocks in list(self.blocks)[:num_heads]:
            x = hidden
            for block in blocks:
                x = x + jax.nn.silu(block(x))
            states.append(x)
        if len(self.projections) == 1:
            return product(self.projections[0][...], jnp.stack(states, axis=-2))
        logits = [product(w[...], x) for w, x in zip(self.projections, states)]
        return jnp.stack(logits, axis=-2)


@dataclass(frozen=True, eq=False, kw_only=True)
class Medusa(Drafter):
    """Drafts with the heads of `MedusaHeads`; its state is the hidden state that gave the root.

    A dynamic tree (`TreeConfig`) holds the likeliest nodes of all combinations of candidates, by
    the product of the heads' probabilities; `topk = 1` is the chain of the heads' first choices.

    Attributes:
        config: shapes.
        graphdef: the static half of the module.
        params: the arrays; a projection shared with the target is the target's own array.
        token_map: target ids of the draft vocabulary, [Vd]; None where both are one.
        description: see `Drafter`.
        heads: what it was built from, as stored; for writing it back.
        tree: what suits the heads best, None for the method's own default.
    """

    config: MedusaConfig
    graphdef: nnx.GraphDef = field(repr=False)
    params: PyTree = field(repr=False)
    token_map: np.ndarray | None = field(default=None, repr=False)
    description: str = ""
    heads: Any = field(default=None, repr=False)
    tree: TreeSpec | None = None
    name = "medusa"
    can_sample = True

    def check(self, target: Target, tree: TreeSpec) -> None:
        config = self.config
        if tree.num_steps > config.num_heads:
            raise ValueError(
                f"the tree has num_steps={tree.num_steps} levels, but Medusa drafts one a head and "
                f"has {config.num_heads} heads; lower num_steps to {config.num_heads} or less."
            )
        if tree.topk > config.draft_vocab_size:
            raise ValueError(
                f"the tree asks for topk={tree.topk} children a node, but the draft vocabulary has "
                f"{config.draft_vocab_size} tokens; lower topk."
            )
        wide, vocab = target.config.hidden_size, target.config.vocab_size
        if (config.hidden_size, config.vocab_size) != (wide, vocab):
            raise ValueError(
                f"the Medusa heads have hidden size {config.hidden_size} and a vocabulary of "
                f"{config.vocab_size}, the target {target.name} has {wide} and {vocab}; they "
                "belong to another target."
            )

    def default_tree(self) -> TreeSpec:
        return self.tree or TreeConfig(num_steps=min(TreeConfig().num_steps, self.config.num_heads))

    def init_state(self, params, batch: int, capacity: int) -> Float[Array, "B E"]:
        return jnp.zeros((batch, self.config.hidden_size), jax.tree.leaves(params)[0].dtype)

    def prefill(self, params, state: Float[Array, "B E"], rows: Rows) -> Float[Array, "B E"]:
        last = jnp.maximum(rows.count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(rows.hidden, last, axis=1)[:, 0]
        return jnp.where(rows.count[:, None] > 0, hidden, state)

    def extend(self, params, state: Float[Array, "B E"], rows: Rows, correct: Int[Array, "B"]):
        return self.prefill(params, state, rows)

    def propose(self, params, state: Float[Array, "B E"], context: DraftContext, tree: TreeSpec):
        logits = nnx.merge(self.graphdef, params)(state, tree.num_steps)
        children = pick_children(logits, tree.topk, context, 0)
        token_map = None if self.token_map is None else jnp.asarray(self.token_map, jnp.int32)
        token = children.ids if token_map is None else token_map[children.ids]
        if isinstance(tree, TreeConfig) and children.probabilities is None:
            drafted = _dynamic(tree, context.root, token, children.log_probs)
            return Proposal(drafted, state, None, token_map)
        if isinstance(tree, TreeConfig):
            assert tree.topk == 1  # the engine refuses to draw a tree that is pruned by its scores
            tree = chain(tree.num_steps)
        drafted = _static(tree, context.root, token, children.log_probs)
        drawn_from = children.probabilities
        if drawn_from is not None:
            # Row t: what the children of node t were drawn from; leaves have none.
            head = np.minimum(np.asarray(tree.depths), tree.num_steps - 1)
            drawn_from = drawn_from[:, head]
        return Proposal(drafted, state, drawn_from, token_map)


def _static(
    shape: StaticTree,
    root: Int[Array, "B"],
    token: Int[Array, "B L k"],
    log_probs: Float[Array, "B L k"],
) -> Tree:
    """Every node takes the candidate of its depth and rank; its score is its path's probability."""
    rank = np.zeros((shape.num_nodes, shape.num_steps), int)
    on_path = np.zeros(rank.shape, bool)
    for node, path in enumerate(shape.choices, start=1):
        rank[node, : len(path)], on_path[node, : len(path)] = path, True
    level = np.arange(shape.num_steps)
    steps = jnp.where(jnp.asarray(on_path)[None], log_probs[:, level[None], rank], 0.0)
    score = jnp.nan_to_num(jnp.exp(steps.sum(axis=2)))
    return replace(fill_static(shape, root, token), score=score)


def _dynamic(
    tree: TreeConfig,
    root: Int[Array, "B"],
    token: Int[Array, "B L k"],
    log_probs: Float[Array, "B L k"],
) -> Tree:
    """The best num_nodes - 1 of all paths of candidates.

    No more than that many nodes of a level can be among them, so no more of them get children. Flat
    order is level, then parent, then rank.
    """
    batch, keep = root.shape[0], tree.num_nodes - 1
    score = log_probs[:, 0]
    scores, parents = [score], [jnp.full(score.shape, -1, jnp.int32)]
    tokens, first = [token[:, 0]], 0
    for level in range(1, tree.num_steps):
        width = score.shape[1]
        best = jnp.where(jnp.isnan(score), -jnp.inf, score)
        beam = jax.lax.top_k(best, min(width, keep))[1].astype(jnp.int32)
        above = jnp.take_along_axis(score, beam, axis=1)
        score = (above[:, :, None] + log_probs[:, level, None]).reshape(batch, -1)
        scores.append(score)
        parents.append(jnp.repeat(first + beam, tree.topk, axis=1))
        tokens.append(jnp.tile(token[:, level], (1, beam.shape[1])))
        first += width
    score = jnp.concatenate(scores, axis=1)
    chosen = select_nodes(
        root,
        jnp.concatenate(tokens, axis=1),
        jnp.concatenate(parents, axis=1),
        score,
        jnp.ones(score.shape, bool),
        tree.num_nodes,
    )
    probability = jnp.where(chosen.valid, jnp.exp(chosen.score), 0.0).at[:, 0].set(1.0)
    return replace(chosen, score=probability)
