"""From processed logits to tokens and probabilities.

A drawn token is a pure function of the request's seed, its position and its logits: the inverse of
the cumulative distribution at uniforms keyed by (seed, position), never by slot, round or tree. A
draft chosen without looking at those uniforms leaves the text unchanged.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.sampling.noise import token_uniforms

NO_TOKEN = -1
"""Stands where no token is possible: every one is masked, or the logits are NaN."""

_BLOCK = 256


def choose_tokens(
    logits: Float[Array, "B T V"],
    temperature: Float[Array, "B"],
    keys: UInt32[Array, "B 2"],
    positions: Int[Array, "B T"],
    *,
    sampled: bool,
) -> Int[Array, "B T"]:
    """The token that follows each node: the largest logit, or a draw.

    Args:
        logits: from `process_logits`: of node t, over the token that follows it.
        temperature: 0 for greedy slots; both kinds mix in a batch.
        keys: raw key data, one a request.
        positions: of the tokens to come (committed length + depth + 1).
        sampled: whether any slot samples; a greedy batch compiles without the draw.

    Returns:
        int32; NO_TOKEN where no token is possible.
    """
    greedy = likeliest(logits)
    if not sampled:
        return greedy
    drawn = draw(weights(logits), token_uniforms(keys, positions))
    return jnp.where(temperature[:, None] > 0, drawn, greedy)


def likeliest(logits: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """The lowest of the tokens with the largest logit; NO_TOKEN where that is not finite."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    largest = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
    return jnp.where(jnp.isfinite(largest), best, NO_TOKEN)


def weights(logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """exp(logits - largest); zeros where no token is possible."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(jnp.isfinite(largest), jnp.exp(logits - largest), 0.0)


def probabilities(
    logits: Float[Array, "B *T V"], temperature: Float[Array, "B"]
) -> Float[Array, "B *T V"]:
    """What each node's token is drawn from; all of it on the likeliest token of greedy slots.

    Zeros where no token is possible.
    """
    mass = weights(logits)
    mass = mass / jnp.maximum(mass.sum(axis=-1, keepdims=True), 1.0)  # the largest weight is 1
    certain = jax.nn.one_hot(likeliest(logits), logits.shape[-1], dtype=mass.dtype)
    slots = temperature.reshape(-1, *[1] * (logits.ndim - 1))
    return jnp.where(slots > 0, mass, certain)


def draw(mass: Float[Array, "*B V"], uniforms: Float[Array, "*B 2"]) -> Int[Array, "*B"]:
    """A token with probability mass / sum of mass, int32; NO_TOKEN where there is no mass.

    The inverse CDF in two steps, first a block of tokens and then one within it, each with a
    uniform of its own: rare tokens keep their probability where the resolution of one float32
    uniform would lose them, and no sum runs over the whole vocabulary.
    """
    *batch, vocabulary = mass.shape
    width = min(vocabulary, _BLOCK)
    blocks = -(-vocabulary // width)
    pad = [(0, 0)] * len(batch) + [(0, blocks * width - vocabulary)]
    blocked = jnp.pad(mass, pad).reshape(*batch, blocks, width)
    block = _invert(blocked.sum(axis=-1), uniforms[..., 0])
    inside = jnp.take_along_axis(blocked, jnp.maximum(block, 0)[..., None, None], axis=-2)
    token = _invert(inside[..., 0, :], uniforms[..., 1])
    return jnp.where((block >= 0) & (token >= 0), block * width + token, NO_TOKEN)


def _invert(mass: Float[Array, "*B N"], uniform: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """The first entry at which the running sum exceeds uniform times the whole; -1 if none."""
    running = jnp.cumsum(mass, axis=-1)
    # An entry without mass is never met, not even where the sums' rounding is not monotone.
    positive = mass > 0
    hit = positive & (running > uniform[..., None] * running[..., -1:])
    last = mass.shape[-1] - 1 - jnp.argmax(positive[..., ::-1], axis=-1)
    found = jnp.where(hit.any(axis=-1), jnp.argmax(hit, axis=-1), last)
    return jnp.where(positive.any(axis=-1), found, -1).astype(jnp.int32)
