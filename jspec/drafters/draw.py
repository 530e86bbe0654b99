"""Choosing the children of a node from a drafter's logits: the best ones, or drawn ones."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.base import DraftContext


class Children(NamedTuple):
    """The children of F nodes, in sibling order.

    Attributes:
        ids: in the draft vocabulary, distinct, [B, F, k] int32.
        log_probs: of each child under the drafter, [B, F, k] float32.
        probabilities: what the children were drawn from, [B, F, Vd]; None where they are simply
            the likeliest ones.
    """

    ids: Int[Array, "B F k"]
    log_probs: Float[Array, "B F k"]
    probabilities: Float[Array, "B F Vd"] | None


def pick_children(
    logits: Float[Array, "B F Vd"],
    topk: int,
    context: DraftContext,
    step: int,
    *,
    tempered: float = 1.0,
) -> Children:
    """The topk likeliest children, or topk drawn without replacement at the slot's temperature.

    The largest of logits / temperature + Gumbel noise are a sample without replacement, in order
    (Kool et al. 2019, https://arxiv.org/abs/1903.06059). A slot of temperature 0 takes the
    likeliest also where its neighbours draw. A row with NaN logits gets NaN log-probabilities,
    or draws evenly; never ids outside the vocabulary.

    Args:
        logits: float32.
        topk: k, at most Vd.
        context: its keys, and its temperature or None.
        step: which pass these logits came from; the noise is keyed by request, length and step.
        tempered: divides the logits that `log_probs` come from, where nothing is drawn.
    """
    if context.temperature is None:
        logits = logits if tempered == 1.0 else logits / tempered
        best, ids = jax.lax.top_k(logits, topk)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return Children(ids.astype(jnp.int32), best - total, None)
    draws = context.temperature > 0
    scaled = logits / jnp.where(draws, context.temperature, 1.0)[:, None, None]

    def noise(key, length):
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        typed = jax.random.fold_in(jax.random.fold_in(typed, length), step)
        return jax.random.gumbel(typed, logits.shape[1:])

    scaled = jnp.where(jnp.isnan(jnp.max(scaled, axis=-1, keepdims=True)), 0.0, scaled)
    moved = scaled + jnp.where(
        draws[:, None, None], jax.vmap(noise)(context.keys, context.lengths), 0.0
    )
    ids = jax.lax.top_k(moved, topk)[1].astype(jnp.int32)
    log_all = jax.nn.log_softmax(scaled, axis=-1)
    return Children(ids, jnp.take_along_axis(log_all, ids, axis=-1), jnp.exp(log_all))
