"""Top-k, top-p and min-p as one threshold on the logits, without sorting a vocabulary.

Each keeps the tokens at or above some logit, so together they keep those at or above the largest
of the three. Tokens that tie with the last one kept are kept: for top-k and min-p that is what
transformers does; for top-p transformers keeps an unspecified part of such a tie.

The threshold is read off the largest logits, a few hundred of them. Where a row is not decided by
them (a very flat distribution, a very large k) it is found by bisection over the floats themselves,
31 halvings to the last bit; a batch without such a row skips that.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_CANDIDATES = 128


def keep_threshold(
    logits: Float[Array, "B T V"],
    top_k: Int[Array, "B"] | None,
    top_p: Float[Array, "B"] | None,
    min_p: Float[Array, "B"] | None,
) -> Float[Array, "B T 1"]:
    """The smallest logit kept. Top-p weighs what top-k left, as transformers does.

    Args:
        logits: after the temperature, the largest of each row at 0; rows of only -inf keep all.
        top_k: 0 is off; None where no slot asks, as for the others.
        top_p: 1 is off.
        min_p: 0 is off.
    """
    threshold = jnp.full((*logits.shape[:2], 1), -jnp.inf)
    best = None
    if top_k is not None or top_p is not None:
        best = jax.lax.top_k(logits, min(_CANDIDATES, logits.shape[-1]))[0]
        # Held: the compiler would merge a slice of it into the top-k, and sort the vocabulary.
        best = jax.lax.optimization_barrier(best)
    if top_k is not None:
        threshold = _kth_largest(logits, best, top_k)
    if top_p is not None:
        threshold = jnp.maximum(threshold, _nucleus(logits, best, top_p, threshold))
    if min_p is not None:
        threshold = jnp.maximum(threshold, jnp.log(min_p)[:, None, None])
    return threshold


def _kth_largest(logits, best, top_k) -> Float[Array, "B T 1"]:
    seen, vocabulary = best.shape[-1], logits.shape[-1]
    on = (top_k > 0) & (top_k < vocabulary)
    place = jnp.clip(top_k - 1, 0, seen - 1)[:, None, None]
    found = jnp.take_along_axis(best, jnp.broadcast_to(place, (*best.shape[:2], 1)), axis=-1)
    undecided = jnp.broadcast_to((on & (top_k > seen))[:, None, None], found.shape)

    goal = jnp.broadcast_to(top_k[:, None, None], found.shape).astype(jnp.float32)
    found = _search_where(undecided, logits, goal, found, weighed=False)
    return jnp.where(on[:, None, None], found, -jnp.inf)


def _nucleus(logits, best, top_p, threshold) -> Float[Array, "B T 1"]:
    """The smallest logit with less than top_p of the mass above it."""
    mass = jnp.where(logits >= threshold, jnp.exp(logits), 0.0).sum(axis=-1, keepdims=True)
    goal = top_p[:, None, None] * mass
    above = jnp.cumsum(jnp.exp(best), axis=-1)
    above = jnp.pad(above[..., :-1], ((0, 0), (0, 0), (1, 0)))
    # Of tied logits the first has the true mass above it, and stands for all.
    inside = above < goal
    found = jnp.min(jnp.where(inside, best, jnp.inf), axis=-1, keepdims=True)
    on = jnp.broadcast_to((top_p < 1.0)[:, None, None], found.shape)
    undecided = on & inside[..., -1:] & (best[..., -1:] > threshold)
    if best.shape[-1] == logits.shape[-1]:
        undecided = jnp.zeros_like(undecided)

    found = _search_where(undecided, logits, goal, found, weighed=True)
    return jnp.where(on, found, -jnp.inf)


def _search_where(
    undecided: Bool[Array, "B T 1"],
    logits: Float[Array, "B T V"],
    goal: Float[Array, "B T 1"],
    found: Float[Array, "B T 1"],
    *,
    weighed: bool,
) -> Float[Array, "B T 1"]:
    """For undecided rows the largest cut in [-inf, 0] with as much as `goal` at or above it.

    What is added up is the mass of the tokens if they are weighed, else their number.
    """

    def halve(_, bounds):
        # Floats of one sign are ordered as their bits are: -cut is found among the integers.
        low, high = bounds
        middle = low + (high - low) // 2
        inside = logits >= -jax.lax.bitcast_convert_type(middle, jnp.float32)
        amount = jnp.where(inside, jnp.exp(logits) if weighed else 1.0, 0.0)
        fits = amount.sum(axis=-1, keepdims=True) >= goal
        return jnp.where(fits, low, middle + 1), jnp.where(fits, middle, high)

    def search():
        least = jnp.zeros(goal.shape, jnp.int32)
        most = jnp.full(goal.shape, jnp.inf, jnp.float32).view(jnp.int32)
        _, cut = jax.lax.fori_loop(0, 31, halve, (least, most))
        return jnp.where(undecided, -jax.lax.bitcast_convert_type(cut, jnp.float32), found)

    return jax.lax.cond(undecided.any(), search, lambda: found)
