"""Ancestor bits of tokens that follow one another."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32


def causal_bits(width: int) -> UInt32[Array, "1 T W"]:
    """Ancestor bits of a chain: row i sees nodes 0..i."""
    node, word = np.arange(width)[:, None], np.arange(-(-width // 32))[None, :]
    seen = np.clip(node + 1 - 32 * word, 0, 32).astype(np.uint64)
    return jnp.asarray(((np.uint64(1) << seen) - np.uint64(1)).astype(np.uint32))[None]
