"""The commit as one small scatter per cache, which XLA does in place."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def commit_path_xla(
    caches: tuple[Shaped[Array, "B S ..."], ...],
    trees: tuple[Shaped[Array, "B T ..."], ...],
    path: Int32[Array, "B P"],
    path_length: Int32[Array, " B"],
    lengths: Int32[Array, " B"],
) -> tuple[Shaped[Array, "B S ..."], ...]:
    """See `api.commit_path` for the contract."""
    batch, width = path.shape
    step = jnp.arange(width, dtype=jnp.int32)[None, :]
    slot = jnp.arange(batch, dtype=jnp.int32)[:, None]
    row = lengths[:, None] + step
    wanted = (step < path_length[:, None]) & (row >= 0) & (path >= 0)

    def commit(cache: Array, tree: Array) -> Array:
        capacity, nodes = cache.shape[1], tree.shape[1]
        # A row that must not be written is sent past the end, where the scatter drops it. An
        # update slice would be clamped to the capacity instead, onto rows of the past.
        target = jnp.where(wanted & (path < nodes), row, capacity)
        rows = tree[slot, jnp.clip(path, 0, nodes - 1)]
        return cache.at[slot, target].set(rows, mode="drop")

    return tuple(commit(cache, tree) for cache, tree in zip(caches, trees))
