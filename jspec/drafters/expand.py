"""Growing a draft level by level, with a model that scores one level of nodes a pass.

A dynamic tree keeps the best `topk` nodes of a level as the frontier of the next, and in the end
the best `num_nodes - 1` of everything that was scored (EAGLE-2, https://arxiv.org/abs/2406.16858,
section 4). A static tree has its shape given; its children may also be drawn.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jspec.drafters.base import DraftContext
from jspec.drafters.draw import pick_children
from jspec.trees import (
    StaticTree,
    Tree,
    TreeConfig,
    TreeSpec,
    chain,
    place_static,
    select_nodes,
)


class Level(NamedTuple):
    """What a drafter says after F nodes.

    Attributes:
        logits: of the token after each node, [B, F, Vd] float32.
        hidden: what the drafter carries on from each node, [B, F, E].
    """

    logits: Float[Array, "B F Vd"]
    hidden: Float[Array, "B F E"]


class Frontier(NamedTuple):
    """F nodes of one depth, to be run next.

    Attributes:
        token: target ids, [B, F] int32.
        hidden: what their parents carried on, [B, F, E].
        step: passes done before this one; the nodes have depth step + 1.
        ancestors: bits over the nodes run so far and these, [B, F, W].
    """

    token: Int[Array, "B F"]
    hidden: Float[Array, "B F E"]
    step: int
    ancestors: UInt32[Array, "B F W"]


class Grown(NamedTuple):
    """A tree, and what its nodes' children were drawn from ([B, T, Vd]; None if not drawn)."""

    tree: Tree
    probabilities: Float[Array, "B T Vd"] | None


Advance = Callable[[Any, Frontier], tuple[Any, Level]]
"""(what earlier passes left, frontier) -> (what all passes leave, what the nodes say)."""


def grow(
    tree: TreeSpec,
    context: DraftContext,
    root: Level,
    advance: Advance,
    *,
    token_map: Int[Array, "Vd"] | None = None,
    tempered: float = 1.0,
) -> Grown:
    """A tree of exactly tree.num_nodes nodes, from num_steps - 1 passes of the drafter.

    Args:
        tree: the shape, or its bounds.
        context: root tokens, keys, and a temperature where children are drawn.
        root: what the drafter says after the root, F = 1.
        advance: one pass of the drafter; what it leaves starts as None.
        token_map: target ids of the draft vocabulary; None where both are one.
        tempered: divides the logits that scores come from (dynamic trees).
    """
    if isinstance(tree, StaticTree):
        return _static(tree, context, root, advance, token_map)
    if context.temperature is not None:
        assert tree.topk == 1  # the engine refuses to draw a tree that is pruned by its scores
        return _static(chain(tree.num_steps), context, root, advance, token_map)
    return Grown(_dynamic(tree, context, root, advance, token_map, tempered), None)


def _dynamic(
    tree: TreeConfig,
    context: DraftContext,
    root: Level,
    advance: Advance,
    token_map: Int[Array, "Vd"] | None,
    tempered: float,
) -> Tree:
    """Scores are sums of log-probabilities; flat order is level, then parent, then rank."""
    k, batch = tree.topk, context.root.shape[0]
    rows = jnp.arange(batch)[:, None]

    def candidates(level: Level, step: int, above: Float[Array, "B F"]):
        children = pick_children(level.logits, k, context, step, tempered=tempered)
        score = above[:, :, None] + children.log_probs
        return score.reshape(batch, -1), _to_target(children.ids, token_map).reshape(batch, -1)

    score, token = candidates(root, 0, jnp.zeros((batch, 1), jnp.float32))
    scores, tokens = [score], [token]
    parents = [jnp.full((batch, k), -1, jnp.int32)]
    beam = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
    hidden = jnp.broadcast_to(root.hidden, (batch, k, root.hidden.shape[-1]))
    seen = _broadcast(own_bits(0, k), batch)
    left = None
    for step in range(tree.num_steps - 1):
        first = 0 if step == 0 else k + (step - 1) * k * k
        own = _broadcast(own_bits(step * k, k), batch)
        if step:
            above = jnp.take_along_axis(seen, (beam // k)[:, :, None], axis=1)
            own = own | jnp.pad(above, ((0, 0), (0, 0), (0, own.shape[2] - above.shape[2])))
        seen = own
        frontier = Frontier(token[rows, beam], hidden, step, seen)
        left, level = advance(left, frontier)
        parents.append(jnp.repeat(first + beam, k, axis=1))
        score, token = candidates(level, step + 1, score[rows, beam])
        scores.append(score)
        tokens.append(token)
        if step + 2 < tree.num_steps:
            beam = jax.lax.top_k(score, k)[1].astype(jnp.int32)
            hidden = jnp.take_along_axis(level.hidden, (beam // k)[:, :, None], axis=1)
    score = jnp.concatenate(scores, axis=1)
    chosen = select_nodes(
        context.root,
        jnp.concatenate(tokens, axis=1),
        jnp.concatenate(parents, axis=1),
        score,
        jnp.ones(score.shape, bool),
        tree.num_nodes,
    )
    probability = jnp.where(chosen.valid, jnp.exp(chosen.score), 0.0).at[:, 0].set(1.0)
    return replace(chosen, score=probability)


def _static(
    shape: StaticTree,
    context: DraftContext,
    root: Level,
    advance: Advance,
    token_map: Int[Array, "Vd"] | None,
) -> Grown:
    """Runs the nodes that have children; a child is the candidate of its rank."""
    batch = context.root.shape[0]
    parents, depths, ranks = (np.asarray(x) for x in (shape.parents, shape.depths, shape.ranks))
    token = jnp.zeros((batch, shape.num_nodes), jnp.int32).at[:, 0].set(context.root)
    score = jnp.zeros((batch, shape.num_nodes), jnp.float32)
    probabilities = None
    if context.temperature is not None:
        probabilities = jnp.zeros((batch, shape.num_nodes, root.logits.shape[-1]), jnp.float32)
    level, left = root, None
    inner, run = np.zeros(1, int), np.zeros(0, int)  # nodes of the last pass, of all but the root's
    for step in range(shape.num_steps):
        if step:
            frontier = np.flatnonzero((depths == step) & np.isin(np.arange(len(depths)), parents))
            above = np.searchsorted(inner, parents[frontier])
            inner, run = frontier, np.concatenate([run, frontier])
            seen = _broadcast(_lineage(parents, run)[-len(inner) :], batch)
            asked = Frontier(token[:, inner], level.hidden[:, above], step - 1, seen)
            left, level = advance(left, asked)
        nodes = np.flatnonzero(depths == step + 1)
        place = np.searchsorted(inner, parents[nodes]), ranks[nodes]
        children = pick_children(level.logits, int(ranks[nodes].max()) + 1, context, step)
        token = token.at[:, nodes].set(_to_target(children.ids, token_map)[:, *place])
        log_probs = children.log_probs[:, *place]
        score = score.at[:, nodes].set(score[:, parents[nodes]] + log_probs)
        if probabilities is not None:
            probabilities = probabilities.at[:, inner].set(children.probabilities)
    return Grown(place_static(shape, token, jnp.nan_to_num(jnp.exp(score))), probabilities)


def _to_target(ids: Int[Array, "B F k"], token_map: Int[Array, "Vd"] | None) -> Array:
    return ids if token_map is None else token_map[ids]


def _broadcast(bits: np.ndarray, batch: int) -> UInt32[Array, "B F W"]:
    return jnp.broadcast_to(jnp.asarray(bits), (batch, *bits.shape))


def _lineage(parents: np.ndarray, run: np.ndarray) -> np.ndarray:
    """Ancestor bits over the nodes in `run` (in order, parents first), for each: [R, W]."""
    row = {node: index for index, node in enumerate(run)}
    bits = own_bits(0, len(run))
    for index, node in enumerate(run):
        if parents[node] in row:
            bits[index] |= bits[row[parents[node]]]
    return bits


def own_bits(first: int, count: int) -> np.ndarray:
    """Bit first + i set in row i, [count, W] uint32, W words for first + count columns."""
    bits = np.zeros((count, -(-(first + count) // 32)), np.uint32)
    column = first + np.arange(count)
    bits[np.arange(count), column // 32] = np.uint32(1) << (column % 32).astype(np.uint32)
    return bits
