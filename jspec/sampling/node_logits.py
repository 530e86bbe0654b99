"""The target's logits after every node of a tree, processed where somebody asks for them."""

from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.sampling.history import History
from jspec.sampling.processing import Shaping, process_logits


@dataclass(frozen=True)
class NodeLogits:
    """What tokens are drawn from at the nodes of B trees.

    A walk sees few of the nodes, and one node a slot at a time: only their rows are processed, and
    nothing of the size of all logits is stored beside them.

    Attributes:
        raw: as the target gave them, [B, T, V] float32; of node t, over the token that follows it.
        temperature: 0 for greedy slots, [B].
        places: in the output, of the tokens to come, [B, T] int32.
        shaping: what the slots ask.
        history: prompt and committed output; None where nothing looks back.
        branch: uncommitted tokens before each place, [B, T, A] int32; None where nothing looks
            back.
        sampled: whether any slot samples.
    """

    raw: Float[Array, "B T V"]
    temperature: Float[Array, "B"]
    places: Int[Array, "B T"]
    shaping: Shaping = field(default_factory=Shaping)
    history: History | None = None
    branch: Int[Array, "B T A"] | None = None
    sampled: bool = True

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.raw.shape[-1]

    def at(self, node: Int[Array, "B"]) -> Float[Array, "B V"]:
        """After one node of every slot; see `process_logits`."""
        rows = jnp.arange(node.shape[0])
        branch = None if self.branch is None else self.branch[rows, node][:, None]
        return self._processed(
            self.raw[rows, node][:, None], self.places[rows, node][:, None], branch
        )[:, 0]

    def every(self) -> Float[Array, "B T V"]:
        """After all nodes at once."""
        return self._processed(self.raw, self.places, self.branch)

    def _processed(self, raw, places, branch) -> Float[Array, "B N V"]:
        return process_logits(
            raw,
            self.shaping,
            self.temperature,
            places,
            self.history,
            branch,
            sampled=self.sampled,
        )
