"""Tree attention as plainly as it can be said: one mask, one softmax, float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32


def visible_columns(
    lengths: Int32[Array, " B"],
    ancestors: UInt32[Array, "B Tq W"],
    prefix: int,
    nodes: int,
) -> Bool[Array, "B Tq columns"]:
    """Which of the `prefix` cache columns and `nodes` tree columns each query sees."""
    batch, queries, _ = ancestors.shape
    in_prefix = jnp.arange(prefix, dtype=jnp.int32)[None, :] < lengths[:, None]
    in_prefix = jnp.broadcast_to(in_prefix[:, None, :], (batch, queries, prefix))
    node = jnp.arange(nodes, dtype=jnp.uint32)
    word = ancestors[:, :, node // 32]
    in_tree = ((word >> (node % 32)[None, None, :]) & 1) == 1
    return jnp.concatenate([in_prefix, in_tree], axis=-1)


def tree_attention_reference(
    q: Float[Array, "B Tq H D"],
    k_cache: Float[Array, "B S K D"],
    v_cache: Float[Array, "B S K U"],
    lengths: Int32[Array, " B"],
    k_tree: Float[Array, "B Tk K D"],
    v_tree: Float[Array, "B Tk K U"],
    ancestors: UInt32[Array, "B Tq W"],
    *,
    scale: float,
) -> Float[Array, "B Tq H U"]:
    """The definition every implementation is tested against; see `api.tree_attention`."""
    groups = q.shape[2] // k_cache.shape[2]
    visible = visible_columns(lengths, ancestors, k_cache.shape[1], k_tree.shape[1])
    seen = visible.any(axis=1)[:, :, None, None]
    # A column nobody sees may hold anything, NaN included, and zero weight times NaN is NaN.
    keys = jnp.where(seen, jnp.concatenate([k_cache, k_tree], axis=1).astype(jnp.float32), 0.0)
    values = jnp.where(seen, jnp.concatenate([v_cache, v_tree], axis=1).astype(jnp.float32), 0.0)
    keys, values = (jnp.repeat(x, groups, axis=2) for x in (keys, values))

    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("bthd,bshd->bths", q.astype(jnp.float32), keys, precision=highest) * scale
    logits = jnp.where(visible[:, :, None, :], logits, -jnp.inf)
    # A query that sees nothing (padding over an empty prefix) yields zeros, not NaN.
    anything = visible.any(axis=-1)[:, :, None, None]
    weights = jnp.where(anything, jax.nn.softmax(jnp.where(anything, logits, 0.0), axis=-1), 0.0)
    out = jnp.einsum("bths,bshd->bthd", weights, values, precision=highest)
    return out.astype(q.dtype)
