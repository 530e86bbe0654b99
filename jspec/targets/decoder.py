"""The decoder: every supported family in one module, as its config says.

A pass reads the committed prefix from the cache and the new tokens' keys and values from itself,
so the same function prefills a prompt, decodes one token and verifies a tree. It writes nothing:
what it returns is committed, or not, by the caller.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from jspec.targets.cache import KVCache, Prefix
from jspec.targets.config import TargetConfig
from jspec.targets.layers import Linear, RMSNorm, product
from jspec.targets.mla import LatentAttention
from jspec.targets.mlp import MLP
from jspec.targets.moe import Experts
from jspec.targets.rope import rotate, rotation
from pallas_kernels import tree_attention
from pallas_kernels.masks import to_qlen_only


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pass:
    """What one forward pass of a target yields.

    Attributes:
        hidden: after the final norm, [B, T, E]; what the head and most drafters read.
        features: the residual stream after each requested layer, [B, T, E] each, not normalised.
        new: keys and values of these T tokens, to be committed by path.
    """

    hidden: Float[Array, "B T E"]
    features: tuple[Float[Array, "B T E"], ...]
    new: KVCache


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions. q, k and v are one product."""

    def __init__(self, config: TargetConfig, *, dtype, in_features: int | None = None):
        self.config = config
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        width = config.hidden_size if in_features is None else in_features
        self.qkv_proj = Linear(width, rows, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias, dtype=dtype
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)

    def project(self, x: Float[Array, "B T I"], rope):
        """Queries [B, T, H, D], keys and values [B, T, K, D], rotated to their positions."""
        config = self.config
        heads = self.qkv_proj(x).reshape(*x.shape[:2], -1, config.head_dim)
        q, k, v = jnp.split(
            heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=2
        )
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rope), rotate(k, *rope), v

    def __call__(self, x, rope, layer: int, prefix: Prefix | None, ancestors, implementation):
        batch, width, _ = x.shape
        q, k, v = self.project(x, rope)
        if prefix is None:
            seen = None if ancestors is None else to_qlen_only(ancestors)[:, None]
            mixed = jax.nn.dot_product_attention(q, k, v, mask=seen, is_causal=seen is None)
        else:
            all_k, all_v = k, v
            if prefix.grown is not None:
                all_k = jnp.concatenate([prefix.grown.keys[layer], k], axis=1)
                all_v = jnp.concatenate([prefix.grown.values[layer], v], axis=1)
            mixed = tree_attention(
                q,
                prefix.cache.keys[layer],
                prefix.cache.values[layer],
                prefix.lengths,
                all_k,
                all_v,
                ancestors,
                implementation=implementation,
            )
        return self.o_proj(mixed.reshape(batch, width, -1)), k, v


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream.

    Args:
        config: of the model; says which kind of attention.
        dtype: of the parameters.
        experts: a mixture of experts instead of one MLP.
    """

    def __init__(self, config: TargetConfig, *, dtype, experts: bool = False):
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(config.hidden_size, eps, dtype=dtype)
        attention = Attention if config.latent is None else LatentAttention
        self.attention = attention(config, dtype=dtype)
        self.post_attention_norm = RMSNorm(config.hidden_size, eps, dtype=dtype)
        self.mlp = Experts(config, dtype=dtype) if experts else MLP(config, dtype=dtype)

    def __call__(self, x, rope, layer: int, prefix: Prefix | None, ancestors, implementation):
        with jax.named_scope("attention"):
            mixed, k, v = self.attention(
                self.input_norm(x), rope, layer, prefix, ancestors, implementation
            )
        x = x + mixed
        with jax.named_scope("mlp"):
            x = x + self.mlp(self.post_attention_norm(x))
        return x, k, v


class Decoder(nnx.Module):
    """Embedding, N decoder layers, final norm and head."""

    def __init__(self, config: TargetConfig, *, dtype):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jnp.zeros(shape, dtype))
        self.layers = nnx.List(
            [
                DecoderLayer(config, dtype=dtype, experts=config.has_experts(layer))
                for layer in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        # A tied head is a method over the embedding, not a second reference to it.
        self.head = None if config.tie_embeddings else nnx.Param(jnp.zeros(shape, dtype))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        prefix: Prefix | None,
        ancestors: UInt32[Array, "B T W"] | None,
        *,
        feature_layers: tuple[int, ...] = (),
        implementation: str | None = None,
    ) -> Pass:
        """One pass over T new tokens a slot.

        Args:
            tokens: ids.
            positions: of each token in its sequence (committed length + depth).
            prefix: the committed tokens, or None where there are none; then the new tokens see
                each other causally.
            ancestors: the bits of the nodes each one sees (itself included): those grown before,
                then the new ones. Needed with a prefix; without one None is causal.
            feature_layers: layers whose output is returned, in this order (0 to N-1).
            implementation: of tree attention; see `pallas_kernels`.
        """
        x = self.embed(tokens)
        rope = rotation(self.config.rope, positions)
        outputs, keys, values = {}, [], []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x, k, v = layer(x, rope, index, prefix, ancestors, implementation)
            keys.append(k)
            if v is not None:
                values.append(v)
            if index in feature_layers:
                outputs[index] = x
        features = tuple(outputs[layer] for layer in feature_layers)
        return Pass(self.norm(x), features, KVCache(tuple(keys), tuple(values)))

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Rows of the embedding matrix."""
        return jnp.take(self.embedding[...], tokens, axis=0)

    def logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Head of the post-norm hidden states, float32."""
        return product(self.embedding[...] if self.head is None else self.head[...], hidden)
