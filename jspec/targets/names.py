"""Which public tensors a parameter is made of, and filling parameters from them.

A parameter that joins several public tensors (q, k and v; gate and up; all experts) lists them in
order: laid one after the other they are its rows.
"""

from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from jspec.checkpoints.source import StrictReader
from jspec.targets.config import TargetConfig

Source = tuple[str, tuple[int, ...]]
"""A public tensor: name and shape."""

_INNER = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "q_a_norm": "q_a_layernorm",
    "kv_a_norm": "kv_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
}


def decoder_sources(path: tuple, shape: tuple[int, ...], config: TargetConfig) -> list[Source]:
    """Public tensors behind one parameter of a `Decoder`."""
    if path == ("embedding",):
        return [("model.embed_tokens.weight", shape)]
    if path == ("head",):
        return [("lm_head.weight", shape)]
    if path == ("norm", "weight"):
        return [("model.norm.weight", shape)]
    return layer_sources(f"model.layers.{path[1]}", path[2:], shape, config)


def layer_sources(
    prefix: str, path: tuple, shape: tuple[int, ...], config: TargetConfig
) -> list[Source]:
    """Public tensors behind one parameter of a `DecoderLayer`.

    Args:
        prefix: of the layer's tensors, such as `model.layers.3`.
        path: of the parameter within the layer.
        shape: of the parameter.
        config: of the model.
    """
    rest = shape[1:]
    match path:
        case ("attention", "qkv_proj", leaf):
            q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            return [
                (f"{prefix}.self_attn.{name}_proj.{leaf}", (rows, *rest))
                for name, rows in (("q", q), ("k", kv), ("v", kv))
            ]
        case ("attention", name, leaf):
            return [(f"{prefix}.self_attn.{_INNER.get(name, name)}.{leaf}", shape)]
        case ("mlp", "router", "weight"):
            return [(f"{prefix}.mlp.gate.weight", shape)]
        case ("mlp", "router", "correction"):
            return [(f"{prefix}.mlp.gate.e_score_correction_bias", shape)]
        case ("mlp", ("gate_up_proj" | "down_proj") as name):
            parts = ("gate", "up") if name == "gate_up_proj" else ("down",)
            each = (rest[0] // len(parts), rest[1])
            return [
                (f"{prefix}.mlp.experts.{expert}.{part}_proj.weight", each)
                for expert in range(shape[0])
                for part in parts
            ]
        case ("mlp", "shared", *inside):
            return _mlp_sources(f"{prefix}.mlp.shared_experts", tuple(inside), shape)
        case ("mlp", *inside):
            return _mlp_sources(f"{prefix}.mlp", tuple(inside), shape)
        case (name, leaf):
            return [(f"{prefix}.{_INNER.get(name, name)}.{leaf}", shape)]
    raise AssertionError(f"no public name for parameter {path}")


def _mlp_sources(prefix: str, path: tuple, shape: tuple[int, ...]) -> list[Source]:
    name, leaf = path
    if name == "down_proj":
        return [(f"{prefix}.down_proj.{leaf}", shape)]
    half = (shape[0] // 2, *shape[1:])
    return [(f"{prefix}.{part}_proj.{leaf}", half) for part in ("gate", "up")]


def fill(
    reader: StrictReader,
    shapes: PyTree,
    sources: Callable[[tuple, tuple[int, ...]], Iterable[Source]],
) -> PyTree:
    """Read every parameter of an abstract module in its own dtype.

    Args:
        reader: of the checkpoint.
        shapes: abstract state, from `nnx.eval_shape`.
        sources: the public tensors of a parameter, from its path and shape.

    Raises:
        ValueError: a tensor is missing or misshapen.
    """
    flat = []
    for path, variable in nnx.to_flat_state(shapes):
        parts = [reader.take(name, shape) for name, shape in sources(path, variable.shape)]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        array = array.reshape(variable.shape)
        flat.append((path, variable.replace(jnp.asarray(array, variable.dtype))))
    return nnx.from_flat_state(flat)


def split(
    params: PyTree, sources: Callable[[tuple, tuple[int, ...]], Iterable[Source]]
) -> dict[str, np.ndarray]:
    """The public tensors of a module's parameters; the inverse of `fill`."""
    tensors = {}
    for path, variable in nnx.to_flat_state(params):
        rows = np.asarray(variable[...])
        parts = list(sources(path, rows.shape))
        if len(parts) > 1:
            rows = rows.reshape(-1, *parts[0][1][1:])
        start = 0
        for name, shape in parts:
            tensors[name] = rows[start : start + shape[0]].reshape(shape)
            start += shape[0]
    return tensors
