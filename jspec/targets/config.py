"""What a dense decoder needs to know about itself, read from a Hugging Face config dictionary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jspec.targets.rope import RopeConfig

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Shapes and switches of a dense decoder (RMSNorm, rotary attention, gated SiLU MLP).

    Attributes:
        family: `llama`, `mistral`, `qwen2` or `qwen3`; only used to explain and to export.
        vocab_size: V.
        hidden_size: E.
        intermediate_size: F, width of the gated MLP.
        num_layers: N.
        num_heads: H, query heads.
        num_kv_heads: K; H is a multiple of it.
        head_dim: D.
        rms_norm_eps: added to the mean square before the root.
        rope: rotary embedding of queries and keys.
        max_context: longest sequence (prompt + output) for which this implementation equals the
            published model: its position limit, or its sliding window where that is shorter.
        tie_embeddings: the head reads the embedding matrix.
        qkv_bias, o_bias, mlp_bias: whether those projections add a bias.
        qk_norm: RMSNorm over each query and key head before the rotation (Qwen3).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}; grouped queries need whole groups."
            )


def config_from_hf(config: Mapping[str, Any]) -> TargetConfig:
    """Read a `config.json` dictionary.

    Raises:
        NotImplementedError: an architecture, activation or attention variant that is not
            implemented; the message names it and lists what is.
        ValueError: a required key is missing.
    """
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture not in _FAMILIES:
        raise NotImplementedError(
            f"architecture {architecture!r} is not supported; expected one of "
            f"{', '.join(_FAMILIES)}."
        )
    family = _FAMILIES[architecture]

    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise NotImplementedError(
            f"hidden_act={activation!r} is not supported for {architecture}; expected 'silu'."
        )

    hidden_size = _required(config, "hidden_size")
    num_heads = _required(config, "num_attention_heads")
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads)
    # Only Llama and Qwen3 have the switch; Qwen2 always biases q, k and v, Mistral never does.
    attention_bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")

    return TargetConfig(
        family=family,
        vocab_size=_required(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(config, "intermediate_size"),
        num_layers=_required(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=RopeConfig.from_hf(config, head_dim),
        max_context=_max_context(config, family),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
    )


def _max_context(config: Mapping[str, Any], family: str) -> int:
    """Sliding-window layers equal full attention until the window is full, so it is the limit."""
    limit = int(config.get("max_position_embeddings", 2048))
    if family == "mistral":
        window = config.get("sliding_window", 4096)
    else:
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return min(limit, int(window)) if window else limit


def _required(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"config key {key!r} is {value!r}; expected a positive integer.")
    return value
