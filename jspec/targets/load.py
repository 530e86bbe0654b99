"""Load a published checkpoint, strictly: every tensor used, every parameter filled."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from jspec.checkpoints.fetch import resolve_source
from jspec.checkpoints.fp8 import scale_name
from jspec.checkpoints.source import Checkpoint, StrictReader, open_checkpoint
from jspec.targets.config import TargetConfig, config_from_hf
from jspec.targets.decoder import Decoder
from jspec.targets.mtp import module_names
from jspec.targets.names import decoder_sources, fill
from jspec.targets.target import Target

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# Buffers that old exporters stored beside the weights; they are derived from the config.
_DERIVED = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")
# Heads that were trained and stored together with their model; they are a drafter's.
_HEADS = ("medusa_head.*", "medusa_heads.*")


def load_target(source: str | Path, *, dtype: str | None = None) -> Target:
    """Load a decoder (Llama, Mistral, Qwen2, Qwen3, MiMo, DeepSeek-V3, GLM-4.5).

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
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=chosen))
    graphdef, shapes = nnx.split(abstract)
    return Target(
        name=str(source),
        config=config,
        graphdef=graphdef,
        params=_read(checkpoint, config, shapes),
        path=path,
        eos_token_ids=_eos_token_ids(checkpoint),
    )


def _dtype(name: str | None):
    if name is None:
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if name not in _DTYPES:
        raise ValueError(f"dtype={name!r} is not supported; expected {' or '.join(_DTYPES)}.")
    return _DTYPES[name]


def _read(checkpoint: Checkpoint, config: TargetConfig, shapes: PyTree) -> PyTree:
    reader = StrictReader(checkpoint)
    params = fill(reader, shapes, partial(decoder_sources, config=config))
    if config.tie_embeddings and "lm_head.weight" in checkpoint.names():
        _check_tied(reader, config)
    modules = module_names(config)
    reader.finish(ignore=(*_DERIVED, *_HEADS, *modules, *map(scale_name, modules)))
    return params


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
