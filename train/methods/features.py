"""Features out of a store, filled by the frozen target as far as they are missing."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jspec.targets import Target
from train.data import Batch
from train.data.features import FeatureShape, FeatureStore
from train.methods.common import Prepared
from train.objectives.teacher import look

Fill = Callable[[Batch], dict[str, np.ndarray]]


def stored_features(
    folder: Path, target: Target, prepared: Prepared, layers: tuple[int, ...]
) -> tuple[FeatureStore, Fill]:
    """A store, and a function from a batch to its features.

    What a batch lacks is computed when it first comes up, and kept: the first epoch of a run costs
    what it costs without a store, every later one and every other head only the reading.

    Args:
        folder: of the store.
        target: frozen.
        prepared: the data; `Batch.examples` count in `prepared.examples`.
        layers: whose outputs are stored.

    Raises:
        ValueError: a store of something else, or one that several processes would have to fill.
    """
    store = FeatureStore(
        folder,
        prepared.examples,
        FeatureShape(layers=layers, hidden_size=target.config.hidden_size),
        fingerprint=f"{prepared.dataset.fingerprint} {target.name} {target.num_params}",
    )
    if jax.process_count() > 1 and len(store.missing()):
        raise ValueError(
            f"{folder} lacks {len(store.missing())} examples, and several processes cannot fill it "
            "together; run `jspec data features` first"
        )
    packed = prepared.schedule.config.packing

    @jax.jit
    def run(params, batch):
        # Every row: what is supervised may be decided differently by the next run.
        used = batch["documents"] >= 0
        return look(
            target,
            params,
            batch["tokens"],
            batch["positions"],
            batch["documents"],
            used & _near(batch["mask"]),
            feature_layers=layers,
            packed=packed,
        )

    def fill(batch: Batch) -> dict[str, np.ndarray]:
        if not store.has_all(batch):
            arrays = {name: jnp.asarray(x) for name, x in batch.arrays().items()}
            features, teacher = jax.device_get(run(target.params, arrays))
            store.add(batch, features, teacher.hidden, teacher.top, teacher.total)
        return store.batch(batch)

    return store, fill


def _near(mask):
    """Positions whose next token is supervised, and the supervised ones themselves."""
    return mask | jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
