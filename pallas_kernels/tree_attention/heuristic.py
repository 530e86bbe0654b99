"""Block sizes for a tree-attention call: measured ones where `tune` has been run, else a rule."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import triton_backend as tb
from pallas_kernels import tuning
from pallas_kernels.tree_attention.config import TreeAttentionConfig

OP = "tree_attention"


def tuning_key(*, batch: int, rows: int, capacity: int, kv_heads: int, dim: int, dtype: Any) -> str:
    """The name under which a measured config is stored; sizes are rounded up to powers of two."""
    sizes = {"batch": batch, "rows": rows, "capacity": capacity}
    rounded = {name: tb.next_power_of_two(size) for name, size in sizes.items()}
    return ",".join(
        [
            *(f"{name}={size}" for name, size in rounded.items()),
            f"kv_heads={kv_heads}",
            f"dim={dim}",
            f"dtype={jnp.dtype(dtype).name}",
        ]
    )


def choose_config(
    *, batch: int, rows: int, capacity: int, kv_heads: int, dim: int, dtype: Any
) -> TreeAttentionConfig:
    """The measured config for shapes like these on this GPU, or `default_config`."""
    sizes = {
        "batch": batch,
        "rows": rows,
        "capacity": capacity,
        "kv_heads": kv_heads,
        "dim": dim,
        "dtype": dtype,
    }
    measured = tuning.lookup(OP, tuning_key(**sizes))
    if measured is not None:
        return TreeAttentionConfig(**measured)
    return default_config(**sizes, processors=tb.processors())


def default_config(
    *,
    batch: int,
    rows: int,
    capacity: int,
    kv_heads: int,
    dim: int,
    dtype: Any,
    processors: int,
) -> TreeAttentionConfig:
    """A config that needs no measurement.

    Rows and blocks are capped where registers would spill on an sm_80 (the resource table of
    `benchmarks/kernels.py --compile-only`); what exceeds the cap is split over the grid. The
    prefix is split until the launch fills the GPU about twice over, but never into parts too
    short to pay for merging.
    """
    block_rows = max(16, tb.next_power_of_two(rows))
    if jnp.dtype(dtype) == jnp.float32:  # three products for each: exact, not fast
        block_rows, block_k, num_warps = 16, 32, 4
    elif dim > 128:
        block_rows, block_k, num_warps = min(block_rows, 32), 32 if dim <= 192 else 64, 8
    elif block_rows <= 32:
        block_k, num_warps = 64, 4
    elif block_rows == 64 or dim <= 64:
        block_rows, block_k, num_warps = min(block_rows, 128), 64, 8
    else:
        block_rows, block_k, num_warps = 128, 32, 8

    programs = batch * kv_heads * -(-rows // block_rows)
    wanted = -(-2 * processors // max(programs, 1))
    longest = max(1, capacity // 256)
    return TreeAttentionConfig(
        block_rows=block_rows,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=2,
        splits=max(1, min(wanted, longest, 64)),
    )
