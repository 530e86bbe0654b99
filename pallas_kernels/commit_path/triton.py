"""The commit as one kernel for all layers, in place: one program moves one row of a few caches."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from pallas_kernels import triton_backend as tb
from pallas_kernels.commit_path.config import CommitPathConfig

# Kernel parameters are passed in 4 KB; each array is a pointer, and each cache appears twice.
MOST_ARRAYS = 160


def commit_path_triton(
    caches: tuple[Shaped[Array, "B S ..."], ...],
    trees: tuple[Shaped[Array, "B T ..."], ...],
    path: Int32[Array, "B P"],
    path_length: Int32[Array, " B"],
    lengths: Int32[Array, " B"],
    *,
    config: CommitPathConfig | None = None,
    interpret: bool = False,
) -> tuple[Shaped[Array, "B S ..."], ...]:
    """See `api.commit_path` for the contract.

    Raises:
        NotImplementedError: more than 160 caches, or caches without rows or without content.
    """
    if len(caches) > MOST_ARRAYS:
        raise NotImplementedError(
            f"commit_path kernel: {len(caches)} caches, at most {MOST_ARRAYS} in one launch; "
            "commit the layers in two calls or use implementation='xla'"
        )
    if any(0 in array.shape for array in (*caches, *trees)):
        raise NotImplementedError("commit_path kernel: empty arrays; use implementation='xla'")
    config = config or CommitPathConfig()
    batch, width = path.shape
    shapes = [cache.shape for cache in caches]
    # A row is moved as flat numbers, whatever its trailing dimensions mean.
    flat_caches = [cache.reshape(batch, cache.shape[1], -1) for cache in caches]
    flat_trees = [tree.reshape(batch, tree.shape[1], -1) for tree in trees]
    groups = -(-len(caches) // config.arrays_per_program)

    def whole(array: Array) -> Any:
        return tb.Spec((None, *array.shape[1:]), lambda j, a, b: (b, 0, 0))

    kernel = functools.partial(
        _kernel, count=len(caches), per_program=config.arrays_per_program, groups=groups
    )
    scalar = tb.Spec((None,), lambda j, a, b: (b,))
    outs = tb.launch(
        kernel,
        path,
        path_length,
        lengths,
        *flat_trees,
        *flat_caches,
        name="commit_path",
        grid=(width, groups, batch),
        in_specs=[
            tb.Spec((None, width), lambda j, a, b: (b, 0)),
            scalar,
            scalar,
            *(whole(array) for array in (*flat_trees, *flat_caches)),
        ],
        out_specs=[whole(cache) for cache in flat_caches],
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in flat_caches],
        aliases={3 + len(trees) + i: i for i in range(len(caches))},
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return tuple(out.reshape(shape) for out, shape in zip(outs, shapes, strict=True))


def _kernel(
    path_ref: Any,
    path_length_ref: Any,
    lengths_ref: Any,
    *refs: Any,
    count: int,
    per_program: int,
    groups: int,
) -> None:
    # The caches come in only to be aliased; they are written through the outputs.
    trees, caches = refs[:count], refs[2 * count :]
    step, group = tb.program_id(0), tb.program_id(1)
    row = lengths_ref[()] + step
    node = path_ref[step]
    wanted = (step < path_length_ref[()]) & (row >= 0) & (node >= 0)

    def move(tree: Any, cache: Any) -> None:
        capacity, size = cache.shape
        nodes = tree.shape[0]
        fits = wanted & (row < capacity) & (node < nodes)
        for start, width in _chunks(size):
            column = start + jnp.arange(width, dtype=jnp.int32)
            mask = fits & (column < size)
            # Indices of a dropped row stay in range: nothing is read or written there, but
            # interpret mode writes the old value back and must find it in the same place.
            source = jnp.broadcast_to(jnp.clip(node, 0, nodes - 1), column.shape)
            target = jnp.broadcast_to(jnp.clip(row, 0, capacity - 1), column.shape)
            value = tb.load(tree, source, column, mask=mask, other=jnp.zeros((), tree.dtype))
            tb.store(cache, target, column, value=value, mask=mask)

    for g in range(groups):
        mine = range(g * per_program, min((g + 1) * per_program, count))

        def write(mine: range = mine) -> None:
            for i in mine:
                move(trees[i], caches[i])

        if groups == 1:
            write()
        else:
            tb.when(group == g)(write)


def _chunks(size: int, largest: int = 2048) -> list[tuple[int, int]]:
    """(start, power-of-two width) pieces that cover a row; the last may reach past its end."""
    width = min(largest, tb.next_power_of_two(size))
    return [(i * width, width) for i in range(math.ceil(size / width))]
