"""The public tree-attention function: checks, then one of the implementations."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels import checks, dispatch
from pallas_kernels.tree_attention.config import TreeAttentionConfig
from pallas_kernels.tree_attention.xla import tree_attention_xla

OP = "tree_attention"


def tree_attention(
    q: Float[Array, "B Tq H D"],
    k_cache: Float[Array, "B S K D"],
    v_cache: Float[Array, "B S K U"],
    lengths: Int32[Array, " B"],
    k_tree: Float[Array, "B Tk K D"],
    v_tree: Float[Array, "B Tk K U"],
    ancestors: UInt32[Array, "B Tq W"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
    config: TreeAttentionConfig | None = None,
) -> Float[Array, "B Tq H U"]:
    """Attention of tree nodes over the committed prefix and over their own ancestors.

    Query i of slot b sees cache column c iff `c < lengths[b]`, and tree column j iff bit j of
    `ancestors[b, i]` is set (word j // 32, bit j % 32). Nothing else is ever read into the
    result: cache columns at or beyond the length may hold anything. A query that sees no column
    yields zeros. `Tq == Tk` verifies a whole tree; `Tq < Tk` serves a drafter's frontier over the
    nodes grown so far; one node is plain decoding and a chain is a tree without branches.

    Args:
        q: queries, float32, bfloat16 or float16.
        k_cache: prefix keys, same dtype as q.
        v_cache: prefix values, same dtype as q; usually as wide as the keys (U = D). For latent
            attention the keys' own first columns, `k_cache[..., :U]`.
        lengths: committed columns per slot, 0..S.
        k_tree: keys of the tree's nodes, not in the cache; same dtype as q.
        v_tree: values of the tree's nodes; same dtype as q.
        ancestors: visibility bits, `W = ceil(Tk / 32)` words.
        scale: factor on the logits; `1 / sqrt(D)` by default.
        implementation: None, "xla", "triton" or "interpret"; see `pallas_kernels.dispatch`.
        config: block sizes of the kernel; None takes the heuristic's. The XLA path has none.

    Returns:
        [B, Tq, H, U] in q's dtype; logits, softmax and sums are float32 throughout.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
        NotImplementedError: a named kernel that does not cover the call.

    Source: tree attention is from SpecInfer (Miao et al. 2023, section 4) and Medusa (Cai et al.
    2024); splitting the prefix with log-sum-exp merging is Flash-Decoding (Dao et al. 2023).
    """
    _check(q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    table = {
        "xla": tree_attention_xla,
        "triton": functools.partial(_kernel, config=config, interpret=False),
        "interpret": functools.partial(_kernel, config=config, interpret=True),
    }
    with jax.named_scope(OP):
        return dispatch.call(
            OP,
            implementation,
            table,
            q,
            k_cache,
            v_cache,
            lengths,
            k_tree,
            v_tree,
            ancestors,
            scale=float(scale),
        )


def _kernel(*args: Array, **options: Any) -> Array:
    # Imported on use: the Pallas modules take a second to load and CPU users never need them.
    from pallas_kernels.tree_attention.triton import tree_attention_triton

    return tree_attention_triton(*args, **options)


def _check(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    k_tree: Array,
    v_tree: Array,
    ancestors: Array,
) -> None:
    checks.shape(OP, "q", q, ("B", "Tq", "H", "D"))
    batch, queries, heads, dim = q.shape
    checks.shape(OP, "k_cache", k_cache, (batch, "S", "K", dim))
    capacity, kv_heads = k_cache.shape[1:3]
    checks.shape(OP, "v_cache", v_cache, (batch, capacity, kv_heads, "U"))
    checks.shape(OP, "k_tree", k_tree, (batch, "Tk", kv_heads, dim))
    nodes = k_tree.shape[1]
    checks.shape(OP, "v_tree", v_tree, (batch, nodes, kv_heads, v_cache.shape[3]))
    checks.shape(OP, "lengths", lengths, (batch,))
    checks.shape(OP, "ancestors", ancestors, (batch, queries, checks.words(nodes)))
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{OP}: {heads} query heads do not divide over {kv_heads} KV heads")
    if nodes == 0 or queries == 0:
        raise ValueError(f"{OP}: got {queries} queries over {nodes} nodes, expected at least 1")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"{OP}: q has dtype {q.dtype}, expected a floating dtype")
    for name, array in (
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("k_tree", k_tree),
        ("v_tree", v_tree),
    ):
        checks.dtype(OP, name, array, q.dtype)
    checks.dtype(OP, "lengths", lengths, jnp.int32)
    checks.dtype(OP, "ancestors", ancestors, jnp.uint32)
