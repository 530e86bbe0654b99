"""Attention of a training-time-test step: causal over the true rows, plus the row's own guesses.

At step k every row sees the keys of step 0 at or before it, and of each later step i <= k the key
of the same row only: what it would have in its cache after drafting k tokens. The k extra scores
are one dot product a row, so nothing of size T·(T + K) a head is ever held: queries are taken in
blocks, and the backward pass computes a block's scores again.

Reference: EAGLE-3, https://arxiv.org/abs/2503.01840, section 3.2 and figure 6.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128
"""Queries whose scores are held at a time."""


def unrolled_attention(
    q: Float[Array, "B R H D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K U"],
    own_keys: Sequence[Float[Array, "B R K D"]],
    own_values: Sequence[Float[Array, "B R K D"]],
    rows: Int[Array, "B R"],
    documents: Int[Array, "B T"],
) -> Float[Array, "B R H U"]:
    """Mix the values for R query rows.

    Args:
        q: rotated queries.
        keys, values: of step 0, one row a token.
        own_keys, own_values: of the later steps up to this one, each only for its own row.
        rows: position 0 to T - 1 of each query row.
        documents: texts that share a sequence do not see each other.
    """
    batch, count, heads, dim = q.shape
    groups = heads // keys.shape[2]
    block = min(BLOCK, count)
    blocks = -(-count // block)
    pad = blocks * block - count

    def cut(x):
        """[B, R, ...] -> [blocks, B, block, ...]."""
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, blocks, block, *x.shape[2:]), 1, 0)

    place = jnp.arange(keys.shape[1], dtype=jnp.int32)

    @jax.checkpoint
    def mix(part):
        q, own_k, own_v, row = part
        q = q.reshape(batch, block, -1, groups, dim) * dim**-0.5
        scores = jnp.einsum("bqkgd,btkd->bkgqt", q, keys, preferred_element_type=jnp.float32)
        here = jnp.take_along_axis(documents, row, axis=1)
        seen = (place[None, None, :] <= row[:, :, None]) & (
            documents[:, None, :] == here[:, :, None]
        )
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        own = [
            jnp.einsum("bqkgd,bqkd->bkgq", q, k, preferred_element_type=jnp.float32) for k in own_k
        ]
        top = scores.max(axis=-1)
        for score in own:
            top = jnp.maximum(top, score)
        top = jax.lax.stop_gradient(top)
        weight = jnp.exp(scores - top[..., None])
        total = weight.sum(axis=-1)
        mixed = jnp.einsum(
            "bkgqt,btkd->bqkgd", weight.astype(q.dtype), values, preferred_element_type=jnp.float32
        )
        for score, value in zip(own, own_v):
            share = jnp.exp(score - top)
            total = total + share
            share = share.transpose(0, 3, 1, 2)[..., None]
            mixed = mixed + share * value[:, :, :, None].astype(jnp.float32)
        mixed = mixed / total.transpose(0, 3, 1, 2)[..., None]
        return mixed.astype(q.dtype).reshape(batch, block, heads, -1)

    parts = (cut(q), tuple(map(cut, own_keys)), tuple(map(cut, own_values)), cut(rows))
    mixed = jnp.moveaxis(jax.lax.map(mix, parts), 0, 1)
    return mixed.reshape(batch, blocks * block, heads, -1)[:, :count]
