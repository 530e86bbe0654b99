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
        logits: from `process_logits` with the same `sampled`, so that the largest of a row to be
            drawn from is 0; of node t, over the token that follows it.
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
    drawn = draw(logits, token_uniforms(keys, positions), logarithms=True)
    return jnp.where(temperature[:, None] > 0, drawn, greedy)


def likeliest(logits: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """The lowest of the tokens with the largest logit; NO_TOKEN where that is not finite.

    Block by block: on a CPU several times as fast as an argmax over the vocabulary.
    """
    block = jnp.argmax(_blocks(logits, -jnp.inf).max(axis=-1), axis=-1)
    inside, ids = _block_at(logits, block, -jnp.inf)
    best = jnp.argmax(inside, axis=-1)[..., None]
    found = jnp.take_along_axis(ids, best, axis=-1)[..., 0]
    largest = jnp.take_along_axis(inside, best, axis=-1)[..., 0]
    return jnp.where(jnp.isfinite(largest), found, NO_TOKEN)


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


def draw(
    mass: Float[Array, "*B V"], uniforms: Float[Array, "*B 2"], *, logarithms: bool = False
) -> Int[Array, "*B"]:
    """A token with probability mass / sum of mass, int32; NO_TOKEN where there is no mass.

    The inverse CDF in two steps, first a block of tokens and then one within it, each with a
    uniform of its own: rare tokens keep their probability where the resolution of one float32
    uniform would lose them, and no sum runs over the whole vocabulary.

    Args:
        mass: at least 0, or its logarithms, at most 0.
        uniforms: in [0, 1).
        logarithms: which of the two `mass` is.
    """
    nothing = -jnp.inf if logarithms else 0.0
    blocks = _blocks(mass, nothing)
    block = _invert((jnp.exp(blocks) if logarithms else blocks).sum(axis=-1), uniforms[..., 0])
    inside, ids = _block_at(mass, jnp.maximum(block, 0), nothing)
    token = _invert(jnp.exp(inside) if logarithms else inside, uniforms[..., 1])
    found = jnp.take_along_axis(ids, jnp.maximum(token, 0)[..., None], axis=-1)[..., 0]
    return jnp.where((block >= 0) & (token >= 0), found, NO_TOKEN)


def _blocks(values: Float[Array, "*B V"], fill: float) -> Float[Array, "*B N W"]:
    """Blocks of consecutive tokens, the last one filled up."""
    *batch, vocabulary = values.shape
    width = min(vocabulary, _BLOCK)
    blocks = -(-vocabulary // width)
    pad = [(0, 0)] * len(batch) + [(0, blocks * width - vocabulary)]
    filled = jnp.pad(values, pad, constant_values=fill)
    return filled.reshape(*batch, blocks, width)


def _block_at(
    values: Float[Array, "*B V"], block: Int[Array, "*B"], fill: float
) -> tuple[Float[Array, "*B W"], Int[Array, "*B W"]]:
    """One block of every row, and its token ids."""
    vocabulary = values.shape[-1]
    width = min(vocabulary, _BLOCK)
    place = jnp.arange(width, dtype=jnp.int32).reshape(*[1] * block.ndim, width)
    ids = block.astype(jnp.int32)[..., None] * width + place
    inside = jnp.take_along_axis(values, jnp.minimum(ids, vocabulary - 1), axis=-1)
    return jnp.where(ids < vocabulary, inside, fill), ids


def _invert(mass: Float[Array, "*B N"], uniform: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """The first entry at which the running sum exceeds uniform times the whole; -1 if none."""
    running = jnp.cumsum(mass, axis=-1)
    # An entry without mass is never met, not even where the sums' rounding is not monotone.
    positive = mass > 0
    hit = positive & (running > uniform[..., None] * running[..., -1:])
    last = mass.shape[-1] - 1 - jnp.argmax(positive[..., ::-1], axis=-1)
    found = jnp.where(hit.any(axis=-1), jnp.argmax(hit, axis=-1), last)
    return jnp.where(positive.any(axis=-1), found, -1).astype(jnp.int32)
