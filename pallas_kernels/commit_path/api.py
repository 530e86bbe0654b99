"""The public path commit: checks, then one of the implementations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from pallas_kernels import checks, dispatch
from pallas_kernels.commit_path.config import CommitPathConfig
from pallas_kernels.commit_path.xla import commit_path_xla

OP = "commit_path"


def commit_path(
    caches: tuple[Shaped[Array, "B S ..."], ...],
    trees: tuple[Shaped[Array, "B T ..."], ...],
    path: Int32[Array, "B P"],
    path_length: Int32[Array, " B"],
    lengths: Int32[Array, " B"],
    *,
    implementation: str | None = None,
    config: CommitPathConfig | None = None,
) -> tuple[Shaped[Array, "B S ..."], ...]:
    """Writes the accepted path's rows behind each slot's committed prefix, in every cache.

    `caches[a][b, lengths[b] + j] = trees[a][b, path[b, j]]` for `j < path_length[b]`; nothing
    else changes. Rows that would fall outside the capacity, and path entries that name no node,
    are dropped; a slot with `path_length` 0 is left alone. The lengths are the caller's to
    advance. The update is in place where the caches are donated or carried through a loop.

    Args:
        caches: one [B, S, ...] array per layer and kind (K, V); shapes behind S may differ.
        trees: the matching [B, T, ...] arrays: same count, trailing sizes and dtypes.
        path: node ids; entries at and beyond `path_length` are ignored.
        path_length: rows to write per slot, 0..P.
        lengths: committed rows per slot.
        implementation: None, "xla", "triton" or "interpret"; see `pallas_kernels.dispatch`.
        config: launch shape of the kernel; None takes the heuristic's.

    Returns:
        The caches, updated.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
        NotImplementedError: a named kernel that does not cover the call.

    Source: SGLang compacts accepted KV in place after verifying; here the tree's KV was never in
    the cache, so the cache holds committed tokens only.
    """
    checks.shape(OP, "path", path, ("B", "P"))
    batch = path.shape[0]
    checks.shape(OP, "path_length", path_length, (batch,))
    checks.shape(OP, "lengths", lengths, (batch,))
    for name, array in (("path", path), ("path_length", path_length), ("lengths", lengths)):
        checks.dtype(OP, name, array, jnp.int32)
    if len(caches) != len(trees):
        raise ValueError(f"{OP}: got {len(caches)} caches and {len(trees)} trees, expected pairs")
    for i, (cache, tree) in enumerate(zip(caches, trees)):
        checks.shape(OP, f"caches[{i}]", cache, (batch, "S", *cache.shape[2:]))
        checks.shape(OP, f"trees[{i}]", tree, (batch, "T", *cache.shape[2:]))
        checks.dtype(OP, f"trees[{i}]", tree, cache.dtype)
    if not caches or 0 in path.shape:
        return tuple(caches)
    table = {
        "xla": commit_path_xla,
        "triton": functools.partial(_kernel, config=config, interpret=False),
        "interpret": functools.partial(_kernel, config=config, interpret=True),
    }
    with jax.named_scope(OP):
        return dispatch.call(
            OP, implementation, table, tuple(caches), tuple(trees), path, path_length, lengths
        )


def _kernel(*args: Any, **options: Any) -> tuple[Array, ...]:
    # Imported on use: the Pallas modules take a second to load and CPU users never need them.
    from pallas_kernels.commit_path.triton import commit_path_triton

    return commit_path_triton(*args, **options)
