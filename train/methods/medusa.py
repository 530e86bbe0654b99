"""Medusa-1 training: a target and data in, heads in the layout of their authors or of vLLM out."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from jspec.drafters.eagle_config import default_feature_layers
from jspec.drafters.medusa import MedusaConfig
from jspec.drafters.medusa_build import build_medusa, target_head
from jspec.drafters.medusa_formats import StoredHeads, write_heads
from jspec.targets import Target
from train.config import MedusaHeadConfig
from train.data import DraftVocab
from train.heads import merge_head
from train.loop import Method, no_extras
from train.methods.common import Prepared
from train.methods.features import stored_features
from train.methods.view import count_vocab, target_view
from train.objectives.medusa import medusa_loss


def medusa_method(
    config: MedusaHeadConfig,
    target: Target,
    prepared: Prepared,
    *,
    features: Path | None = None,
) -> Method:
    """Make the first heads, which say what the target says, and put the loss together.

    Args:
        config: of the heads.
        target: frozen.
        prepared: the data.
        features: a folder to keep the target's hidden states in; None runs the target every time.

    Raises:
        ValueError: a reduced vocabulary with the target's projection.
    """
    full = target.config.vocab_size
    if config.projection == "target" and config.draft_vocab_size < full:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocab_size} with the target's projection; it has "
            f"{full} rows: say --draft-vocab-size {full}, or --projection one"
        )
    vocab = count_vocab(prepared, target, config.draft_vocab_size)
    first = _first_heads(config, target, vocab)
    drafter = build_medusa(first, target)
    trained, shared = {}, {}
    for path, variable in nnx.to_flat_state(drafter.params):
        fixed = path[0] == "projections" and config.projection == "target"
        (shared if fixed else trained)[path] = variable[...]
    packed = prepared.schedule.config.packing
    objective = config.objective
    extras, layers = no_extras, ()
    if features is not None:  # with the layers of EAGLE-3, so that both can share one store
        layers = default_feature_layers(target.config.num_layers)
        extras = stored_features(features, target, prepared, layers)[1]
    ids = jnp.asarray(vocab.ids)

    def observe(trained: PyTree, frozen: PyTree, batch: dict[str, Any], key) -> Any:
        dtype = jax.tree.leaves(trained)[0].dtype
        _, teacher, supervised = target_view(
            target, frozen["target"], batch, layers=layers, packed=packed, dtype=dtype
        )
        return medusa_loss(
            merge_head(drafter.graphdef, trained, frozen["shared"]),
            batch["tokens"],
            batch["documents"],
            supervised,
            teacher,
            frozen["head"],
            frozen["map"],
            objective,
        )

    def export(trained: PyTree, path: Path) -> None:
        dtype = np.dtype(jnp.dtype(config.export_dtype))
        tensors = {_name(config, p): np.asarray(x).astype(dtype) for p, x in trained.items()}
        if not vocab.is_full:
            tensors["token_map"] = vocab.ids.astype(np.int64)
        heads = StoredHeads(
            name="trained heads", format="jspec", config=first.config, tensors=tensors
        )
        plain = vocab.is_full and config.projection == "own"
        write_heads(
            heads,
            path,
            "medusa" if plain else "vllm-medusa",
            projection=np.asarray(target_head(target)) if config.projection == "target" else None,
        )
        if not vocab.is_full:
            vocab.save(path)

    return Method(
        name="medusa",
        trained=trained,
        frozen={
            "target": target.params if features is None else {},
            "shared": shared,
            "head": target_head(target)[ids],
            "map": ids,
        },
        observe=observe,
        decay=objective.decay,
        export=export,
        extras=extras,
        facts={
            "target": target.name,
            "data": prepared.dataset.fingerprint,
            "draft_vocab": vocab.size,
            "covered": round(vocab.covered, 6),
            "num_heads": config.num_heads,
            "num_layers": config.num_layers,
            "projection": config.projection,
            "objective": vars(objective),
        },
    )


def _first_heads(config: MedusaHeadConfig, target: Target, vocab: DraftVocab) -> StoredHeads:
    """Blocks of zeros, so that every head starts as the identity, and the target's rows."""
    size = target.config.hidden_size
    rows = np.asarray(target_head(target), np.float32)[vocab.ids]
    tensors: dict[str, np.ndarray] = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = np.zeros((size, size), np.float32)
            tensors[f"blocks.{head}.layers.{layer}.bias"] = np.zeros((size,), np.float32)
        if config.projection == "own":
            tensors[f"lm_heads.{head}.weight"] = rows
    if config.projection == "one":
        tensors["lm_head.weight"] = rows
    if not vocab.is_full:
        tensors["token_map"] = vocab.ids.astype(np.int64)
    facts = MedusaConfig(
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        hidden_size=size,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=vocab.size,
        bias=True,
        projection=config.projection,
    )
    return StoredHeads(name="first heads", format="jspec", config=facts, tensors=tensors)


def _name(config: MedusaHeadConfig, path: tuple) -> str:
    """A parameter's public name."""
    if path[0] == "blocks":
        _, head, layer, leaf = path
        return f"blocks.{head}.layers.{layer}.{leaf}"
    return "lm_head.weight" if config.projection == "one" else f"lm_heads.{path[1]}.weight"
