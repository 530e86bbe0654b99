"""Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one narrow row a token.

A row is the normalised latent that all heads' keys and values are projections of, followed by the
rotated key that all heads share. Over a cache the projections are absorbed: a query is carried
into the latent's space once, attends to the rows as they are, and the mixed latent is projected to
values afterwards, so a pass reads `kv_rank + rope_dim` numbers a token instead of every head's key
and value.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jspec.targets.cache import Prefix
from jspec.targets.config import TargetConfig
from jspec.targets.layers import Linear, RMSNorm
from jspec.targets.rope import pairs_to_halves, rotate
from pallas_kernels import tree_attention
from pallas_kernels.masks import to_qlen_only

_LATENT_EPS = 1e-6
"""Of the norms inside the attention, whatever the model's own epsilon is (the reference code's)."""


class LatentAttention(nnx.Module):
    """Attention through a shared latent; parameters keep the published layout."""

    def __init__(self, config: TargetConfig, *, dtype):
        assert config.latent is not None
        latent, size, bias = config.latent, config.hidden_size, config.qkv_bias
        self.config, self.latent = config, latent
        queries = config.num_heads * (latent.nope_dim + latent.rope_dim)
        if latent.q_rank is None:
            self.q_proj = Linear(size, queries, bias=False, dtype=dtype)
        else:
            self.q_a_proj = Linear(size, latent.q_rank, bias=bias, dtype=dtype)
            self.q_a_norm = RMSNorm(latent.q_rank, _LATENT_EPS, dtype=dtype)
            self.q_b_proj = Linear(latent.q_rank, queries, bias=False, dtype=dtype)
        self.kv_a_proj = Linear(size, latent.row_dim, bias=bias, dtype=dtype)
        self.kv_a_norm = RMSNorm(latent.kv_rank, _LATENT_EPS, dtype=dtype)
        wide = config.num_heads * (latent.nope_dim + latent.value_dim)
        self.kv_b_proj = Linear(latent.kv_rank, wide, bias=False, dtype=dtype)
        values = config.num_heads * latent.value_dim
        self.o_proj = Linear(values, size, bias=config.o_bias, dtype=dtype)

    def __call__(
        self, x, rope, layer: int, prefix: Prefix | None, ancestors, implementation
    ) -> tuple[Array, Array, Any]:
        """Mixed values [B, T, E] and the rows [B, T, 1, kv_rank + rope_dim] to be committed."""
        batch, width, _ = x.shape
        q_nope, q_rope = self._queries(x, rope)
        rows = self._rows(x, rope)
        if prefix is None:
            heads = self._expanded(*self._heads(q_nope, q_rope, rows), ancestors)
        else:
            heads = self._absorbed(q_nope, q_rope, rows, layer, prefix, ancestors, implementation)
        return self.o_proj(heads.reshape(batch, width, -1)), rows, None

    def project(
        self, x: Float[Array, "B T E"], rope
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H D"], Float[Array, "B T H U"]]:
        """Every head's own queries, keys and values, for attention that divides by sqrt(D)."""
        q, k, v = self._heads(*self._queries(x, rope), self._rows(x, rope))
        return q * (self.latent.scale * q.shape[-1] ** 0.5), k, v

    def _queries(self, x: Float[Array, "B T E"], rope):
        latent = self.latent
        if latent.q_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.reshape(*x.shape[:2], self.config.num_heads, latent.nope_dim + latent.rope_dim)
        return q[..., : latent.nope_dim], self._turn(q[..., latent.nope_dim :], rope)

    def _rows(self, x: Float[Array, "B T E"], rope) -> Float[Array, "B T 1 R"]:
        row = self.kv_a_proj(x)[:, :, None, :]
        rank = self.latent.kv_rank
        turned = self._turn(row[..., rank:], rope)
        return jnp.concatenate([self.kv_a_norm(row[..., :rank]), turned], axis=-1)

    def _turn(self, x: Float[Array, "B T H D"], rope) -> Float[Array, "B T H D"]:
        return rotate(pairs_to_halves(x) if self.latent.interleaved else x, *rope)

    def _up(self) -> tuple[Float[Array, "H D R"], Float[Array, "H U R"]]:
        """What makes a head's unrotated key, and its value, out of the latent."""
        heads = self.kv_b_proj.weight[...].reshape(self.config.num_heads, -1, self.latent.kv_rank)
        return heads[:, : self.latent.nope_dim], heads[:, self.latent.nope_dim :]

    def _heads(self, q_nope, q_rope, rows):
        """Queries and keys [B, T, H, D] and values [B, T, H, U] of the new tokens."""
        key_up, value_up = self._up()
        latents, turned = rows[:, :, 0, : self.latent.kv_rank], rows[..., self.latent.kv_rank :]
        k = _project("btr,hdr->bthd", latents, key_up)
        v = _project("btr,hdr->bthd", latents, value_up)
        q = jnp.concatenate([q_nope, q_rope], axis=-1)
        return q, jnp.concatenate([k, jnp.broadcast_to(turned, q_rope.shape)], axis=-1), v

    def _expanded(self, q, k, v, ancestors) -> Float[Array, "B T H U"]:
        """Attention among the new tokens alone, causal or as their bits say."""
        # The op wants one width for keys and values; zeros change neither logits nor sums.
        wide = max(q.shape[-1], v.shape[-1])
        q, k, v = (_widened(part, wide) for part in (q, k, v))
        seen = None if ancestors is None else to_qlen_only(ancestors)[:, None]
        mixed = jax.nn.dot_product_attention(
            q, k, v, scale=self.latent.scale, mask=seen, is_causal=seen is None
        )
        return mixed[..., : self.latent.value_dim]

    def _absorbed(
        self, q_nope, q_rope, rows, layer: int, prefix: Prefix, ancestors, implementation
    ) -> Float[Array, "B T H U"]:
        """Attention over cached rows and tree rows in the latent's own space."""
        cached = prefix.cache.keys[layer]
        if prefix.grown is not None:
            rows = jnp.concatenate([prefix.grown.keys[layer], rows], axis=1)
        key_up, value_up = self._up()
        q = jnp.concatenate([_project("bthd,hdr->bthr", q_nope, key_up), q_rope], axis=-1)
        rank = self.latent.kv_rank
        mixed = tree_attention(
            q,
            cached,
            cached[..., :rank],
            prefix.lengths,
            rows,
            rows[..., :rank],
            ancestors,
            scale=self.latent.scale,
            implementation=implementation,
        )
        return _project("bthr,hdr->bthd", mixed, value_up)


def _project(equation: str, x: Array, weight: Array) -> Array:
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


def _widened(x: Float[Array, "B T H D"], width: int) -> Float[Array, "B T H wide"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
