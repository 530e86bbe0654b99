"""What is derived from a tree's parents."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32


class TreeLinks(NamedTuple):
    """Everything a verifier needs to know of a tree's shape.

    Padding has depth 0, sees only itself, and is nobody's child.

    Attributes:
        depth: [B, T] int32, levels below the root. A node's position is its slot's committed
            length plus its depth: `lengths[:, None] + depth`.
        ancestors: [B, T, W] uint32; bit j of row i says that node j is i or above it.
        first_child: [B, T] int32, the lowest child, or -1.
        next_sibling: [B, T] int32, the next higher child of the same parent, or -1.
    """

    depth: Int32[Array, "B T"]
    ancestors: UInt32[Array, "B T W"]
    first_child: Int32[Array, "B T"]
    next_sibling: Int32[Array, "B T"]

    @property
    def parent(self) -> Int32[Array, "B T"]:
        """[B, T] int32, -1 for the root and for padding."""
        return parents_from_ancestors(self.ancestors)


def own_bits(nodes: int) -> UInt32[Array, "T W"]:
    """Row i has bit i and nothing else."""
    node = jnp.arange(nodes, dtype=jnp.uint32)[:, None]
    word = jnp.arange(-(-nodes // 32), dtype=jnp.uint32)[None, :]
    return jnp.where(node // 32 == word, jnp.uint32(1) << (node % 32), jnp.uint32(0))


def parents_from_ancestors(ancestors: UInt32[Array, "B T W"]) -> Int32[Array, "B T"]:
    """The highest set bit below a node's own: parents precede children, so that is the parent."""
    _, nodes, words = ancestors.shape
    strict = ancestors & ~own_bits(nodes)[None]
    top = 31 - jax.lax.clz(strict).astype(jnp.int32)  # -1 in an empty word
    base = jnp.arange(words, dtype=jnp.int32)[None, None, :] * 32
    return jnp.where(top >= 0, base + top, -1).max(axis=-1)
