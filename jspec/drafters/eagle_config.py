"""The facts of an EAGLE head, out of the config files of the tools that train them.

Which target layers an EAGLE-3 head reads is counted in two ways: SafeAILab, speculators and vLLM
name a layer whose **input** is read, SpecForge, SGLang and ModelOpt one whose **output** is. Here
only outputs are kept; the format decides how its file is read, never the number itself.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jspec.drafters.eagle import EagleConfig
from jspec.drafters.eagle3 import Eagle3Config
from jspec.targets.config import TargetConfig
from jspec.targets.rope import RopeConfig

FORMATS = ("safeailab", "specforge", "speculators", "modelopt")


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """The outputs all tools agree on where a file names no layers: 1, N/2 - 1 and N - 4.

    They are the inputs of 2, N/2 and N - 3 (SafeAILab's `modeling_llama_kv`).

    Raises:
        ValueError: two of them coincide, as in the reference for fewer than 7 layers.
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if not 1 < layers[1] < layers[2]:
        raise ValueError(
            f"a target of {num_layers} layers has no three distinct default feature layers "
            f"{list(layers)}; name them as eagle_aux_hidden_state_layer_ids in the head's config."
        )
    return layers


def eagle_config(
    public: Mapping[str, Any], names: Collection[str], target: TargetConfig
) -> EagleConfig:
    """Facts of an EAGLE-1/2 head.

    Args:
        public: its config.json.
        names: its tensors; whether there are biases is read from them, since old configs do not
            say.
        target: of the model it drafts for.
    """
    return EagleConfig(decoder=draft_decoder(public, names, target), fc_bias="fc.bias" in names)


def eagle3_config(
    public: Mapping[str, Any], names: Collection[str], target: TargetConfig, form: str
) -> Eagle3Config:
    """Facts of an EAGLE-3 head.

    Args:
        public: its config.json.
        names: its tensors.
        target: of the model it drafts for.
        form: one of `FORMATS`.

    Raises:
        NotImplementedError: a switch that is not implemented, by name.
        ValueError: feature layers that the target does not have, or a width that is not its.
    """
    speculators = form == "speculators"
    if speculators:
        inner = dict(public.get("transformer_layer_config") or {})
        if not inner:
            raise ValueError("a speculators config needs transformer_layer_config; it has none.")
        if "norm_before_residual" not in public:
            raise ValueError(
                "the config does not say norm_before_residual, and the tools that read this format "
                "disagree about what that means; add true or false, as the head was trained."
            )
    else:
        inner = dict(public)
        _refuse_modelopt_switches(public.get("eagle_config") or {})
    width = int(public.get("target_hidden_size") or inner.get("target_hidden_size") or 0)
    width = width or target.hidden_size
    if width != target.hidden_size:
        raise ValueError(
            f"the head reads features of width {width}, but the target's hidden size is "
            f"{target.hidden_size}; it belongs to another target."
        )
    layers = _feature_layers(public, form, target.num_layers)
    size = public.get("draft_vocab_size") or inner.get("draft_vocab_size") or target.vocab_size
    return Eagle3Config(
        decoder=draft_decoder(inner, names, target),
        draft_vocab_size=int(size),
        target_hidden_size=width,
        feature_layers=layers,
        target_num_layers=target.num_layers,
        norm_before_residual=speculators and bool(public["norm_before_residual"]),
        norm_before_fc=speculators and bool(public.get("norm_before_fc", False)),
        fc_norm=bool(public.get("fc_norm", False)),
        # SpecForge's key of this name only says that the head reads the normed state.
        norm_output=speculators and bool(public.get("norm_output", False)),
    )


def draft_decoder(
    public: Mapping[str, Any], names: Collection[str], target: TargetConfig
) -> TargetConfig:
    """Shapes of the draft layers.

    Raises:
        ValueError: another vocabulary than the target's.
        NotImplementedError: another activation than SiLU.
    """
    vocab = int(public.get("vocab_size") or target.vocab_size)
    if vocab != target.vocab_size:
        raise ValueError(
            f"the head was trained for a vocabulary of {vocab} tokens, the target has "
            f"{target.vocab_size}; it belongs to another target."
        )
    activation = public.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise NotImplementedError(f"hidden_act={activation!r} is not supported; expected 'silu'.")
    size, heads = _number(public, "hidden_size"), _number(public, "num_attention_heads")
    dim = int(public.get("head_dim") or size // heads)
    return TargetConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=size,
        intermediate_size=_number(public, "intermediate_size"),
        num_layers=_number(public, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=int(public.get("num_key_value_heads") or heads),
        head_dim=dim,
        rms_norm_eps=float(public.get("rms_norm_eps", 1e-6)),
        # The drafter's own rotary settings; a base it does not name is 10000, not the target's.
        rope=RopeConfig.from_hf(public, dim),
        max_context=int(public.get("max_position_embeddings") or 2048),
        qkv_bias=_ends(names, "q_proj.bias"),
        o_bias=_ends(names, "o_proj.bias"),
        mlp_bias=_ends(names, "down_proj.bias"),
        qk_norm=_ends(names, "q_norm.weight"),
    )


def _feature_layers(public: Mapping[str, Any], form: str, num_layers: int) -> tuple[int, ...]:
    nested = public.get("eagle_config") or {}
    ids = public.get("eagle_aux_hidden_state_layer_ids")
    ids = nested.get("eagle_aux_hidden_state_layer_ids") if ids is None else ids
    if ids is None:
        return default_feature_layers(num_layers)
    inputs = form in ("speculators", "safeailab")
    layers = tuple(int(layer) - (1 if inputs else 0) for layer in ids)
    if not layers or min(layers) < 0 or max(layers) >= num_layers:
        counted = "inputs of layers (1 to N)" if inputs else "outputs of layers (0 to N - 1)"
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids={list(ids)}: the format {form} counts {counted}, "
            f"and the target has N = {num_layers} layers; the head belongs to another target."
        )
    return layers


def _refuse_modelopt_switches(nested: Mapping[str, Any]) -> None:
    expected = {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    for key, value in expected.items():
        if nested.get(key, value) != value:
            raise NotImplementedError(
                f"eagle_config.{key}={nested[key]!r} is not supported; expected {value}."
            )
    steps = nested.get("parallel_draft_step", 1)
    if steps not in (None, 1):
        raise NotImplementedError(
            f"eagle_config.parallel_draft_step={steps} is not supported; expected 1."
        )


def _ends(names: Collection[str], suffix: str) -> bool:
    return any(name.endswith(suffix) for name in names)


def _number(public: Mapping[str, Any], key: str) -> int:
    value = public.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"config key {key!r} is {value!r}; expected a positive integer.")
    return value
