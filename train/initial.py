"""Heads before training: random, or as much like the target as they can be."""

import jax
import numpy as np
from flax import nnx

from jspec.drafters.eagle import EagleConfig
from jspec.drafters.eagle3 import Eagle3Config
from jspec.drafters.heads import Head
from jspec.drafters.medusa_build import target_head
from jspec.targets import RopeConfig, Target, TargetConfig
from train.config import Start
from train.data import DraftVocab
from train.heads import frozen_paths, module_of, public_tensors


def initial_head(
    config: EagleConfig | Eagle3Config,
    target: Target,
    vocab: DraftVocab | None,
    *,
    start: Start,
    seed: int,
) -> Head:
    """A head to start from, float32.

    Args:
        config: its shapes.
        target: what it is for.
        vocab: the draft vocabulary, for EAGLE-3.
        start: `random`; or `target`: the layer is the target's last one, reading the fused features
            where that reads the residual stream, fc passes the last feature through, and the head
            has the target's rows.
        seed: of the noise.

    Raises:
        ValueError: `target` with a layer of other shapes than the target's.
    """
    tensors = _random(config, seed)
    if start == "target":
        _check_shapes(config, target)
        tensors |= _from_target(config, target, tensors, seed)
    if isinstance(config, Eagle3Config):
        assert vocab is not None
        head = np.asarray(jax.device_get(target_head(target)), np.float32)
        tensors["lm_head.weight"] = head[vocab.ids]
        if not vocab.is_full:
            tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    return Head(name="head in training", format="jspec", config=config, tensors=tensors)


def draft_layer(target: Target, max_length: int) -> TargetConfig:
    """One layer like the target's, for a head that is trained on `max_length` positions."""
    theirs = target.config
    return TargetConfig(
        family="llama",
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_layers=1,
        num_heads=theirs.num_heads,
        num_kv_heads=theirs.num_kv_heads,
        head_dim=theirs.head_dim,
        rms_norm_eps=theirs.rms_norm_eps,
        # Plain rotation: the formats of heads have no word for the target's stretched ones.
        rope=RopeConfig(theta=theirs.rope.theta, dim=theirs.rope.dim),
        max_context=max_length,
        qkv_bias=theirs.qkv_bias,
        o_bias=theirs.o_bias,
        mlp_bias=theirs.mlp_bias,
        qk_norm=theirs.qk_norm,
    )


def _random(config: EagleConfig | Eagle3Config, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    _, shapes = module_of(config, np.float32)
    params = {}
    for path, variable in nnx.to_flat_state(shapes):
        if path in frozen_paths(config) or path == ("head",):
            continue
        shape = variable.shape
        if path[-1] == "bias":
            params[path] = np.zeros(shape, np.float32)
        elif len(shape) == 1:
            params[path] = np.ones(shape, np.float32)
        else:
            params[path] = rng.standard_normal(shape, np.float32) / np.sqrt(shape[1])
    return public_tensors(config, params)


def _check_shapes(config: EagleConfig | Eagle3Config, target: Target) -> None:
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(config.decoder, name), getattr(target.config, name)
        if ours != theirs:
            raise ValueError(
                f"a head that starts from its target has the target's shapes: {name} is {ours}, "
                f"expected {theirs}; start from random instead"
            )


def _from_target(config, target: Target, drawn: dict[str, np.ndarray], seed: int):
    eagle3 = isinstance(config, Eagle3Config)
    flat = {
        path[2:]: np.asarray(jax.device_get(variable[...]), np.float32)
        for path, variable in nnx.to_flat_state(target.params)
        if path[:2] == ("layers", target.config.num_layers - 1)
    }
    first = ("first",) if eagle3 else ("layers", 0)
    layer = public_tensors(config, {(*first, *path): array for path, array in flat.items()})
    size = config.decoder.hidden_size
    found: dict[str, np.ndarray] = {}
    for name, array in layer.items():
        if eagle3 and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            # Inputs are [embedding, hidden]: the target's weights read the hidden half.
            array = np.concatenate([0.2 * drawn[name][:, :size], array], axis=1)
        elif name.endswith("layers.0.input_layernorm.weight"):
            if not eagle3:
                continue  # EAGLE-1's first layer has none
            name, array = "layers.0.hidden_norm.weight", array
        if name in drawn:
            found[name] = array
    if eagle3:
        fc = np.zeros_like(drawn["fc.weight"])
        if config.target_hidden_size == size:
            fc[:, -size:] = np.eye(size, dtype=np.float32)
            found["fc.weight"] = fc
        norm = dict(nnx.to_flat_state(target.params))[("norm", "weight")]
        found["norm.weight"] = np.asarray(jax.device_get(norm[...]), np.float32)
    else:
        # The hidden half passes through; the embedding half starts small.
        fc = 0.1 * drawn["fc.weight"]
        fc[:, size:] = np.eye(size, dtype=np.float32)
        found["fc.weight"] = fc
    return found
