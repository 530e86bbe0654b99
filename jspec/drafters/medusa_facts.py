"""The facts of a set of Medusa heads, out of its tensors (by vLLM's names) and its config.json."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from jspec.drafters.medusa import MedusaConfig
from jspec.targets.config import TargetConfig

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)")
_OWN = re.compile(r"lm_heads\.(\d+)\.weight")

# What each tool calls them; vLLM's plain words only count where a config is vLLM's own.
_HEAD_KEYS = ("medusa_num_heads", "num_medusa_heads")
_LAYER_KEYS = ("medusa_num_layers", "num_medusa_layers")


def heads_config(
    name: str, tensors: Mapping[str, np.ndarray], public: Mapping[str, Any], target: TargetConfig
) -> MedusaConfig:
    """Facts of the heads; every tensor is explained by them, and has the shape they ask for.

    Args:
        name: of the file, for messages.
        tensors: by vLLM's names.
        public: config.json.
        target: of the model they draft for.

    Raises:
        ValueError: what is missing, left over, or of another width or vocabulary.
        NotImplementedError: a switch that is not implemented.
    """
    if public.get("logit_scale", 1.0) != 1.0:
        raise NotImplementedError(
            f"{name}: logit_scale={public['logit_scale']} is not supported; expected 1.0."
        )
    blocks = [(int(m[1]), int(m[2])) for m in map(_BLOCK.fullmatch, tensors) if m]
    own = [int(m[1]) for m in map(_OWN.fullmatch, tensors) if m]
    heads = {head for head, _ in blocks} | set(own)
    if not heads:
        raise ValueError(f"{name} holds no Medusa heads: it has {', '.join(sorted(tensors))}.")
    config = MedusaConfig(
        num_heads=1 + max(heads),
        num_layers=1 + max((layer for _, layer in blocks), default=-1),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=len(tensors.get("token_map", range(target.vocab_size))),
        bias=any(tensor.endswith(".bias") for tensor in tensors),
        projection=_projection(name, tensors, own),
    )
    _check_vocabulary(name, tensors, public, config)
    expected = dict(_shapes(config))
    missing = sorted(expected.keys() - tensors.keys())
    left = sorted(tensors.keys() - expected.keys() - {"token_map"})
    if missing or left:
        what = " and ".join(
            f"{said} {', '.join(names)}"
            for said, names in (("misses", missing), ("cannot use", left))
            if names
        )
        raise ValueError(
            f"{name}: a set of {config.num_heads} Medusa heads of {config.num_layers} blocks "
            f"{what}; every head needs the same tensors."
        )
    for tensor, shape in expected.items():
        stored = tensors[tensor].shape
        whole = (config.vocab_size, config.hidden_size)
        if stored != shape and not (tensor.startswith("lm_head") and stored == whole):
            raise ValueError(
                f"{name}: tensor {tensor!r} has shape {stored}, a target of hidden size "
                f"{config.hidden_size} with {config.vocab_size} tokens asks for {shape}; the heads "
                "belong to another target."
            )
    return config


def remarks(config: MedusaConfig, public: Mapping[str, Any]) -> tuple[str, ...]:
    """What the config says and the tensors do not, to be told to people."""
    nested = public.get("medusa")
    said = dict(public) | (nested if isinstance(nested, dict) else {})
    heads, layers = _HEAD_KEYS, _LAYER_KEYS
    if public.get("model_type") == "medusa":
        heads, layers = (*heads, "num_heads"), (*layers, "num_hidden_layers")
        if config.bias and not public.get("medusa_fc_bias", False):
            bias = ("its config says medusa_fc_bias=false, but the file holds biases: used",)
        else:
            bias = ()
    else:
        bias = ()
    counted = ((heads, config.num_heads, "heads"), (layers, config.num_layers, "blocks a head"))
    return bias + tuple(
        f"its config says {said[key]} {what}, the file holds {number}"
        for keys, number, what in counted
        for key in keys
        if key in said and said[key] != number
    )


def target_ids(name: str, tensors: Mapping[str, np.ndarray], vocab_size: int) -> np.ndarray | None:
    """Target ids of the draft vocabulary, [Vd] int64; None where both vocabularies are one.

    Raises:
        ValueError: the map leads outside the vocabulary, or twice to one token.
    """
    if "token_map" not in tensors:
        return None
    ids = np.asarray(tensors["token_map"])
    distinct = len(np.unique(ids))
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise ValueError(
            f"{name}: token_map is {ids.dtype} of shape {ids.shape}; expected a list of token ids."
        )
    if ids.min() < 0 or ids.max() >= vocab_size or distinct != len(ids):
        raise ValueError(
            f"{name}: token_map leads to ids {ids.min()} to {ids.max()}, {distinct} distinct ones "
            f"of {len(ids)}; expected distinct ids below {vocab_size} (token_map holds the ids "
            "themselves, not offsets)."
        )
    return None if np.array_equal(ids, np.arange(vocab_size)) else ids.astype(np.int64)


def _projection(
    name: str, tensors: Mapping[str, np.ndarray], own: list[int]
) -> Literal["own", "one", "target"]:
    if "lm_head.weight" not in tensors:
        return "own" if own else "target"
    if own:
        raise ValueError(
            f"{name} holds lm_head.weight beside {len(own)} lm_heads; expected one projection for "
            "all heads, or one for each."
        )
    return "one"


def _check_vocabulary(
    name: str, tensors: Mapping[str, np.ndarray], public: Mapping[str, Any], config: MedusaConfig
) -> None:
    said = public.get("vocab_size", config.vocab_size)
    if said != config.vocab_size:
        raise ValueError(
            f"{name} was trained for a vocabulary of {said} tokens, the target has "
            f"{config.vocab_size}; the heads belong to another target."
        )
    truncated = public.get("truncated_vocab_size", config.draft_vocab_size)
    if truncated != config.draft_vocab_size:
        raise ValueError(
            f"{name}: the config says truncated_vocab_size={truncated}, but "
            + (
                f"token_map holds {config.draft_vocab_size} ids; they are not of the same heads."
                if "token_map" in tensors
                else "no token_map says which tokens they are; export the heads again with it."
            )
        )
    target_ids(name, tensors, config.vocab_size)


def _shapes(config: MedusaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of such heads but the map, with its shape."""
    size = config.hidden_size
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            yield f"blocks.{head}.layers.{layer}.weight", (size, size)
            if config.bias:
                yield f"blocks.{head}.layers.{layer}.bias", (size,)
    if config.projection == "own":
        for head in range(config.num_heads):
            yield f"lm_heads.{head}.weight", (config.draft_vocab_size, size)
    elif config.projection == "one":
        yield "lm_head.weight", (config.draft_vocab_size, size)
