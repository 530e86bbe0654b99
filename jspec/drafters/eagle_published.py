"""The config.json that goes with a head in each format."""

from collections.abc import Mapping
from typing import Any

from jspec.drafters.eagle import EagleConfig
from jspec.drafters.eagle3 import Eagle3Config
from jspec.drafters.eagle_config import default_feature_layers
from jspec.drafters.heads import Head

_SAYABLE = {
    "safeailab": (),
    "specforge": ("fc_norm",),
    "speculators": ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output"),
}
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def refuse_what_cannot_be_said(head: Head, to: str) -> None:
    """A format without a word for one of the head's facts would change it in silence.

    Raises:
        NotImplementedError: naming the fact and a format that can say it.
    """
    config = head.config
    if isinstance(config, EagleConfig):
        if to != "safeailab":
            raise NotImplementedError(
                f"an EAGLE-1/2 head cannot be written as {to!r}; expected 'safeailab'."
            )
        return
    for switch in _SAYABLE["speculators"]:
        if getattr(config, switch) and switch not in _SAYABLE[to]:
            raise NotImplementedError(
                f"{head.name} has {switch}=true, which the format {to!r} cannot say; "
                "write it as 'speculators'."
            )
    decoder = config.decoder
    if decoder.num_layers > 1 and to != "speculators":
        raise NotImplementedError(
            f"{head.name} has {decoder.num_layers} layers, the format {to!r} has one; write it as "
            "'speculators'."
        )
    if to == "safeailab":
        if config.feature_layers != _defaults(config.target_num_layers):
            raise NotImplementedError(
                f"{head.name} reads the outputs of layers {list(config.feature_layers)}, and the "
                "format 'safeailab' always reads the default ones; write it as 'specforge' or "
                "'speculators'."
            )
        if decoder.head_dim * decoder.num_heads != decoder.hidden_size:
            raise NotImplementedError(
                f"{head.name} has head_dim={decoder.head_dim}, and the format 'safeailab' always "
                "has hidden_size / num_attention_heads; write it as 'specforge' or 'speculators'."
            )


def published(head: Head, to: str, verifier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json of `head` in the format `to`; the very file it came with where that is the same.

    Args:
        head: a head that the format can say (`refuse_what_cannot_be_said`).
        to: `safeailab`, `specforge` or `speculators`.
        verifier: `name_or_path` and `architectures` of the target, which speculators names.
    """
    if head.format == to and head.published:
        return dict(head.published)
    config = head.config
    if isinstance(config, EagleConfig):
        return _llama(head, ["LlamaForCausalLM"]) | {
            "bias": config.fc_bias,
            "qkv_bias": config.decoder.qkv_bias,
        }
    common: dict[str, Any] = {"draft_vocab_size": config.draft_vocab_size}
    if config.target_hidden_size != config.decoder.hidden_size:
        common["target_hidden_size"] = config.target_hidden_size
    if to == "safeailab":
        return _llama(head, ["LlamaForCausalLM"]) | common
    if to == "specforge":
        said = _llama(head, ["LlamaForCausalLMEagle3"]) | common
        said["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "use_aux_hidden_state": True,
        }
        return said | ({"fc_norm": True} if config.fc_norm else {})
    return _speculators(head, config, verifier)


def _speculators(
    head: Head, config: Eagle3Config, verifier: Mapping[str, Any] | None
) -> dict[str, Any]:
    inner = _llama(head, ["LlamaForCausalLM"])
    kind = "qwen3" if config.decoder.qk_norm else "llama"
    other = config.target_hidden_size != config.decoder.hidden_size
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if other else None,
        # This format counts the layers by their inputs.
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.feature_layers],
        "embed_requires_grad": False,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "tie_word_embeddings": False,
        "dtype": inner["torch_dtype"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": dict(verifier or {"name_or_path": None, "architectures": []}),
        },
        "transformer_layer_config": inner | {"model_type": kind},
    }


def _llama(head: Head, architectures: list[str]) -> dict[str, Any]:
    """A Llama config of the draft layers, with the rotary settings in both spellings."""
    decoder = head.config.decoder
    public = head.published.get("transformer_layer_config", head.published)
    said = {
        "architectures": architectures,
        "model_type": "llama",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocab_size,
        "rms_norm_eps": decoder.rms_norm_eps,
        "max_position_embeddings": decoder.max_context,
        "hidden_act": "silu",
        "attention_bias": decoder.qkv_bias,
        "tie_word_embeddings": False,
        "torch_dtype": _dtype(head),
    }
    said |= {key: public[key] for key in _TOKEN_KEYS if public.get(key) is not None}
    return said | _rope(public, decoder.rope.theta)


def _rope(public: Mapping[str, Any], theta: float) -> dict[str, Any]:
    scaling = dict(public.get("rope_scaling") or {}) | dict(public.get("rope_parameters") or {})
    scaling.pop("rope_theta", None)
    kind = scaling.pop("type", None)
    scaling.setdefault("rope_type", kind or "default")
    plain = scaling["rope_type"] == "default"
    return {
        "rope_theta": theta,
        "rope_scaling": None if plain else scaling,
        "rope_parameters": scaling | {"rope_theta": theta},
    }


def _dtype(head: Head) -> str:
    return str(head.tensors["fc.weight"].dtype)


def _defaults(num_layers: int) -> tuple[int, ...] | None:
    try:
        return default_feature_layers(num_layers)
    except ValueError:
        return None
