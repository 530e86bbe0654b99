"""The key/value cache: one pair of arrays a layer, or one, holding committed tokens only."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import commit_path


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Committed keys and values.

    Layers are separate arrays, not one stacked array: an unrolled decode loop then updates each in
    place, where a scan over a stack copies it.

    Attributes:
        keys: N arrays [B, S, K, D].
        values: N arrays [B, S, K, D]; none where a key row holds what values are made of (latent
            attention).
    """

    keys: tuple[Float[Array, "B S K D"], ...]
    values: tuple[Float[Array, "B S K D"], ...]

    @classmethod
    def empty(
        cls,
        num_layers: int,
        batch: int,
        capacity: int,
        heads: int,
        dim: int,
        dtype,
        *,
        values: bool = True,
    ):
        """A cache of zeros for `batch` slots of `capacity` tokens, with or without values."""

        def layers():
            shape = (batch, capacity, heads, dim)
            return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))

        return cls(layers(), layers() if values else ())

    @property
    def capacity(self) -> int:
        """S, tokens a slot can hold."""
        return self.keys[0].shape[1]

    def join(self, later: "KVCache") -> "KVCache":
        """The rows of `self`, then those of `later`."""
        return jax.tree.map(lambda *rows: jnp.concatenate(rows, axis=1), self, later)

    def commit(
        self,
        new: "KVCache",
        path: Int[Array, "B P"],
        path_length: Int[Array, "B"],
        lengths: Int[Array, "B"],
        implementation: str | None = None,
    ) -> "KVCache":
        """Append the rows `path[:, :path_length]` of `new` at `lengths`; nothing else changes.

        Args:
            new: keys and values of one forward pass, N arrays [B, T, K, D].
            path: node ids below T; entries past the path length are ignored.
            path_length: rows to write, 0 to P.
            lengths: tokens committed so far.
            implementation: see `pallas_kernels.commit_path`.
        """
        layers = len(self.keys)
        written = commit_path(
            self.keys + self.values,
            new.keys + new.values,
            path,
            path_length,
            lengths,
            implementation=implementation,
        )
        return KVCache(written[:layers], written[layers:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefix:
    """What a pass stands on: the committed tokens before it.

    Attributes:
        cache: keys and values of the committed tokens.
        lengths: committed tokens a slot, [B] int32; cache rows from there on are never read.
        grown: keys and values of the tree's nodes that earlier passes ran, where a drafter grows
            its tree level by level; they come first among the columns of the ancestor bits.
    """

    cache: KVCache
    lengths: Int[Array, "B"]
    grown: KVCache | None = None
