"""How many numbers a model is made of, from the shapes in its config alone.

Letters are those of the house: E hidden size, F MLP width, N layers, H query heads, K KV heads, D
head dim, V vocabulary. Every count is of numbers, not bytes.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jspec.targets.config import TargetConfig, config_from_hf


def _dense(
    size: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": size,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def _qwen3(
    size: int, mlp: int, layers: int, heads: int, *, tied: bool, kv_heads: int = 8
) -> dict[str, Any]:
    shape = _dense(size, mlp, layers, heads, kv_heads, 151_936, tied=tied)
    return shape | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}


_LLAMA3_VOCAB = 128_256

PRESETS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _dense(4096, 14336, 32, 32, 8, _LLAMA3_VOCAB, tied=False),
    "llama-3.1-8b": _dense(4096, 14336, 32, 32, 8, _LLAMA3_VOCAB, tied=False),
    "llama-3.2-1b": _dense(2048, 8192, 16, 32, 8, _LLAMA3_VOCAB, tied=True),
    "llama-3.3-70b": _dense(8192, 28672, 80, 64, 8, _LLAMA3_VOCAB, tied=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129_280,
        "tie_word_embeddings": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "smollm2-135m": _dense(576, 1536, 30, 9, 3, 49_152, tied=True),
}
"""Shapes of published models, as their config.json have them; what does not change a count (norm
epsilon, rotary embedding, context) is left out."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder as far as its cost goes.

    Attributes:
        name: for tables.
        config: its facts.
    """

    name: str
    config: TargetConfig

    @property
    def embedding_params(self) -> int:
        """V·E; a pass reads one row of it a token."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def head_params(self) -> int:
        """V·E; a pass reads all of it, be it the embedding matrix (tied) or one of its own."""
        return self.config.vocab_size * self.config.hidden_size

    def attention_params(self, in_features: int | None = None) -> int:
        """Projections of one layer's attention, with biases and the norms inside.

        Grouped queries: in·(H + 2K)·D + H·D·E. Latent attention (DeepSeek-V2, section 2.1), with
        ranks Rq and R, head parts n (not rotated), r (rotated) and v (value):
        E·Rq + Rq·H·(n + r) + E·(R + r) + R·H·(n + v) + H·v·E.

        Args:
            in_features: what queries, keys and values are projected from; default E. EAGLE-3's
                first layer reads 2E.
        """
        config = self.config
        size, heads = config.hidden_size, config.num_heads
        wide = size if in_features is None else in_features
        latent = config.latent
        if latent is None:
            rows = (heads + 2 * config.num_kv_heads) * config.head_dim
            out = heads * config.head_dim
            norms = 2 * config.head_dim if config.qk_norm else 0
            biases = rows * config.qkv_bias + size * config.o_bias
            return wide * rows + out * size + norms + biases
        queries = heads * (latent.nope_dim + latent.rope_dim)
        rank = latent.q_rank
        asked = wide * queries if rank is None else wide * rank + rank * queries
        held = wide * latent.row_dim
        held += latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
        norms = latent.kv_rank + (rank or 0)
        biases = latent.row_dim * config.qkv_bias + size * config.o_bias
        biases += (rank or 0) * config.qkv_bias
        return asked + held + heads * latent.value_dim * size + norms + biases

    @property
    def mlp_params(self) -> int:
        """A gated MLP: 3·E·F, with biases where it has them."""
        size, wide = self.config.hidden_size, self.config.intermediate_size
        return 3 * size * wide + (2 * wide + size) * self.config.mlp_bias

    @property
    def expert_params(self) -> int:
        """One routed expert: 3·E·Fx; 0 without experts."""
        experts = self.config.experts
        return 3 * self.config.hidden_size * experts.intermediate_size if experts else 0

    @property
    def expert_layers(self) -> int:
        """Layers with routed experts."""
        experts = self.config.experts
        return max(self.config.num_layers - experts.first_layer, 0) if experts else 0

    def shared_layer_params(self, *, experts: bool = False) -> int:
        """What every token of a layer meets: attention, two norms, and the MLP.

        Args:
            experts: of a layer with routed experts: its router and shared experts instead.
        """
        met = self.attention_params() + 2 * self.config.hidden_size
        mixture = self.config.experts
        if not experts or mixture is None:
            return met + self.mlp_params
        router = mixture.num_experts * (self.config.hidden_size + 1)
        return met + router + mixture.num_shared * self.expert_params

    @cached_property
    def shared_params(self) -> int:
        """What a pass reads whatever its tokens are: all layers without their routed experts,
        the final norm and the head; not the embedding, of which it reads a row a token."""
        config = self.config
        dense = config.num_layers - self.expert_layers
        layers = dense * self.shared_layer_params()
        layers += self.expert_layers * self.shared_layer_params(experts=True)
        return layers + config.hidden_size + self.head_params

    @property
    def num_params(self) -> int:
        """All of the model; a tied matrix counts once."""
        experts = self.config.experts
        routed = self.expert_layers * experts.num_experts * self.expert_params if experts else 0
        own = 0 if self.config.tie_embeddings else self.embedding_params
        return self.shared_params + routed + own

    @property
    def layer_cache_numbers(self) -> int:
        """Numbers one layer caches for a token: 2·K·D, or a latent row R + r."""
        config = self.config
        if config.latent is not None:
            return config.latent.row_dim
        return 2 * config.num_kv_heads * config.head_dim

    @property
    def layer_pair_operations(self) -> int:
        """Operations of one layer for one query token over one key: scores and mixing.

        Grouped queries: 2·H·D + 2·H·D. Latent attention over a cache, projections absorbed:
        2·H·(R + r) + 2·H·R.
        """
        config = self.config
        if config.latent is not None:
            return 2 * config.num_heads * (config.latent.row_dim + config.latent.kv_rank)
        return 4 * config.num_heads * config.head_dim


def find_shape(source: str | Path) -> ModelShape:
    """The shape called `source`: a preset, or a folder or file with a config.

    Args:
        source: a name in `PRESETS`; a folder with config.json (weights are not needed), or the
            config.json itself.

    Raises:
        ValueError: no such model, or a config that cannot be read.
        NotImplementedError: an architecture that is not supported.
    """
    name = str(source)
    if name.lower() in PRESETS:
        return ModelShape(name=name.lower(), config=config_from_hf(PRESETS[name.lower()]))
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        missing = f"{path} has no config.json" if path.is_dir() else f"no such model {name!r}"
        raise ValueError(
            f"{missing}; expected {', '.join(PRESETS)}, or a folder with a config.json."
        )
    try:
        public = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {file}: expected a JSON object.") from error
    if not isinstance(public, dict):
        raise ValueError(f"{file}: expected a JSON object.")
    return ModelShape(name=name, config=config_from_hf(public))
