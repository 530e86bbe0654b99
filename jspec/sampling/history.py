"""What a node's penalties look back on: prompt, committed output, and the node's own branch."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.trees import Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """Tokens a slot has seen, counted once a round and not once a node.

    Attributes:
        prompt: whether a token is in the prompt, [B, V].
        output: how often a token is in the committed output, [B, V] int32. The root and what
            hangs from it are not committed: they come from `branch_tokens`.
    """

    prompt: Bool[Array, "B V"]
    output: Int[Array, "B V"]

    @classmethod
    def of_prompts(
        cls, tokens: Int[Array, "B C"], lengths: Int[Array, "B"], vocabulary: int
    ) -> "History":
        """Of prompts tokens[:, :lengths], before any output."""
        batch, width = tokens.shape
        inside = jnp.arange(width, dtype=jnp.int32)[None, :] < lengths[:, None]
        empty = jnp.zeros((batch, vocabulary), jnp.int32)
        counts = _count(empty, jnp.where(inside, tokens, vocabulary))
        return cls(counts > 0, empty)

    def add(self, tokens: Int[Array, "B P"], count: Int[Array, "B"]) -> "History":
        """With output tokens[:, :count] committed."""
        inside = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < count[:, None]
        vocabulary = self.output.shape[1]
        output = _count(self.output, jnp.where(inside, tokens, vocabulary))
        return replace(self, output=output)


def branch_tokens(tree: Tree, depth: int) -> Int[Array, "B T A"]:
    """Each node's token and those above it, the root's last, padded with -1; A = depth + 1."""
    node = jnp.broadcast_to(jnp.arange(tree.num_nodes, dtype=jnp.int32), tree.token.shape)
    columns = []
    for _ in range(depth + 1):
        at = jnp.maximum(node, 0)
        columns.append(jnp.where(node >= 0, jnp.take_along_axis(tree.token, at, axis=1), -1))
        node = jnp.where(node >= 0, jnp.take_along_axis(tree.parent, at, axis=1), -1)
    return jnp.stack(columns, axis=-1)


def _count(counts: Int[Array, "B V"], tokens: Int[Array, "B P"]) -> Int[Array, "B V"]:
    rows = jnp.arange(counts.shape[0])[:, None]
    return counts.at[rows, tokens].add(1, mode="drop")
