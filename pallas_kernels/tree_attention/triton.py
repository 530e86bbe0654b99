"""Tree attention as one kernel: flash decoding over the prefix, then the tree from bits.

One program owns a block of query rows (nodes x the query heads that share a KV head), one KV head
and one part of a slot's prefix, so each K and V tile it reads serves all of its rows; that is why
checking many nodes costs about as much memory traffic as checking one.

    whole prefix blocks   no mask at all
    the ragged last block columns beyond the length are not even loaded
    the tree              32 columns a step, visibility from one word per row

The parts of a split prefix are cut by the slot's own length, not by the capacity, so a short
request in a long cache is still spread evenly; partial results merge by log-sum-exp.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels import triton_backend as tb
from pallas_kernels.tree_attention.config import TreeAttentionConfig
from pallas_kernels.tree_attention.heuristic import choose_config

# Finite, so that merging two parts that saw nothing stays free of NaN.
MASKED = -1e30
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def tree_attention_triton(
    q: Float[Array, "B Tq H D"],
    k_cache: Float[Array, "B S K D"],
    v_cache: Float[Array, "B S K U"],
    lengths: Int32[Array, " B"],
    k_tree: Float[Array, "B Tk K D"],
    v_tree: Float[Array, "B Tk K U"],
    ancestors: UInt32[Array, "B Tq W"],
    *,
    scale: float,
    config: TreeAttentionConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "B Tq H U"]:
    """See `api.tree_attention` for the contract.

    Raises:
        NotImplementedError: a head dim that is not a multiple of 16 or beyond 256, values of
            another width, a dtype other than bfloat16, float16 and float32, or a cache without
            columns.
    """
    batch, queries, heads, dim = q.shape
    capacity, kv_heads = k_cache.shape[1:3]
    groups, nodes, words = heads // kv_heads, k_tree.shape[1], ancestors.shape[-1]
    if q.dtype not in DTYPES:
        raise NotImplementedError(f"tree_attention kernel: no {q.dtype}; use implementation='xla'")
    if capacity == 0 or batch == 0:
        raise NotImplementedError("tree_attention kernel: empty cache; use implementation='xla'")
    if dim % 16 or dim > 256:
        raise NotImplementedError(
            f"tree_attention kernel: head dim {dim} is not a multiple of 16 up to 256; "
            "use implementation='xla'"
        )
    if v_cache.shape[-1] != dim:
        raise NotImplementedError(
            f"tree_attention kernel: values of width {v_cache.shape[-1]} beside keys of {dim}; "
            "use implementation='xla'"
        )
    if config is None:
        config = choose_config(
            batch=batch,
            rows=queries * groups,
            capacity=capacity,
            kv_heads=kv_heads,
            dim=dim,
            dtype=q.dtype,
        )
    splits = config.splits
    row_blocks = -(-queries * groups // config.block_rows)

    kernel = functools.partial(
        _kernel,
        config=config,
        groups=groups,
        queries=queries,
        nodes=nodes,
        row_blocks=row_blocks,
        factor=scale * math.log2(math.e),
        interpret=interpret,
    )
    packed = (None, queries, None, groups, dim)
    if splits == 1:
        out_specs = [tb.Spec(packed, lambda i, k, b: (b, 0, k, 0, 0))]
        out_shape = [jax.ShapeDtypeStruct((batch, queries, kv_heads, groups, dim), q.dtype)]
    else:
        rows = config.block_rows
        padded = (batch, kv_heads, splits, row_blocks * rows)
        out_specs = [
            tb.Spec(
                (None, None, None, rows, dim),
                lambda i, k, b: (b, k, i // row_blocks, i % row_blocks, 0),
            ),
            *(
                tb.Spec(
                    (None, None, None, rows),
                    lambda i, k, b: (b, k, i // row_blocks, i % row_blocks),
                )
                for _ in range(2)
            ),
        ]
        out_shape = [
            jax.ShapeDtypeStruct((*padded, dim), jnp.float32),
            jax.ShapeDtypeStruct(padded, jnp.float32),
            jax.ShapeDtypeStruct(padded, jnp.float32),
        ]
    outs = tb.launch(
        kernel,
        lengths,
        ancestors,
        q.reshape(batch, queries, kv_heads, groups, dim),
        k_cache,
        v_cache,
        k_tree,
        v_tree,
        name="tree_attention",
        # Row blocks of one split lie next to each other in launch order and share K/V in L2.
        grid=(splits * row_blocks, kv_heads, batch),
        in_specs=[
            tb.Spec((None,), lambda i, k, b: (b,)),
            tb.Spec((None, queries, words), lambda i, k, b: (b, 0, 0)),
            tb.Spec(packed, lambda i, k, b: (b, 0, k, 0, 0)),
            *(tb.Spec((None, capacity, None, dim), lambda i, k, b: (b, 0, k, 0)),) * 2,
            *(tb.Spec((None, nodes, None, dim), lambda i, k, b: (b, 0, k, 0)),) * 2,
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    out = outs[0] if splits == 1 else _merge(*outs, queries=queries, groups=groups)
    return out.reshape(batch, queries, heads, dim).astype(q.dtype)


def _merge(
    out: Float[Array, "B K splits rows D"],
    peak: Float[Array, "B K splits rows"],
    total: Float[Array, "B K splits rows"],
    *,
    queries: int,
    groups: int,
) -> Float[Array, "B Tq K G D"]:
    """Joins the parts of every row; XLA makes one small fusion of it."""
    weight = jnp.exp2(peak - peak.max(axis=2, keepdims=True))
    total = (total * weight).sum(axis=2)
    out = (out * weight[..., None]).sum(axis=2) / jnp.where(total > 0, total, 1.0)[..., None]
    batch, kv_heads, _, dim = out.shape
    out = out[:, :, : queries * groups].reshape(batch, kv_heads, queries, groups, dim)
    return out.transpose(0, 2, 1, 3, 4)


def _kernel(
    lengths_ref: Any,
    bits_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    k_tree_ref: Any,
    v_tree_ref: Any,
    out_ref: Any,
    *partial_refs: Any,
    config: TreeAttentionConfig,
    groups: int,
    queries: int,
    nodes: int,
    row_blocks: int,
    factor: float,
    interpret: bool,
) -> None:
    block_k, splits = config.block_k, config.splits
    dot = functools.partial(tb.dot, interpret=interpret)
    parts = tb.power_of_two_parts(q_ref.shape[-1])
    step = tb.program_id(0)
    split, row_block = step // row_blocks, step % row_blocks

    rows = row_block * config.block_rows + jnp.arange(config.block_rows, dtype=jnp.int32)
    live = rows < queries * groups
    # Rows beyond the last query point past the end: masked off on a GPU, and in interpret mode,
    # where a masked store writes the old value back, it must not meet a live row's.
    node, head = rows // groups, rows % groups

    def grid_index(start: int, width: int) -> tuple[Array, ...]:
        column = start + jnp.arange(width, dtype=jnp.int32)
        shape = (config.block_rows, width)
        return tuple(
            jnp.broadcast_to(x, shape) for x in (node[:, None], head[:, None], column[None, :])
        )

    def row_mask(width: int) -> Array:
        return jnp.broadcast_to(live[:, None], (config.block_rows, width))

    zero = jnp.zeros((), q_ref.dtype)
    queries_by_part = [
        tb.load(q_ref, *grid_index(start, width), mask=row_mask(width), other=zero)
        for start, width in parts
    ]

    def attend(
        carry: tuple[Array, ...],
        keys: Callable[[int, int], Array],
        values: Callable[[int, int], Array],
        visible: Array | None,
    ) -> tuple[Array, ...]:
        """One online-softmax step over one tile of columns, in base 2."""
        *sums, peak, total = carry
        terms = [
            dot(q, keys(*part), transpose_b=True)
            for q, part in zip(queries_by_part, parts, strict=True)
        ]
        logits = functools.reduce(jnp.add, terms) * factor
        if visible is not None:
            logits = jnp.where(visible, logits, MASKED)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        weights = jnp.exp2(logits - new_peak[:, None])
        if visible is not None:  # a row that has seen nothing yet has its peak at MASKED
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp2(peak - new_peak)
        total = total * shrink + weights.sum(axis=1)
        weights = weights.astype(v_ref.dtype)
        sums = [
            acc * shrink[:, None] + dot(weights, values(*part))
            for acc, part in zip(sums, parts, strict=True)
        ]
        return (*sums, new_peak, total)

    # A paged cache would change only these two tiles: rows from a block table, not a range.
    def whole_block(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        def tile(ref: Any) -> Callable[[int, int], Array]:
            return lambda start, width: tb.load(
                ref, tb.slice_at(i * block_k, block_k), tb.slice_at(start, width)
            )

        return attend(carry, tile(k_ref), tile(v_ref), None)

    def ragged_block(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        inside = i * block_k + jnp.arange(block_k, dtype=jnp.int32) < length

        def tile(ref: Any) -> Callable[[int, int], Array]:
            return lambda start, width: tb.load(
                ref,
                tb.slice_at(i * block_k, block_k),
                tb.slice_at(start, width),
                mask=jnp.broadcast_to(inside[:, None], (block_k, width)),
                other=zero,
            )

        visible = jnp.broadcast_to(inside[None, :], (config.block_rows, block_k))
        return attend(carry, tile(k_ref), tile(v_ref), visible)

    block_t = min(32, max(16, tb.next_power_of_two(nodes)))  # never more than one word

    def tree_block(w: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        column = jnp.arange(block_t, dtype=jnp.int32)
        inside = w * 32 + column < nodes
        word = tb.load(
            bits_ref, node, jnp.broadcast_to(w, node.shape), mask=live, other=jnp.uint32(0)
        )
        bit = (word[:, None] >> column.astype(jnp.uint32)[None, :]) & jnp.uint32(1)
        visible = (bit != 0) & inside[None, :]

        def tile(ref: Any) -> Callable[[int, int], Array]:
            return lambda start, width: tb.load(
                ref,
                tb.slice_at(w * 32, block_t),
                tb.slice_at(start, width),
                mask=jnp.broadcast_to(inside[:, None], (block_t, width)),
                other=zero,
            )

        return attend(carry, tile(k_tree_ref), tile(v_tree_ref), visible)

    length = jnp.clip(lengths_ref[()], 0, k_ref.shape[0])
    blocks = tb.cdiv(length, block_k)
    share = tb.cdiv(blocks, splits)
    first = jnp.minimum(split * share, blocks)
    last = jnp.minimum(first + share, blocks)
    whole = jnp.clip(length // block_k, first, last)

    carry = (
        *(jnp.zeros((config.block_rows, width), jnp.float32) for _, width in parts),
        jnp.full((config.block_rows,), MASKED, jnp.float32),
        jnp.zeros((config.block_rows,), jnp.float32),
    )
    carry = lax.fori_loop(first, whole, whole_block, carry)
    carry = lax.fori_loop(whole, last, ragged_block, carry)
    # The last part has the least prefix, so it takes the tree as well. Arithmetic on the part's
    # number, because a select between constants comes out of the lowering with the wrong type.
    # The length does not matter here, but a compiler that could prove the loop to run would
    # hoist its loads across the prefix loop, for some 80 registers and spills on an sm_80.
    takes_tree = jnp.minimum(split - (splits - 2), lengths_ref[()] + (1 << 30))
    words = -(-nodes // 32) * jnp.maximum(takes_tree, 0)
    *sums, peak, total = lax.fori_loop(0, words, tree_block, carry)

    if not partial_refs:
        share_of = 1.0 / jnp.where(total > 0, total, 1.0)
        for acc, (start, width) in zip(sums, parts, strict=True):
            value = (acc * share_of[:, None]).astype(out_ref.dtype)
            tb.store(out_ref, *grid_index(start, width), value=value, mask=row_mask(width))
        return
    peak_ref, total_ref = partial_refs
    for acc, (start, width) in zip(sums, parts, strict=True):
        tb.store(
            out_ref,
            tb.slice_at(0, config.block_rows),
            tb.slice_at(start, width),
            value=acc,
        )
    tb.store(peak_ref, tb.slice_at(0, config.block_rows), value=peak)
    tb.store(total_ref, tb.slice_at(0, config.block_rows), value=total)
