"""What a decoder needs to know about itself, read from a Hugging Face config dictionary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jspec.targets.deepseek_config import ExpertsConfig, LatentConfig
from jspec.targets.keys import positive_int
from jspec.targets.rope import RopeConfig

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "mimo",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
}


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Shapes and switches of a decoder (RMSNorm, rotary attention, gated SiLU MLPs or experts).

    Attributes:
        family: `llama`, `mistral`, `qwen2`, `qwen3`, `mimo`, `deepseek_v3` or `glm4_moe`; used to
            explain, to export, and to find what else the checkpoint holds.
        vocab_size: V.
        hidden_size: E.
        intermediate_size: F, width of the gated MLP.
        num_layers: N.
        num_heads: H, query heads.
        num_kv_heads: K; H is a multiple of it. 1 for latent attention.
        head_dim: D; for latent attention the width of a cached row.
        rms_norm_eps: added to the mean square before the root.
        rope: rotary embedding of queries and keys.
        max_context: longest sequence (prompt + output) for which this implementation equals the
            published model: its position limit, or its sliding window where that is shorter.
        tie_embeddings: the head reads the embedding matrix.
        qkv_bias, o_bias, mlp_bias: whether those projections add a bias.
        qk_norm: RMSNorm over each query and key head before the rotation (Qwen3).
        latent: multi-head latent attention, None for grouped queries.
        experts: mixture of experts, None where every layer has one MLP.
        mtp_layers: multi-token-prediction modules that the checkpoint holds beside the model.
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
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    mtp_layers: int = 0

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}; grouped queries need whole groups."
            )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts; those beyond the model's own are."""
        return self.experts is not None and layer >= self.experts.first_layer


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

    hidden_size = positive_int(config, "hidden_size")
    num_heads = positive_int(config, "num_attention_heads")
    # Qwen2 and MiMo always bias q, k and v, Mistral never does; the others have a switch, which
    # GLM reads for q, k and v only.
    switched = family in ("llama", "qwen3", "deepseek_v3", "glm4_moe")
    attention_bias = bool(config.get("attention_bias", False)) and switched
    if family == "deepseek_v3":
        rope = RopeConfig.from_hf(config, positive_int(config, "qk_rope_head_dim"))
        latent = LatentConfig.from_hf(config, rope)
        num_kv_heads, head_dim = 1, latent.row_dim
    else:
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        default = 128 if family == "qwen3" else hidden_size // num_heads
        head_dim = config.get("head_dim") or default
        partial = 0.5 if family == "glm4_moe" else None
        rope = RopeConfig.from_hf(config, head_dim, partial=partial)
        latent = None
    experts = family in ("deepseek_v3", "glm4_moe")
    mtp = family in ("deepseek_v3", "glm4_moe", "mimo")

    return TargetConfig(
        family=family,
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_layers=positive_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_context=_max_context(config, family),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family in ("qwen2", "mimo"),
        o_bias=attention_bias and family != "glm4_moe",
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3" or (family == "glm4_moe" and bool(config.get("use_qk_norm"))),
        latent=latent,
        experts=ExpertsConfig.from_hf(config) if experts else None,
        mtp_layers=int(config.get("num_nextn_predict_layers") or 0) if mtp else 0,
    )


def _max_context(config: Mapping[str, Any], family: str) -> int:
    """Sliding-window layers equal full attention until the window is full, so it is the limit."""
    limit = int(config.get("max_position_embeddings", 2048))
    if family == "mistral":
        window = config.get("sliding_window", 4096)
    else:
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return min(limit, int(window)) if window else limit
