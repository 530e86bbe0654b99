"""Typical acceptance: keep what the target finds plausible. Lossy."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.drafters.base import Proposal
from jspec.sampling import NodeLogits, likeliest, probabilities
from jspec.trees import Tree
from jspec.verify.rule import Rule, Slots
from pallas_kernels import Walk


@dataclass(frozen=True)
class TypicalAcceptance(Rule):
    """Accept a drafted token x if p(x) > min(epsilon, delta·exp(-H(p))).

    Lossy: the text is not distributed as the target's. Of the longest accepted paths the likeliest
    is taken, and the target's own tokens are its likeliest ones, so nothing is drawn at all: seen
    as samples, the texts are at total variation 1 - P(this text) from the target's. At temperature
    0 it is greedy verification.

    Medusa, section 2.3.1 (https://arxiv.org/abs/2401.10774), with its inference defaults. The
    reference pads short paths with token 0 and may accept the padding; here paths have no padding.

    Attributes:
        epsilon: accept anything more probable.
        delta: lowers the bar where the target is undecided.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False
    draws: ClassVar[bool] = False

    def __post_init__(self):
        for field in ("epsilon", "delta"):
            if not 0.0 < getattr(self, field) <= 1.0:
                raise ValueError(
                    f"{field}={getattr(self, field)}; expected a number above 0, at most 1."
                )

    def walk(
        self,
        logits: NodeLogits,
        proposal: Proposal,
        slots: Slots,
        *,
        max_path: int,
        implementation: str | None = None,
    ) -> Walk:
        tree = proposal.tree
        batch, nodes = tree.token.shape
        rows = jnp.arange(batch)[:, None]

        def look(node: Array) -> tuple[Array, Array, Array]:
            """The likeliest token after a node, the bar for its children, and their chances."""
            row = logits.at(jnp.full((batch,), node))
            chance = probabilities(row, slots.temperature)
            entropy = -(chance * jnp.log(chance + 1e-5)).sum(axis=-1)
            bar = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
            return likeliest(row), bar, chance[rows, tree.token]

        best, bar, chances = jax.lax.map(look, jnp.arange(nodes, dtype=jnp.int32))
        parent = jnp.maximum(tree.parent, 0)
        chance = chances[parent, rows, jnp.arange(nodes)]
        kept = (chance > bar[parent, rows]) & (tree.parent >= 0)
        node = _best_node(tree, kept, jnp.log(jnp.where(kept, chance, 1.0)), max_path)
        path = _path_to(tree, node, max_path)
        length = tree.depth[rows, node[:, None]][:, 0] + 1
        return Walk(path, length, best[node, rows[:, 0]])


def _best_node(tree: Tree, kept: Any, log_chance: Any, max_path: int) -> Int[Array, "B"]:
    """The deepest node whose whole branch is kept; of several, that of the likeliest branch."""
    parent = jnp.maximum(tree.parent, 0)
    root = jnp.zeros(parent.shape, bool).at[:, 0].set(True)
    reached, total = root, jnp.zeros(parent.shape, jnp.float32)
    for _ in range(1, max_path):
        reached = root | (kept & jnp.take_along_axis(reached, parent, axis=1))
        total = jnp.where(root, 0.0, log_chance + jnp.take_along_axis(total, parent, axis=1))
    depth = jnp.where(reached, tree.depth, -1)
    deepest = depth == depth.max(axis=1, keepdims=True)
    return jnp.argmax(jnp.where(deepest, total, -jnp.inf), axis=1).astype(jnp.int32)


def _path_to(tree: Tree, node: Int[Array, "B"], max_path: int) -> Int[Array, "B P"]:
    """Nodes from the root to `node`, which then repeats."""
    rows = jnp.arange(node.shape[0])
    place = jnp.arange(max_path, dtype=jnp.int32)[None, :]
    path = jnp.broadcast_to(node[:, None], (node.shape[0], max_path))
    for _ in range(1, max_path):
        above = tree.depth[rows, node] - 1
        node = jnp.maximum(tree.parent[rows, node], 0)
        path = jnp.where(place == above[:, None], node[:, None], path)
    return path
