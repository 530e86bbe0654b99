"""The commit written from the cache's side: which row, if any, lands on each column."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def commit_path_reference(
    caches: tuple[Shaped[Array, "B S ..."], ...],
    trees: tuple[Shaped[Array, "B T ..."], ...],
    path: Int32[Array, "B P"],
    path_length: Int32[Array, " B"],
    lengths: Int32[Array, " B"],
) -> tuple[Shaped[Array, "B S ..."], ...]:
    """The definition every implementation is tested against; see `api.commit_path`."""
    return tuple(
        _commit_one(cache, tree, path, path_length, lengths) for cache, tree in zip(caches, trees)
    )


def _commit_one(cache: Array, tree: Array, path: Array, path_length: Array, lengths: Array):
    column = jnp.arange(cache.shape[1], dtype=jnp.int32)[None, :]
    step = column - lengths[:, None]  # [B, S], the path entry that lands on each column
    inside = (step >= 0) & (step < jnp.minimum(path_length, path.shape[1])[:, None])
    node = jnp.take_along_axis(path, jnp.clip(step, 0, path.shape[1] - 1), axis=1)
    inside &= (node >= 0) & (node < tree.shape[1])
    spread = (...,) + (None,) * (cache.ndim - 2)
    rows = jnp.take_along_axis(tree, jnp.clip(node, 0, tree.shape[1] - 1)[spread], axis=1)
    return jnp.where(inside[spread], rows, cache)
