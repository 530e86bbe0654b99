"""EAGLE-1 training: a target and data in, a head in SafeAILab's layout out."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jspec.drafters.eagle import EagleConfig
from jspec.drafters.eagle_config import default_feature_layers
from jspec.drafters.eagle_formats import write_head
from jspec.drafters.heads import Head
from jspec.targets import Target
from train.config import Eagle1HeadConfig
from train.heads import merge_head, public_tensors, split_head
from train.initial import draft_layer, initial_head
from train.loop import Method, no_extras
from train.methods.common import Prepared
from train.methods.features import stored_features
from train.methods.view import target_view
from train.objectives.eagle1 import Eagle1Batch, eagle1_loss, noisy


def eagle1_method(
    config: Eagle1HeadConfig,
    target: Target,
    prepared: Prepared,
    *,
    max_length: int,
    seed: int,
    features: Path | None = None,
) -> Method:
    """Make the first head, and put the loss together.

    Args:
        config: of the head.
        target: frozen.
        prepared: the data.
        max_length: that the head is trained on.
        seed: of random weights.
        features: a folder to keep the target's hidden states in; None runs the target every time.
    """
    facts = EagleConfig(decoder=draft_layer(target, max_length), fc_bias=True)
    head = initial_head(facts, target, None, start=config.start, seed=seed)
    graphdef, trained, shared = split_head(head, target)
    packed = prepared.schedule.config.packing
    objective = config.objective
    extras, layers = no_extras, ()
    if features is not None:  # with the layers of EAGLE-3, so that both can share one store
        layers = default_feature_layers(target.config.num_layers)
        extras = stored_features(features, target, prepared, layers)[1]

    def observe(trained: PyTree, frozen: PyTree, batch: dict[str, Any], key) -> Any:
        dtype = trained[("fc", "weight")].dtype
        _, teacher, supervised = target_view(
            target, frozen["target"], batch, layers=layers, packed=packed, dtype=dtype
        )
        hidden = teacher.hidden
        if objective.noise and key is not None:
            hidden = noisy(hidden, objective.noise, key)
        value, (_, rows) = eagle1_loss(
            merge_head(graphdef, trained, frozen["shared"]),
            Eagle1Batch(
                tokens=batch["tokens"],
                positions=batch["positions"],
                documents=batch["documents"],
                supervised=supervised,
                hidden=hidden,
                teacher=teacher,
            ),
            objective,
        )
        return value, rows

    def export(trained: PyTree, path: Path) -> None:
        dtype = np.dtype(jnp.dtype(config.export_dtype))
        tensors = {n: x.astype(dtype) for n, x in public_tensors(facts, trained).items()}
        head = Head(name="trained head", format="jspec", config=facts, tensors=tensors)
        write_head(head, path, "safeailab")

    return Method(
        name="eagle1",
        trained=trained,
        frozen={"target": target.params if features is None else {}, "shared": shared},
        observe=observe,
        decay=1.0,
        export=export,
        extras=extras,
        facts={
            "target": target.name,
            "data": prepared.dataset.fingerprint,
            "start": config.start,
            "objective": vars(objective),
        },
    )
