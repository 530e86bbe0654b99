"""Log-probabilities of emitted tokens, under the target's unchanged logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.trees.tree import AnyArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogprobLog:
    """What the target thought of every token, and of the likeliest ones in its place.

    Attributes:
        chosen: at the token's own index in the text, [B, C]; prompt tokens have 0.
        top_ids: the N likeliest tokens there, likeliest first, [B, C, N] int32.
        top: their log-probabilities, [B, C, N].
    """

    chosen: Float[AnyArray, "B C"]
    top_ids: Int[AnyArray, "B C N"]
    top: Float[AnyArray, "B C N"]

    @classmethod
    def empty(cls, batch: int, capacity: int, count: int) -> "LogprobLog":
        """Nothing scored yet; N = count."""
        return cls(
            jnp.zeros((batch, capacity)),
            jnp.zeros((batch, capacity, count), jnp.int32),
            jnp.zeros((batch, capacity, count)),
        )

    def add(
        self,
        logits: Float[Array, "B P V"],
        tokens: Int[Array, "B P"],
        at: Int[Array, "B"],
        count: Int[Array, "B"],
    ) -> "LogprobLog":
        """Score tokens[:, :count], which stand at `at` and after.

        Args:
            logits: that each token was chosen from, as the target gave them.
        """
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        own = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)
        best, ids = jax.lax.top_k(logits, self.top.shape[-1])
        step = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        inside = step < count[:, None]
        place = jnp.where(inside, at[:, None] + step, self.chosen.shape[1])
        rows = jnp.arange(tokens.shape[0])[:, None]

        def put(log, value):
            return log.at[rows, place].set(value, mode="drop")

        return LogprobLog(
            put(self.chosen, (own - total)[..., 0]),
            put(self.top_ids, ids.astype(jnp.int32)),
            put(self.top, best - total),
        )
