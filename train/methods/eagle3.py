"""EAGLE-3 training: a target and data in, a head in SpecForge's layout out."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jspec.drafters.eagle3 import Eagle3Config
from jspec.drafters.eagle_config import default_feature_layers
from jspec.drafters.eagle_formats import write_head
from jspec.drafters.heads import Head
from jspec.drafters.medusa_build import target_head
from jspec.targets import Target
from train.config import Eagle3HeadConfig
from train.data import DraftVocab
from train.heads import merge_head, public_tensors, split_head
from train.initial import draft_layer, initial_head
from train.loop import Method, no_extras
from train.methods.common import Prepared
from train.methods.features import stored_features
from train.methods.view import count_vocab, target_view
from train.objectives.eagle3 import Eagle3Batch, eagle3_loss


def eagle3_method(
    config: Eagle3HeadConfig,
    target: Target,
    prepared: Prepared,
    *,
    max_length: int,
    seed: int,
    features: Path | None = None,
) -> Method:
    """Count the vocabulary, make the first head, and put the loss together.

    Args:
        config: of the head.
        target: frozen.
        prepared: the data.
        max_length: that the head is trained on.
        seed: of random weights.
        features: a folder to keep the target's hidden states in; None runs the target every time.
    """
    vocab = count_vocab(prepared, target, config.draft_vocab_size)
    facts = head_config(config, target, vocab, max_length)
    head = initial_head(facts, target, vocab, start=config.start, seed=seed)
    graphdef, trained, shared = split_head(head, target)
    layers, packed = facts.feature_layers, prepared.schedule.config.packing
    objective = config.objective
    frozen = {
        "target": target.params if features is None else {},
        "shared": shared,
        "head": target_head(target)[jnp.asarray(vocab.ids)],
        "map": jnp.asarray(vocab.ids),
    }

    def observe(trained: PyTree, frozen: PyTree, batch: dict[str, Any], key) -> Any:
        features, teacher, supervised = target_view(
            target,
            frozen["target"],
            batch,
            layers=layers,
            packed=packed,
            dtype=trained[("fc", "weight")].dtype,
        )
        model = merge_head(graphdef, trained, frozen["shared"])
        return eagle3_loss(
            model,
            Eagle3Batch(
                tokens=batch["tokens"],
                positions=batch["positions"],
                documents=batch["documents"],
                supervised=supervised,
                rows=batch["rows"],
                features=features,
                teacher=teacher,
            ),
            frozen["head"],
            frozen["map"],
            objective,
        )

    def export(trained: PyTree, path: Path) -> None:
        write_head(trained_head(config, facts, vocab, trained), path, config.format)
        vocab.save(path)

    return Method(
        name="eagle3",
        trained=trained,
        frozen=frozen,
        observe=observe,
        decay=objective.decay,
        export=export,
        extras=no_extras
        if features is None
        else stored_features(features, target, prepared, layers)[1],
        facts={
            "target": target.name,
            "data": prepared.dataset.fingerprint,
            "draft_vocab": vocab.size,
            "covered": round(vocab.covered, 6),
            "feature_layers": list(layers),
            "start": config.start,
            "objective": vars(objective),
        },
    )


def head_config(
    config: Eagle3HeadConfig, target: Target, vocab: DraftVocab, max_length: int
) -> Eagle3Config:
    """Shapes of the head: one layer like the target's."""
    theirs = target.config
    return Eagle3Config(
        decoder=draft_layer(target, max_length),
        draft_vocab_size=vocab.size,
        target_hidden_size=theirs.hidden_size,
        target_num_layers=theirs.num_layers,
        feature_layers=config.feature_layers or default_feature_layers(theirs.num_layers),
    )


def trained_head(
    config: Eagle3HeadConfig, facts: Eagle3Config, vocab: DraftVocab, trained: PyTree
) -> Head:
    """Trained parameters as a head, in the dtype of the file."""
    dtype = np.dtype(jnp.dtype(config.export_dtype))
    tensors = {name: array.astype(dtype) for name, array in public_tensors(facts, trained).items()}
    if not vocab.is_full:
        tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    return Head(name="trained head", format="jspec", config=facts, tensors=tensors)
