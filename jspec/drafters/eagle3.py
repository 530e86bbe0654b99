"""EAGLE-3: several layers' features fused, a draft vocabulary, and an own head.

Reference: https://arxiv.org/abs/2503.01840. The switches are those of the tools that train such
heads: SpecForge, speculators and ModelOpt.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jspec.drafters.base import Rows
from jspec.targets import KVCache, Prefix, TargetConfig
from jspec.targets.decoder import MLP, Attention, DecoderLayer
from jspec.targets.layers import Linear, RMSNorm, product
from jspec.targets.rope import rotation


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Shapes and switches of an EAGLE-3 head.

    Attributes:
        decoder: of the draft layers; `vocab_size` is the target's, `max_context` the length it was
            trained on.
        draft_vocab_size: Vd; equal to the target's vocabulary where there is no map.
        target_hidden_size: Et, width of each feature.
        feature_layers: the target layers whose **outputs** it reads, low to high.
        target_num_layers: N, layers of the target.
        norm_before_residual: the first layer's residual is the normed hidden state, not the raw.
        norm_before_fc: one RMSNorm over the concatenated features.
        fc_norm: one RMSNorm for each feature.
        norm_output: what is carried on is normed (the head reads the normed state either way).
    """

    decoder: TargetConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    target_num_layers: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self):
        layers = self.feature_layers
        inside = layers and min(layers) >= 0 and max(layers) < self.target_num_layers
        if not inside or sorted(set(layers)) != list(layers):
            raise ValueError(
                f"feature layers {list(layers)}: expected distinct layer outputs from 0 to "
                f"{self.target_num_layers - 1} in rising order."
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other; one norm is enough.")
        if not 1 <= self.draft_vocab_size <= self.decoder.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size}; expected 1 to the target's vocabulary "
                f"of {self.decoder.vocab_size}."
            )


class FirstLayer(nnx.Module):
    """Attention reads [norm(embedding), norm(hidden)]; the residual is the hidden state alone."""

    def __init__(self, config: Eagle3Config, *, dtype):
        decoder = config.decoder
        size, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_norm = RMSNorm(size, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(size, eps, dtype=dtype)
        self.attention = Attention(decoder, dtype=dtype, in_features=2 * size)
        self.post_attention_norm = RMSNorm(size, eps, dtype=dtype)
        self.mlp = MLP(decoder, dtype=dtype)

    def inputs(self, embedded, hidden):
        """What attention reads, [B, R, 2E], and the residual, [B, R, E]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return jnp.concatenate([self.input_norm(embedded), normed], axis=-1), residual

    def __call__(self, embedded, hidden, rope, prefix: Prefix | None, ancestors):
        read, residual = self.inputs(embedded, hidden)
        mixed, k, v = self.attention(read, rope, 0, prefix, ancestors, None)
        x = residual + mixed
        return x + self.mlp(self.post_attention_norm(x)), k, v


class Eagle3(nnx.Module):
    """Fusion, layers, final norm and head."""

    def __init__(self, config: Eagle3Config, *, dtype):
        decoder = config.decoder
        size, eps, chunk = decoder.hidden_size, decoder.rms_norm_eps, config.target_hidden_size
        count = len(config.feature_layers)
        self.config = config
        self.embedding = nnx.Param(jnp.zeros((decoder.vocab_size, size), dtype))
        joined, each = config.norm_before_fc, config.fc_norm
        self.input_norm = RMSNorm(count * chunk, eps, dtype=dtype) if joined else None
        norms = [RMSNorm(chunk, eps, dtype=dtype) for _ in range(count)] if each else []
        self.fc_norm = nnx.List(norms)
        self.fc = Linear(count * chunk, size, bias=False, dtype=dtype)
        self.first = FirstLayer(config, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(decoder, dtype=dtype) for _ in range(decoder.num_layers - 1)]
        )
        self.norm = RMSNorm(size, eps, dtype=dtype)
        self.head = nnx.Param(jnp.zeros((config.draft_vocab_size, size), dtype))

    def fuse(self, rows: Rows) -> Float[Array, "B R E"]:
        """fc of the features, low to high."""
        return self.fuse_features(rows.features)

    def fuse_features(self, features: tuple[Float[Array, "B R Et"], ...]) -> Float[Array, "B R E"]:
        """fc of the features, low to high, normed as the config says."""
        if self.config.fc_norm:
            features = tuple(norm(chunk) for norm, chunk in zip(self.fc_norm, features))
        joined = jnp.concatenate(features, axis=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def __call__(self, tokens, hidden, positions, prefix: Prefix | None, ancestors):
        """One pass; see `DraftModel`. Without a prefix the rows see each other causally."""
        rope = rotation(self.config.decoder.rope, positions)
        with jax.named_scope("draft_layer_0"):
            x, k, v = self.first(self.embed(tokens), hidden, rope, prefix, ancestors)
        keys, values = [k], [v]
        for index, layer in enumerate(self.layers, start=1):
            with jax.named_scope(f"draft_layer_{index}"):
                x, k, v = layer(x, rope, index, prefix, ancestors, None)
            keys.append(k)
            values.append(v)
        carried = self.norm(x) if self.config.norm_output else x
        return carried, KVCache(tuple(keys), tuple(values))

    def embed(self, tokens) -> Float[Array, "B R E"]:
        """Rows of the embedding matrix."""
        return jnp.take(self.embedding[...], tokens, axis=0)

    def logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B Vd"]:
        """The head's own projection of the normed state, over the draft vocabulary."""
        return product(self.head[...], hidden if self.config.norm_output else self.norm(hidden))
