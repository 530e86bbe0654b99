"""The walks for the whole batch at once: one comparison of all nodes per level, no child chase."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.tree_walk.walk import Walk


def greedy_walk_xla(
    token: Int32[Array, "B T"],
    parent: Int32[Array, "B T"],
    first_child: Int32[Array, "B T"],
    next_sibling: Int32[Array, "B T"],
    predict: Int32[Array, "B T"],
    *,
    max_path: int,
) -> Walk:
    """See `api.greedy_walk` for the contract."""
    del first_child, next_sibling  # the parent alone finds all children at once
    # What does not depend on where the walk stands is done for all nodes before it starts.
    wanted = jnp.take_along_axis(predict, jnp.maximum(parent, 0), axis=1)
    agrees = (token == wanted) & (parent >= 0)

    def step(current: Array) -> tuple[Array, Array]:
        return _lowest(agrees & (parent == current[:, None]))

    path, length, current = _descend(step, token.shape[0], max_path)
    return Walk(path, length, _pick(predict, current))


def sampling_walk_xla(
    token: Int32[Array, "B T"],
    parent: Int32[Array, "B T"],
    first_child: Int32[Array, "B T"],
    next_sibling: Int32[Array, "B T"],
    target_probs: Float[Array, "B T V"],
    uniform: Float[Array, "B T"],
    uniform_final: Float[Array, " B"],
    *,
    max_path: int,
    threshold_single: float,
    threshold_acc: float,
) -> Walk:
    """See `api.sampling_walk` for the contract."""
    del first_child, next_sibling
    batch, nodes = token.shape
    vocabulary = target_probs.shape[-1]
    above = jnp.maximum(parent, 0)
    slot = jnp.arange(batch, dtype=jnp.int32)[:, None]
    p = target_probs[slot, above, token]  # [B, T], each node's probability at its parent
    coin = jnp.take_along_axis(uniform, above, axis=1)

    # The running sum over a node and its elder siblings; the walk never changes it.
    node = jnp.arange(nodes, dtype=jnp.int32)
    elder = (parent[:, :, None] == parent[:, None, :]) & (node[None, :] <= node[:, None])[None]
    share = jnp.where(elder, p[:, None, :], 0.0).sum(axis=-1) / threshold_acc
    agrees = (parent >= 0) & (p > 0) & ((coin < share) | (p >= threshold_single))

    def step(current: Array) -> tuple[Array, Array]:
        return _lowest(agrees & (parent == current[:, None]))

    path, length, current = _descend(step, batch, max_path)

    # Where the walk stopped for want of an accepted child, all children were rejected and their
    # mass is gone; at the depth limit the children were never asked and keep theirs.
    rejected = (parent == current[:, None]) & (length < max_path)[:, None]
    residual = jnp.take_along_axis(target_probs, current[:, None, None], axis=1)[:, 0]
    gone = jnp.where(rejected, token, vocabulary)
    residual = residual.at[slot, gone].set(0.0, mode="drop")
    return Walk(path, length, _inverse_cdf(residual, uniform_final))


def _descend(step, batch: int, max_path: int) -> tuple[Array, Array, Array]:
    current = jnp.zeros((batch,), jnp.int32)
    length = jnp.ones((batch,), jnp.int32)
    path = [current]
    # Unrolled: a path is a handful of levels, and each is a few comparisons.
    for level in range(1, max_path):
        child, found = step(current)
        going = found & (length == level)
        current = jnp.where(going, child, current)
        length = length + going.astype(jnp.int32)
        path.append(current)
    return jnp.stack(path, axis=1), length, current


def _lowest(mask: Bool[Array, "B T"]) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
    nodes = mask.shape[1]
    node = jnp.arange(nodes, dtype=jnp.int32)[None, :]
    lowest = jnp.where(mask, node, nodes).min(axis=1)
    return jnp.minimum(lowest, nodes - 1), lowest < nodes


def _pick(values: Int32[Array, "B T"], at: Int32[Array, " B"]) -> Int32[Array, " B"]:
    return jnp.take_along_axis(values, at[:, None], axis=1)[:, 0]


def _inverse_cdf(mass: Float[Array, "B V"], coin: Float[Array, " B"]) -> Int32[Array, " B"]:
    vocabulary = mass.shape[-1]
    ids = jnp.arange(vocabulary, dtype=jnp.int32)[None, :]
    positive = mass > 0
    running = jax.lax.cumsum(jnp.where(positive, mass, 0.0), axis=1)
    hit = positive & (running > (coin * running[:, -1])[:, None])
    first = jnp.where(hit, ids, vocabulary).min(axis=1)
    # Rounding can leave the last sliver of mass unreached; it belongs to the last possible id.
    last = jnp.where(positive, ids, -1).max(axis=1)
    last = jnp.where(last < 0, vocabulary - 1, last)
    return jnp.where(first < vocabulary, first, last)
