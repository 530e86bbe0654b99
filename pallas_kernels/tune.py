"""Measures tree-attention configs on the GPU at hand and stores the fastest of each shape.

    python -m pallas_kernels.tune                      # Llama-3-8B's heads, common trees
    python -m pallas_kernels.tune --nodes 8 60 --capacity 4096 --heads 32 --kv-heads 4

The result is a JSON file (`--out`, else JSPEC_TUNING, else the user's cache folder) that the
heuristic reads from then on; delete it to go back to the rule. Expect a minute per shape.
"""

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from pallas_kernels import dispatch, timing, tuning
from pallas_kernels import triton_backend as tb
from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.config import TreeAttentionConfig
from pallas_kernels.tree_attention.heuristic import OP, default_config, tuning_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Which shapes to measure; all combinations of batch, nodes and capacity.

    Attributes:
        batch: slots.
        nodes: nodes per tree, the root included; 1 is plain decoding.
        capacity: cache columns; every slot is measured full.
        heads: query heads.
        kv_heads: KV heads.
        dim: head dim.
        dtype: bfloat16, float16 or float32.
        out: where to write; None takes the file that the heuristic reads.
    """

    batch: tuple[int, ...] = (1, 8)
    nodes: tuple[int, ...] = (1, 8, 16, 64)
    capacity: tuple[int, ...] = (2048, 8192)
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: str = "bfloat16"
    out: Path | None = None


def candidates(default: TreeAttentionConfig) -> list[TreeAttentionConfig]:
    """The configs worth measuring around a default, the default first."""
    splits = sorted({max(1, default.splits // 2), default.splits, min(64, default.splits * 2)})
    every = [
        dataclasses.replace(
            default, block_k=block_k, num_warps=num_warps, num_stages=num_stages, splits=parts
        )
        for block_k, num_warps, num_stages, parts in itertools.product(
            (32, 64, 128), (4, 8), (2, 3), splits
        )
    ]
    return [default, *(config for config in every if config != default)]


def inputs(
    *, batch: int, nodes: int, capacity: int, heads: int, kv_heads: int, dim: int, dtype: str
) -> tuple[Any, ...]:
    """Random operands of one call: full caches and a tree of chains below the root."""
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape, jnp.dtype(dtype))

    parent = np.maximum(np.arange(nodes, dtype=np.int32) - 4, -1)
    above = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        above[node] |= above[max(parent[node], 0)]
    words = -(-nodes // 32)
    bits = np.zeros((nodes, words), np.uint32)
    for row, column in zip(*np.nonzero(above), strict=True):
        bits[row, column // 32] |= np.uint32(1) << np.uint32(column % 32)
    return (
        normal(batch, nodes, heads, dim),
        normal(batch, capacity, kv_heads, dim),
        normal(batch, capacity, kv_heads, dim),
        jnp.full((batch,), capacity, jnp.int32),
        normal(batch, nodes, kv_heads, dim),
        normal(batch, nodes, kv_heads, dim),
        jnp.asarray(np.broadcast_to(bits, (batch, nodes, words))),
    )


def fastest(args: tuple[Any, ...], default: TreeAttentionConfig) -> tuple[Any, float, float]:
    """(best config, its seconds, the default's seconds) for one set of operands."""
    best, best_seconds, default_seconds = default, float("inf"), float("inf")
    for config in candidates(default):

        def attend(q: Any, *rest: Any, config: TreeAttentionConfig = config) -> Any:
            return tree_attention(q, *rest, implementation="triton", config=config)

        try:
            loop = timing.compiled_loop(attend, args[0], [args[1:]])
            seconds = timing.seconds_per_call(loop, args[0], [args[1:]])
        except jax.errors.JaxRuntimeError:
            continue  # does not fit this GPU's shared memory or registers
        if config == default:
            default_seconds = seconds
        if seconds < best_seconds:
            best, best_seconds = config, seconds
    return best, best_seconds, default_seconds


def main(options: TuneOptions) -> int:
    """Measures, prints one line a shape and writes the file; returns the exit code."""
    if not dispatch.default_is_cuda():
        print(
            f"tune: needs a CUDA GPU, found the {jax.default_backend()!r} backend; "
            "without one the built-in rule chooses the configs",
            file=sys.stderr,
        )
        return 2
    path = options.out or tuning.default_path()
    table = tuning.read(path)
    shapes = table.setdefault(tuning.device_kind(), {}).setdefault(OP, {})
    for batch, nodes, capacity in itertools.product(options.batch, options.nodes, options.capacity):
        args = inputs(
            batch=batch,
            nodes=nodes,
            capacity=capacity,
            heads=options.heads,
            kv_heads=options.kv_heads,
            dim=options.dim,
            dtype=options.dtype,
        )
        sizes: dict[str, Any] = {
            "batch": batch,
            "rows": nodes * options.heads // options.kv_heads,
            "capacity": capacity,
            "kv_heads": options.kv_heads,
            "dim": options.dim,
            "dtype": options.dtype,
        }
        default = default_config(**sizes, processors=tb.processors())
        best, seconds, before = fastest(args, default)
        key = tuning_key(**sizes)
        shapes[key] = dataclasses.asdict(best)
        print(f"{key}: {before * 1e6:.1f} us by rule, {seconds * 1e6:.1f} us with {best}")
        tuning.write(path, table)  # after each shape: an interrupted run keeps what it has
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(TuneOptions, description=__doc__)))
