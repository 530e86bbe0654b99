"""The kernel calls whose GPU resources are reported and tested.

Shapes are Llama-3-8B's (32 query heads on 8 KV heads, so 4 rows a node) unless they say more.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk

# What a kernel may use: shared memory of an sm_89, the smallest of the current GPUs.
SHARED_LIMIT = 99 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileCase:
    """One call to compile.

    Attributes:
        name: op and shape, as printed.
        function: the op with its implementation bound.
        args: `jax.ShapeDtypeStruct`s.
        bounded: whether zero spills and `SHARED_LIMIT` are promised for it.
        tensor_cores: whether it must use them.
        tested: whether the tests compile it; the report compiles all.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    bounded: bool = True
    tensor_cores: bool = False
    tested: bool = True


def compile_cases() -> list[CompileCase]:
    """All cases, in the order of the report."""
    return [*_attention_cases(), *_small_cases()]


def _array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _attention(
    nodes: int,
    dim: int,
    *,
    batch: int = 1,
    heads: int = 32,
    kv_heads: int = 8,
    queries: int | None = None,
    dtype: Any = jnp.bfloat16,
    tested: bool = True,
) -> CompileCase:
    capacity = 2048
    queries = nodes if queries is None else queries
    groups = heads // kv_heads
    return CompileCase(
        name=(
            f"tree_attention {jnp.dtype(dtype).name} B={batch} Tq={queries} Tk={nodes} "
            f"G={groups} D={dim}"
        ),
        function=functools.partial(pk.tree_attention, implementation="triton"),
        args=(
            _array(batch, queries, heads, dim, dtype=dtype),
            *(_array(batch, capacity, kv_heads, dim, dtype=dtype),) * 2,
            _array(batch),
            *(_array(batch, nodes, kv_heads, dim, dtype=dtype),) * 2,
            _array(batch, queries, -(-nodes // 32), dtype=jnp.uint32),
        ),
        bounded=dim <= 128,
        tensor_cores=True,
        tested=tested,
    )


def _attention_cases() -> list[CompileCase]:
    cases = []
    for dim in (64, 80, 96, 128):
        for nodes in (1, 8, 16, 32, 64):
            # A batch of 1 splits the prefix; a batch of 64 fills the GPU without.
            tested = nodes in (1, 8, 32) if dim == 128 else nodes == 32
            cases.append(_attention(nodes, dim, tested=tested))
    for nodes in (1, 8, 16, 32, 64):
        cases.append(_attention(nodes, 128, batch=64, tested=nodes in (16, 64)))
    cases += [
        _attention(128, 128, heads=8, kv_heads=8),
        _attention(8, 128, heads=16, kv_heads=1, batch=64, tested=False),
        _attention(42, 128, heads=9, kv_heads=3, batch=64, tested=False),
        _attention(64, 128, queries=10, tested=False),
        _attention(8, 192),
        _attention(32, 192, batch=64, tested=False),
        _attention(8, 256),
        _attention(32, 256, batch=64, tested=False),
        _attention(32, 128, dtype=jnp.float16, tested=False),
        _attention(32, 128, dtype=jnp.float32),
    ]
    return cases


def _small_cases() -> list[CompileCase]:
    def links(nodes: int) -> tuple[Any, ...]:
        return (_array(8, nodes),) * 3

    cases = []
    for nodes in (8, 60, 128):
        cases += [
            CompileCase(
                name=f"build_tree T={nodes}",
                function=functools.partial(pk.build_tree, implementation="triton"),
                args=(_array(8, nodes), _array(8, nodes, dtype=jnp.bool_)),
                tested=nodes == 128,
            ),
            CompileCase(
                name=f"build_tree_from_selection T={nodes} topk=10 num_steps=6",
                function=functools.partial(
                    pk.build_tree_from_selection, topk=10, implementation="triton"
                ),
                args=(_array(8, nodes - 1), _array(8, 51)),
                tested=nodes == 128,
            ),
            CompileCase(
                name=f"greedy_walk T={nodes} P=8",
                function=functools.partial(pk.greedy_walk, max_path=8, implementation="triton"),
                args=(_array(8, nodes), links(nodes), _array(8, nodes)),
                tested=nodes == 60,
            ),
        ]
    cases.append(
        CompileCase(
            name="sampling_walk T=60 P=8 V=128256",
            function=functools.partial(pk.sampling_walk, max_path=8, implementation="triton"),
            args=(
                _array(8, 60),
                links(60),
                _array(8, 60, 128256, dtype=jnp.float32),
                _array(8, 60, dtype=jnp.float32),
                _array(8, dtype=jnp.float32),
            ),
        )
    )
    cache = _array(8, 2048, 8, 128, dtype=jnp.bfloat16)
    tree = _array(8, 60, 8, 128, dtype=jnp.bfloat16)
    for layers in (4, 32):
        arrays = 2 * layers
        cases.append(
            CompileCase(
                name=f"commit_path {layers} layers bfloat16 P=8 K=8 D=128",
                function=functools.partial(pk.commit_path, implementation="triton"),
                args=((cache,) * arrays, (tree,) * arrays, _array(8, 8), _array(8), _array(8)),
                tested=layers == 4,
            )
        )
    return cases
