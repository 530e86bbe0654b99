"""Random EAGLE heads for tiny targets, and files that are wrong in one way."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_target

from jspec.drafters.eagle import EagleConfig
from jspec.drafters.eagle3 import Eagle3Config
from jspec.drafters.eagle_formats import write_head
from jspec.drafters.heads import Head
from jspec.targets import RopeConfig, TargetConfig

FEATURES = "eagle_aux_hidden_state_layer_ids"


def wide_target(**changes):
    """Eight layers, so that the default feature layers are distinct."""
    return tiny_target(**({"num_layers": 8} | changes))


def _decoder(target, num_layers, **changes):
    config = target.config
    settings = {
        "family": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 40,
        "num_layers": num_layers,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": config.hidden_size // 2,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=5e4, dim=config.hidden_size // 2),
        "max_context": 256,
    }
    return TargetConfig(**(settings | changes))


def _layer(rng, decoder, index, *, wide, dtype):
    size, dim = decoder.hidden_size, decoder.head_dim
    read = 2 * size if wide else size
    shapes = {
        "self_attn.q_proj": (decoder.num_heads * dim, read),
        "self_attn.k_proj": (decoder.num_kv_heads * dim, read),
        "self_attn.v_proj": (decoder.num_kv_heads * dim, read),
        "self_attn.o_proj": (size, decoder.num_heads * dim),
        "mlp.gate_proj": (decoder.intermediate_size, size),
        "mlp.up_proj": (decoder.intermediate_size, size),
        "mlp.down_proj": (size, decoder.intermediate_size),
    }
    out = {}
    for name, shape in shapes.items():
        out[f"layers.{index}.{name}.weight"] = draw(rng, shape, dtype)
        if decoder.qkv_bias and name.split(".")[1][0] in "qkv":
            out[f"layers.{index}.{name}.bias"] = draw(rng, shape[:1], dtype)
    out[f"layers.{index}.post_attention_layernorm.weight"] = norm(rng, size, dtype)
    return out


def draw(rng, shape, dtype):
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype)


def norm(rng, size, dtype):
    return (1 + 0.3 * rng.standard_normal(size)).astype(dtype)


def eagle_head(target, *, num_layers=1, fc_bias=True, seed=0, dtype=np.float32, **changes):
    """An EAGLE-1/2 head."""
    rng = np.random.default_rng(seed)
    decoder = _decoder(target, num_layers, **changes)
    size = decoder.hidden_size
    tensors = {"fc.weight": draw(rng, (size, 2 * size), dtype)}
    if fc_bias:
        tensors["fc.bias"] = draw(rng, (size,), dtype)
    for index in range(num_layers):
        tensors |= _layer(rng, decoder, index, wide=False, dtype=dtype)
        if index:
            tensors[f"layers.{index}.input_layernorm.weight"] = norm(rng, size, dtype)
    config = EagleConfig(decoder=decoder, fc_bias=fc_bias)
    return Head(name="random", format="memory", config=config, tensors=tensors)


def eagle3_head(
    target,
    *,
    draft_vocab_size=24,
    feature_layers=(1, 3, 4),
    seed=0,
    dtype=np.float32,
    num_layers=1,
    norm_before_fc=False,
    fc_norm=False,
    **switches,
):
    """An EAGLE-3 head; a draft vocabulary as large as the target's has no map."""
    rng = np.random.default_rng(seed)
    decoder = _decoder(target, num_layers)
    size, full = decoder.hidden_size, decoder.vocab_size
    count, width = len(feature_layers), target.config.hidden_size
    tensors = {
        "fc.weight": draw(rng, (size, count * width), dtype),
        "norm.weight": norm(rng, size, dtype),
        "lm_head.weight": draw(rng, (draft_vocab_size, size), dtype),
        "layers.0.hidden_norm.weight": norm(rng, size, dtype),
    }
    for index in range(num_layers):
        tensors |= _layer(rng, decoder, index, wide=index == 0, dtype=dtype)
        tensors[f"layers.{index}.input_layernorm.weight"] = norm(rng, size, dtype)
    if norm_before_fc:
        tensors["input_norm.weight"] = norm(rng, count * width, dtype)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": norm(rng, width, dtype) for i in range(count)}
    if draft_vocab_size < full:
        ids = np.sort(rng.choice(full, draft_vocab_size, replace=False))
        tensors["d2t"] = (ids - np.arange(draft_vocab_size)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(full), ids)
    config = Eagle3Config(
        decoder=decoder,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=width,
        feature_layers=feature_layers,
        target_num_layers=target.config.num_layers,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        **switches,
    )
    return Head(name="random", format="memory", config=config, tensors=tensors)


def save(head, path, to, *, drop=(), add=None, only=None, config=None, rename=None, prefix=""):
    """Write a head, then change its files: names as the format has them."""
    write_head(head, path, to)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    for old, new in (rename or {}).items():
        tensors = {name.replace(old, new): array for name, array in tensors.items()}
    tensors = {name: array for name, array in tensors.items() if name not in drop} | (add or {})
    tensors = {prefix + name: array for name, array in tensors.items()}
    save_file(tensors if only is None else only, file)
    if config is not None:
        said = json.loads((Path(path) / "config.json").read_text()) | config
        said = {key: value for key, value in said.items() if value is not None}
        (Path(path) / "config.json").write_text(json.dumps(said))
