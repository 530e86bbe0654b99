"""Load a published checkpoint, strictly: every tensor used, every parameter filled."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from jspec.checkpoints.fetch import resolve_source
from jspec.checkpoints.source import Checkpoint, StrictReader, open_checkpoint
from jspec.targets.config import TargetConfig, config_from_hf
from jspec.targets.decoder import DenseDecoder
from jspec.targets.target import Target

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# Buffers that old exporters stored beside the weights; they are derived from the config.
_DERIVED = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")
# Heads that were trained and stored together with their model; they are a drafter's.
_HEADS = ("medusa_head.*", "medusa_heads.*")


def load_target(source: str | Path, *, dtype: str | None = None) -> Target:
    """Load a dense decoder (Llama, Mistral, Qwen2, Qwen3).

    Args:
        source: a directory of safetensors (one file or a sharded index), a GGUF file, an alias
            such as `smollm2-135m`, or a hub id `organisation/name`.
        dtype: `float32` or `bfloat16`; default float32 on CPU, bfloat16 on an accelerator.

    Raises:
        ValueError: no such source, or a tensor is missing, left over or misshapen (it is named).
        NotImplementedError: an architecture or a variant that is not supported (it is named).
    """
    chosen = _dtype(dtype)
    path = resolve_source(source)
    checkpoint = open_checkpoint(path)
    config = config_from_hf(checkpoint.config)
    abstract = nnx.eval_shape(lambda: DenseDecoder(config, dtype=chosen))
    graphdef, shapes = nnx.split(abstract)
    return Target(
        name=str(source),
        config=config,
        graphdef=graphdef,
        params=_read(checkpoint, config, shapes, chosen),
        path=path,
        eos_token_ids=_eos_token_ids(checkpoint),
    )


def _dtype(name: str | None):
    if name is None:
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if name not in _DTYPES:
        raise ValueError(f"dtype={name!r} is not supported; expected {' or '.join(_DTYPES)}.")
    return _DTYPES[name]


def _read(checkpoint: Checkpoint, config: TargetConfig, shapes: PyTree, dtype) -> PyTree:
    reader = StrictReader(checkpoint)
    flat = []
    for path, variable in nnx.to_flat_state(shapes):
        parts = [
            reader.take(name, (rows, *variable.shape[1:]))
            for name, rows in _sources(path, variable.shape[0], config)
        ]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        flat.append((path, variable.replace(jnp.asarray(array, dtype))))
    if config.tie_embeddings and "lm_head.weight" in checkpoint.names():
        _check_tied(reader, config)
    reader.finish(ignore=_DERIVED + _HEADS)
    return nnx.from_flat_state(flat)


def _sources(path: tuple, rows: int, config: TargetConfig) -> list[tuple[str, int]]:
    """Public tensor names behind one parameter, with their rows, in order."""
    if path == ("embedding",):
        return [("model.embed_tokens.weight", rows)]
    if path == ("head",):
        return [("lm_head.weight", rows)]
    if path == ("norm", "weight"):
        return [("model.norm.weight", rows)]
    _, index, *inside, leaf = path
    return layer_sources(f"model.layers.{index}", tuple(inside), leaf, rows, config)


def layer_sources(
    prefix: str, inside: tuple, leaf: str, rows: int, config: TargetConfig
) -> list[tuple[str, int]]:
    """Public tensor names behind one parameter of a decoder layer, with their rows, in order.

    Args:
        prefix: of the layer's names, such as `model.layers.3`.
        inside: where the parameter is in the layer's module.
        leaf: `weight` or `bias`.
        rows: of the parameter.
        config: of the decoder.
    """
    match inside:
        case ("attention", "qkv_proj"):
            q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            return [
                (f"{prefix}.self_attn.{name}_proj.{leaf}", size)
                for name, size in (("q", q), ("k", kv), ("v", kv))
            ]
        case ("mlp", "gate_up_proj"):
            return [(f"{prefix}.mlp.{name}_proj.{leaf}", rows // 2) for name in ("gate", "up")]
        case ("attention", name):
            return [(f"{prefix}.self_attn.{name}.{leaf}", rows)]
        case ("mlp", name):
            return [(f"{prefix}.mlp.{name}.{leaf}", rows)]
        case (name,):
            public = {
                "input_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
            }
            return [(f"{prefix}.{public.get(name, name)}.{leaf}", rows)]
    raise AssertionError(f"no public name for parameter {inside}")


def _check_tied(reader: StrictReader, config: TargetConfig) -> None:
    """A tied checkpoint may still carry a head; it must be the embedding."""
    shape = (config.vocab_size, config.hidden_size)
    head = reader.take("lm_head.weight", shape)
    if not np.array_equal(head, reader.take("model.embed_tokens.weight", shape)):
        raise ValueError(
            "the config says tie_word_embeddings=true, but lm_head.weight differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false or drop lm_head.weight."
        )


def _eos_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    found: set[int] = set()
    for config in (checkpoint.config, checkpoint.generation_config):
        ids = config.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
