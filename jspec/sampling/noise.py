"""Randomness of a request: uniforms keyed by its seed and a position, in streams kept apart.

Nothing here knows of slots, batches or neighbours, so neither does what is drawn with it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

_KEY_KIND = "threefry2x32"
_DRAFT_STREAM = 0xFFFFFFFF
_VERDICT_STREAM = 0xFFFFFFFE


def draft_keys(keys: UInt32[Array, "B 2"]) -> UInt32[Array, "B 2"]:
    """Each request's keys for its drafter, in a stream apart from the target's.

    A draft that shared the target's noise would be correlated with what it is checked against, and
    sampling would no longer be exact. The target folds in positions, which are never this value.
    """
    return _stream(keys, _DRAFT_STREAM)


def token_uniforms(
    keys: UInt32[Array, "B 2"], positions: Int[Array, "B T"]
) -> Float[Array, "B T 2"]:
    """Two uniforms in [0, 1) for the token at each position, float32."""

    def one(key, position):
        typed = jax.random.wrap_key_data(key, impl=_KEY_KIND)
        return jax.random.uniform(jax.random.fold_in(typed, position), (2,))

    return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions)


def verdict_uniforms(
    keys: UInt32[Array, "B 2"], lengths: Int[Array, "B"], count: int
) -> Float[Array, "B N"]:
    """`count` uniforms in [0, 1) for the round that begins at a committed length, float32.

    A round's length is its own, so no coin is thrown twice, also where a rule looks at nodes
    beyond those it accepts.
    """

    def one(key, length):
        typed = jax.random.wrap_key_data(key, impl=_KEY_KIND)
        return jax.random.uniform(jax.random.fold_in(typed, length), (count,))

    return jax.vmap(one)(_stream(keys, _VERDICT_STREAM), lengths)


def _stream(keys: UInt32[Array, "B 2"], stream: int) -> UInt32[Array, "B 2"]:
    def derive(key):
        typed = jax.random.wrap_key_data(key, impl=_KEY_KIND)
        return jax.random.key_data(jax.random.fold_in(typed, jnp.uint32(stream)))

    return jax.vmap(derive)(keys)
