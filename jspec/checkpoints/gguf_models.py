"""GGUF models as Hugging Face checkpoints: config keys, tensor names and row order.

What llama.cpp's converter does to a model is undone here. Besides renaming, it reorders the rows
of q and k in llama-architecture files (its RoPE rotates neighbouring rows, Hugging Face's rotates
halves) and bakes Llama 3's RoPE scaling into a tensor of frequency factors.

Reference: `convert_hf_to_gguf.py` in https://github.com/ggml-org/llama.cpp.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from jspec.checkpoints.gguf_container import GGUFFile

# GGUF architecture -> (config model_type, config architectures[0])
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# RoPE metadata that is understood; a key outside changes the model in a way we would miss.
_ROPE_KEYS = {
    "dimension_count",
    "freq_base",
    "scale_linear",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.finetuned",
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
}

LazyTensor = tuple[tuple[int, ...], str, Callable[[], np.ndarray]]


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The Hugging Face config of a GGUF model, from its metadata and tensor shapes.

    Mistral and SmolLM2 files carry the architecture `llama`, and compute the same thing; a file
    that states a sliding window becomes `mistral`.

    Raises:
        ValueError: metadata the architecture needs is missing.
        NotImplementedError: another architecture, experts, partial rotary or unknown RoPE scaling.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise NotImplementedError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported, expected "
            f"{', '.join(ARCHITECTURES)}; use the model's safetensors instead"
        )
    get = _Metadata(file, architecture)
    if get("expert_count", 0):
        raise NotImplementedError(
            f"{file.path}: mixture-of-experts GGUF files are not supported; use the model's "
            "safetensors instead"
        )
    hidden_size, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden_size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise NotImplementedError(
                f"{file.path}: {architecture}.{key} is {get(key)}, expected the head size "
                f"{head_dim}; partial rotary and unequal value heads are not supported"
            )
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no token_embd.weight; it is not a language model")
    model_type, hf_class = ARCHITECTURES[architecture]
    window = get("attention.sliding_window", None)
    if window is not None:
        if architecture != "llama":
            raise NotImplementedError(
                f"{file.path}: {architecture} with a sliding window ({window}) is not supported"
            )
        model_type, hf_class = "mistral", "MistralForCausalLM"
    config = {
        "architectures": [hf_class],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "max_position_embeddings": get("context_length"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "sliding_window": window,
        "torch_dtype": "float32",
        **_special_token_ids(file),
    }
    return config | {"rope_scaling": _rope_scaling(file, get, config)}


def gguf_generation_config(file: GGUFFile) -> dict[str, Any]:
    """Token ids that start and end generation: end of text, of turn and of message."""
    ids = _special_token_ids(file)
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(token for token in ends if token is not None))
    return ids | ({"eos_token_id": ends} if ends else {})


def gguf_tensors(file: GGUFFile, config: dict[str, Any]) -> dict[str, LazyTensor]:
    """Every tensor by Hugging Face name: shape, stored type and a function that reads it.

    Raises:
        ValueError: a tensor that no model of this architecture has.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    interleaved = file.metadata["general.architecture"] == "llama"
    tensors: dict[str, LazyTensor] = {}
    for name, info in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue  # became config["rope_scaling"]
        n_heads = None
        if name in _TOP_NAMES:
            hf_name = _TOP_NAMES[name]
        elif (match := _LAYER.fullmatch(name)) and match[2] in _LAYER_NAMES:
            hf_name = f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
            n_heads = heads.get(match[2]) if interleaved else None
        else:
            raise ValueError(
                f"{file.path}: tensor {name!r} has no counterpart in {config['architectures'][0]}; "
                "use the model's safetensors instead"
            )
        if n_heads is not None and info.shape[0] % (2 * n_heads):
            raise ValueError(
                f"{file.path}: tensor {name!r} has {info.shape[0]} rows, expected a multiple of "
                f"twice its {n_heads} heads; download it again"
            )
        tensors[hf_name] = (
            info.shape,
            info.quantisation,
            lambda name=name, n_heads=n_heads: _read(file, name, n_heads),
        )
    return tensors


def _read(file: GGUFFile, name: str, n_heads: int | None) -> np.ndarray:
    values = file.read(name)
    return values if n_heads is None else unpermute(values, n_heads)


def unpermute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """[H·D, ...] rows of q or k from GGUF's order to Hugging Face's.

    Within a head GGUF stores rotation pairs as neighbours (0, D/2, 1, D/2+1, …), Hugging Face as
    halves (0, 1, …, D-1).
    """
    half = rows.shape[0] // n_heads // 2
    paired = rows.reshape(n_heads, half, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def llama3_rope_factors(
    *,
    head_dim: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:
    """float64 [D/2]: what Llama 3's scaling divides each RoPE frequency by.

    Reference: `_compute_llama3_parameters` in transformers' `modeling_rope_utils.py`.
    """
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = original_max_position_embeddings * frequency / (2 * math.pi)
    smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


class _Metadata:
    """Architecture metadata by short key; a missing one without a default is an error."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file, self.architecture = file, architecture

    def __call__(self, key: str, *default: Any) -> Any:
        full = f"{self.architecture}.{key}"
        value = self.file.metadata.get(full, *default)
        if value is None and not default:
            raise ValueError(f"{self.file.path} lacks the metadata {full}; download it again")
        if isinstance(value, list):
            raise NotImplementedError(
                f"{self.file.path}: {full} differs by layer ({value[:4]}…), expected one value"
            )
        # GGUF keeps float32: 1e-5 reads back as 9.99999974e-06. Take the shortest decimal instead.
        return float(str(np.float32(value))) if isinstance(value, float) else value


def _special_token_ids(file: GGUFFile) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {key: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    return {key: token for key, token in ids.items() if token is not None}


def _rope_scaling(
    file: GGUFFile, get: _Metadata, config: dict[str, Any]
) -> dict[str, float | int | str] | None:
    prefix = f"{get.architecture}.rope."
    unknown = [
        key
        for key in file.metadata
        if key.startswith(prefix) and key.removeprefix(prefix) not in _ROPE_KEYS
    ]
    if unknown:
        raise NotImplementedError(
            f"{file.path}: RoPE metadata {', '.join(unknown)} is not supported; use the model's "
            "safetensors instead"
        )
    original = get("rope.scaling.original_context_length", None)
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, config, original or 8192)
    kind = get("rope.scaling.type", "none")
    if (linear := get("rope.scale_linear", None)) is not None and kind == "none":
        return {"rope_type": "linear", "factor": linear} if linear != 1 else None
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise NotImplementedError(
            f"{file.path}: RoPE scaling {kind!r} is not supported, expected linear or yarn"
        )
    scaling = {"rope_type": kind, "factor": get("rope.scaling.factor")}
    if kind == "yarn":
        optional = {
            "original_max_position_embeddings": original,
            "beta_fast": get("rope.scaling.yarn_beta_fast", None),
            "beta_slow": get("rope.scaling.yarn_beta_slow", None),
        }
        scaling |= {key: value for key, value in optional.items() if value is not None}
    return scaling


def _llama3_scaling(
    file: GGUFFile, config: dict[str, Any], original: int
) -> dict[str, float | int | str] | None:
    """The llama3 scaling whose factors the file stores; its exact parameters are not in it."""
    stored = file.read(_ROPE_FACTORS).reshape(-1)
    if np.all(stored == 1):
        return None
    # Meta's own constants (all of Llama 3.1, 3.2 and 3.3); only the factor differs between them.
    scaling = {
        "factor": round(float(stored.max()), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    expected = llama3_rope_factors(
        head_dim=config["head_dim"], theta=config["rope_theta"], **scaling
    )
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise NotImplementedError(
            f"{file.path}: {_ROPE_FACTORS} is not Llama 3's RoPE scaling with a factor of "
            f"{scaling['factor']}; use the model's safetensors instead"
        )
    return {"rope_type": "llama3", **scaling}
