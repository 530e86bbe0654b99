"""The walks, one slot and one child at a time, along the child links."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.tree_walk.walk import Walk


def greedy_walk_reference(
    token: Int32[Array, "B T"],
    parent: Int32[Array, "B T"],
    first_child: Int32[Array, "B T"],
    next_sibling: Int32[Array, "B T"],
    predict: Int32[Array, "B T"],
    *,
    max_path: int,
) -> Walk:
    """The definition of `api.greedy_walk`."""
    del parent  # the links alone say who is whose child

    def one(token: Array, first: Array, following: Array, predict: Array) -> tuple[Array, ...]:
        def step(j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            path, length = state
            current = path[length - 1]
            child = jax.lax.while_loop(
                lambda c: (c >= 0) & (token[c] != predict[current]),
                lambda c: following[c],
                first[current],
            )
            accepted = (child >= 0) & (length == j)  # a walk that has stopped stays stopped
            # Fill the whole tail: what is not overwritten later repeats the last node.
            tail = jnp.arange(max_path) >= j
            path = jnp.where(accepted & tail, child, path)
            return path, length + accepted.astype(jnp.int32)

        start = (jnp.zeros((max_path,), jnp.int32), jnp.int32(1))
        path, length = jax.lax.fori_loop(1, max_path, step, start)
        return path, length, predict[path[length - 1]]

    return Walk(*jax.vmap(one)(token, first_child, next_sibling, predict))


def sampling_walk_reference(
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
    """The definition of `api.sampling_walk`."""
    del parent

    def one(
        token: Array, first: Array, following: Array, probs: Array, coin: Array, final: Array
    ) -> tuple[Array, ...]:
        vocabulary = probs.shape[-1]

        def step(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            path, length, residual = state
            current = path[length - 1]

            def accepts(child: Array, total: Array) -> Array:
                p = probs[current, token[child]]
                share = total / threshold_acc
                return (p > 0) & ((coin[current] < share) | (p >= threshold_single))

            def reject(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                child, total, residual = state
                residual = residual.at[token[child]].set(0.0)
                child = following[child]
                return child, total + probs[current, token[child]], residual

            child = first[current]
            child, _, rest = jax.lax.while_loop(
                lambda s: (s[0] >= 0) & ~accepts(s[0], s[1]),
                reject,
                (child, probs[current, token[child]], residual),
            )
            going = length == j
            accepted = (child >= 0) & going
            tail = jnp.arange(max_path) >= j
            path = jnp.where(accepted & tail, child, path)
            residual = jnp.where(going, jnp.where(accepted, probs[child], rest), residual)
            return path, length + accepted.astype(jnp.int32), residual

        start = (jnp.zeros((max_path,), jnp.int32), jnp.int32(1), probs[0])
        path, length, residual = jax.lax.fori_loop(1, max_path, step, start)
        positive = residual > 0
        mass = jnp.cumsum(jnp.where(positive, residual, 0.0))
        hit = positive & (mass > final * mass[-1])
        ids = jnp.arange(vocabulary, dtype=jnp.int32)
        last = jnp.where(positive, ids, -1).max()
        last = jnp.where(last < 0, vocabulary - 1, last)
        bonus = jnp.where(hit.any(), jnp.where(hit, ids, vocabulary).min(), last)
        return path, length, bonus

    return Walk(
        *jax.vmap(one)(token, first_child, next_sibling, target_probs, uniform, uniform_final)
    )
