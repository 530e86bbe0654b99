"""The token tree that a drafter proposes and the target verifies in one pass."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import TreeLinks, build_tree

if TYPE_CHECKING:
    AnyArray = Array
else:
    AnyArray = Array | np.ndarray
    """On the device, or fetched to the host."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    """T nodes a slot; node 0 is the root, valid nodes come first and after their parents.

    Attributes:
        token: [B, T] int32; node 0 holds the root token.
        parent: [B, T] int32, the parent's node id; -1 for the root and for padding.
        valid: [B, T]; padding nodes are never children and never verified.
        score: [B, T] float32, the drafter's own confidence (its scale is the drafter's; shown to
            people, never used to accept).
        links: what follows from `parent`: depth, ancestor bits, first child, next sibling.
    """

    token: Int[AnyArray, "B T"]
    parent: Int[AnyArray, "B T"]
    valid: Bool[AnyArray, "B T"]
    score: Float[AnyArray, "B T"]
    links: TreeLinks

    @property
    def num_nodes(self) -> int:
        """T, the root included."""
        return self.token.shape[1]

    @property
    def depth(self) -> Int[AnyArray, "B T"]:
        """Edges from the root; position of a node = committed length + depth."""
        return self.links.depth

    @property
    def ancestors(self) -> UInt32[AnyArray, "B T W"]:
        """Bit j of row i: node j is i or above it."""
        return self.links.ancestors

    @property
    def width_used(self) -> Int[Array, "B"]:
        """Nodes a pass must cover: one past the last valid node; 1 when nothing was drafted."""
        ids = jnp.arange(1, self.num_nodes + 1, dtype=jnp.int32)
        return jnp.max(jnp.where(self.valid, ids[None, :], 1), axis=1)

    def head(self, width: int) -> "Tree":
        """The first `width` nodes: closed under parents, since nodes follow theirs."""
        words = (width + 31) // 32
        first = jax.tree.map(lambda leaf: leaf[:, :width], self)
        links = first.links._replace(ancestors=first.links.ancestors[:, :, :words])
        return dataclasses.replace(first, links=links)


def build(
    token: Int[Array, "B T"],
    parent: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    score: Float[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> Tree:
    """Tree from parents.

    A node that is not valid, or hangs from one that is not, becomes padding: token 0, parent -1,
    score 0, invalid.

    Args:
        token: [B, T] int32.
        parent: [B, T] int32, parent[i] < i for valid nodes, anything for the others.
        valid: [B, T]; node 0 always is.
        score: [B, T] float32, zeros when absent.
        implementation: see `pallas_kernels.build_tree`.
    """
    links = build_tree(parent, valid, implementation=implementation)
    below_root = links.depth > 0
    connected = below_root.at[:, 0].set(True)
    if score is None:
        score = jnp.zeros(token.shape, jnp.float32)
    return Tree(
        token=jnp.where(connected, token, 0),
        parent=jnp.where(below_root, parent, -1),
        valid=connected,
        score=jnp.where(connected, score, 0.0),
        links=links,
    )
