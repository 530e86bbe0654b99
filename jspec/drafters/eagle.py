"""EAGLE-1 and EAGLE-2: one decoder layer that continues the target's last hidden states.

Both have the same weights; EAGLE-2 is EAGLE with a dynamic tree (`TreeConfig`), EAGLE-1 with a
static one (`StaticTree`).

References:
    https://arxiv.org/abs/2401.15077 (EAGLE), https://arxiv.org/abs/2406.16858 (EAGLE-2).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jspec.drafters.base import Rows
from jspec.targets import KVCache, Prefix, TargetConfig
from jspec.targets.decoder import MLP, Attention
from jspec.targets.layers import Linear, RMSNorm, product
from jspec.targets.rope import rotation


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Shapes and switches of an EAGLE-1/2 head.

    Attributes:
        decoder: of the draft layers; vocabulary and hidden size are the target's, and
            `max_context` is the length it was trained on.
        fc_bias: whether the fusion has a bias.
    """

    decoder: TargetConfig
    fc_bias: bool


class EagleLayer(nnx.Module):
    """A decoder layer; the first one of a head has no norm before its attention."""

    def __init__(self, config: TargetConfig, *, first: bool, dtype):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = None if first else RMSNorm(size, eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype)
        self.post_attention_norm = RMSNorm(size, eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype)

    def __call__(self, x, rope, layer: int, prefix: Prefix | None, ancestors):
        normed = x if self.input_norm is None else self.input_norm(x)
        mixed, k, v = self.attention(normed, rope, layer, prefix, ancestors, None)
        x = x + mixed
        return x + self.mlp(self.post_attention_norm(x)), k, v


class Eagle(nnx.Module):
    """x = fc([embed(token), hidden]); layers; what comes out is carried on and read by the head."""

    def __init__(self, config: EagleConfig, *, dtype):
        decoder = config.decoder
        size = decoder.hidden_size
        self.config = config
        self.embedding = nnx.Param(jnp.zeros((decoder.vocab_size, size), dtype))
        self.head = nnx.Param(jnp.zeros((decoder.vocab_size, size), dtype))
        self.fc = Linear(2 * size, size, bias=config.fc_bias, dtype=dtype)
        self.layers = nnx.List(
            [
                EagleLayer(decoder, first=index == 0, dtype=dtype)
                for index in range(decoder.num_layers)
            ]
        )

    def fuse(self, rows: Rows) -> Float[Array, "B R E"]:
        """The target's post-norm hidden states as they are."""
        return rows.hidden

    def __call__(self, tokens, hidden, positions, prefix: Prefix | None, ancestors):
        """One pass; see `DraftModel`. Without a prefix the rows see each other causally."""
        x = self.fc(jnp.concatenate([self.embed(tokens), hidden], axis=-1))
        rope = rotation(self.config.decoder.rope, positions)
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"draft_layer_{index}"):
                x, k, v = layer(x, rope, index, prefix, ancestors)
            keys.append(k)
            values.append(v)
        return x, KVCache(tuple(keys), tuple(values))

    def embed(self, tokens) -> Float[Array, "B R E"]:
        """Rows of the target's embedding matrix (or of the head's own)."""
        return jnp.take(self.embedding[...], tokens, axis=0)

    def logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """The target's head on what is carried on, without a norm."""
        return product(self.head[...], hidden)
