"""Trees out of candidates: a fixed shape filled in, or the best-scored nodes selected."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.trees.config import StaticTree
from jspec.trees.tree import Tree, build


def fill_static(
    shape: StaticTree,
    root: Int[Array, "B"],
    candidates: Int[Array, "B L C"],
    scores: Float[Array, "B L C"] | None = None,
) -> Tree:
    """Give every node of a fixed shape the candidate of its depth and rank.

    Args:
        shape: L = num_steps levels, ranks below C.
        root: token of node 0.
        candidates: C distinct tokens a level, best first, the same under every parent.
        scores: of the candidates, shown to people.

    Raises:
        ValueError: fewer levels or candidates than the shape needs.
    """
    _, levels, width = candidates.shape
    if levels < shape.num_steps or width < shape.topk:
        raise ValueError(
            f"the tree needs {shape.num_steps} levels of {shape.topk} candidates, got {levels} "
            f"of {width}; use a smaller tree."
        )
    level = np.maximum(np.asarray(shape.depths) - 1, 0)
    rank = np.asarray(shape.ranks)
    token = candidates[:, level, rank].at[:, 0].set(root)
    score = jnp.zeros(token.shape, jnp.float32) if scores is None else scores[:, level, rank]
    return place_static(shape, token, score)


def place_static(shape: StaticTree, token: Int[Array, "B T"], score: Float[Array, "B T"]) -> Tree:
    """The tree of a fixed shape with these tokens at its nodes, the root's first.

    Args:
        shape: T = num_nodes.
        token: siblings are distinct.
        score: shown to people; the root's is set to 1.
    """
    batch = token.shape[0]

    def per_slot(leaf):
        return jnp.broadcast_to(leaf, (batch, *leaf.shape[1:]))

    return Tree(
        token=token,
        parent=per_slot(jnp.asarray(shape.parents, jnp.int32)[None]),
        valid=jnp.ones(token.shape, bool),
        score=score.at[:, 0].set(1.0),
        links=jax.tree.map(per_slot, shape.links()),
    )


def select_nodes(
    root: Int[Array, "B"],
    token: Int[Array, "B M"],
    parent: Int[Array, "B M"],
    score: Float[Array, "B M"],
    valid: Bool[Array, "B M"],
    num_nodes: int,
) -> Tree:
    """The num_nodes - 1 best candidates, each with its parent.

    Candidates are ordered by (score descending, index ascending). A child never scores above its
    parent and never stands before it, so the selection is closed under parents also where scores
    tie or underflow. A NaN score counts as no candidate; should a drafter break the rule, the
    orphan and what hangs from it become padding.

    Args:
        root: token of node 0.
        token: candidates, M of them.
        parent: flat candidate index of the parent, -1 below the root.
        score: the higher the better.
        valid: candidates that exist.
        num_nodes: T, the root included; at most M + 1.
    """
    batch, pool = token.shape
    usable = valid & ~jnp.isnan(score)
    # top_k puts 0.0 before -0.0, and the worst candidate must still beat none at all.
    ranked = jnp.where(score == 0, 0.0, jnp.maximum(score, jnp.finfo(score.dtype).min))
    ranked = jnp.where(usable, ranked, -jnp.inf)
    _, picked = jax.lax.top_k(ranked, num_nodes - 1)
    alive = jnp.take_along_axis(usable, picked, axis=1)
    # Flat order within the tree, padding last: parents stay before children, siblings best first.
    flat = jnp.sort(jnp.where(alive, picked, pool), axis=1)
    alive = flat < pool
    flat = jnp.minimum(flat, pool - 1)

    slots = jnp.arange(batch)[:, None]
    node_of = jnp.full((batch, pool + 1), -1, jnp.int32)
    nodes = jnp.broadcast_to(jnp.arange(1, num_nodes, dtype=jnp.int32), flat.shape)
    node_of = node_of.at[slots, jnp.where(alive, flat, pool)].set(jnp.where(alive, nodes, -1))
    above = jnp.take_along_axis(parent, flat, axis=1)
    found = jnp.take_along_axis(node_of, jnp.clip(above, 0, pool), axis=1)
    parent_node = jnp.where(above < 0, 0, found)

    first = jnp.zeros((batch, 1), jnp.int32)
    parents = jnp.concatenate([first - 1, parent_node], axis=1)
    exists = jnp.concatenate([first == 0, alive], axis=1)
    tokens = jnp.concatenate([root[:, None], jnp.take_along_axis(token, flat, axis=1)], axis=1)
    scores = jnp.concatenate(
        [jnp.ones((batch, 1), jnp.float32), jnp.take_along_axis(score, flat, axis=1)], axis=1
    )
    return build(tokens, parents, exists, scores)
