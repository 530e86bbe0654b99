"""Tree attention in plain JAX for CPUs, TPUs and any shape the kernel does not cover.

Grouped query heads stay packed beside their KV head, so K and V are never repeated to H heads;
the prefix and the tree are two products under one softmax, so the caches are never concatenated.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

_LARGE = 1 << 20
"""Bytes of keys above which a CPU takes the slots in groups: the products copy keys and values, and
copies that stay in its caches are 2 to 2.6 times faster (24 slots of 128 to 256 positions, 8 of
1,024; see benchmarks/results/cpu-verify-pass.md). A group that fills at most half of its cache
reads half of it."""

# Finite: -inf minus -inf is NaN, and a query that sees nothing would meet exactly that.
MASKED = -1e30


def tree_attention_xla(
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
    """See `api.tree_attention` for the contract."""
    arrays = (q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors)
    batch = q.shape[0]
    group = next(size for size in (4, 3, 2, 1) if batch % size == 0)
    large = k_cache.size * k_cache.dtype.itemsize > _LARGE
    if group == batch or not large or jax.default_backend() != "cpu":
        return _attend(*arrays, scale=scale)
    half = k_cache.shape[1] // 2

    def attend(some):
        q, keys, values, lengths, *tree = some
        return jax.lax.cond(
            lengths.max() <= half,
            lambda: _attend(q, keys[:, :half], values[:, :half], lengths, *tree, scale=scale),
            lambda: _attend(q, keys, values, lengths, *tree, scale=scale),
        )

    grouped = [x.reshape(batch // group, group, *x.shape[1:]) for x in arrays]
    out = jax.lax.map(attend, grouped)
    return out.reshape(batch, *out.shape[2:])


def _attend(
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
    """All slots at once."""
    batch, queries, heads, dim = q.shape
    capacity, kv_heads = k_cache.shape[1:3]
    nodes, value_dim = v_tree.shape[1], v_tree.shape[3]
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, dim)

    in_prefix = jnp.arange(capacity, dtype=jnp.int32)[None, :] < lengths[:, None]  # [B, S]
    node = jnp.arange(nodes, dtype=jnp.uint32)
    in_tree = ((ancestors[:, :, node // 32] >> (node % 32)[None, None, :]) & 1) == 1  # [B, Tq, Tk]

    def logits(keys: Array) -> Array:  # [B, K, Tq, G, columns]
        return jnp.einsum("btkgd,bskd->bktgs", q, keys, preferred_element_type=jnp.float32) * scale

    prefix = jnp.where(in_prefix[:, None, None, None, :], logits(k_cache), MASKED)
    tree = jnp.where(in_tree[:, None, :, None, :], logits(k_tree), MASKED)
    peak = jnp.maximum(
        prefix.max(axis=-1, keepdims=True, initial=MASKED), tree.max(axis=-1, keepdims=True)
    )
    prefix, tree = jnp.exp(prefix - peak), jnp.exp(tree - peak)
    total = prefix.sum(axis=-1) + tree.sum(axis=-1)

    def mix(weights: Array, values: Array) -> Array:  # [B, K, Tq, G, U]
        return jnp.einsum(
            "bktgs,bskd->bktgd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )

    # Zero weight times NaN is NaN: what lies beyond the length must not matter at all. The
    # select fuses into the transposing copy that the product makes of V anyway.
    v_cache = jnp.where(in_prefix[:, :, None, None], v_cache, jnp.zeros((), v_cache.dtype))
    out = (mix(prefix, v_cache) + mix(tree, v_tree)) / total[..., None]
    anything = (lengths > 0)[:, None] | in_tree.any(axis=-1)  # [B, Tq]
    out = jnp.where(anything[:, None, :, None, None], out, 0.0)
    return out.transpose(0, 2, 1, 3, 4).reshape(batch, queries, heads, value_dim).astype(q.dtype)
