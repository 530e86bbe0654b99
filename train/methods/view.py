"""What a loss reads of the frozen target: out of the batch where it is stored, else from a pass."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.targets import Target
from train.data import DraftVocab, always_in, count_draft_vocab
from train.methods.common import Prepared
from train.objectives.teacher import Teacher, look, supervised_rows


def target_view(
    target: Target,
    params: Any,
    batch: dict[str, Any],
    *,
    layers: tuple[int, ...],
    packed: bool,
    dtype,
) -> tuple[tuple[Float[Array, "B T Et"], ...], Teacher, Bool[Array, "B T"]]:
    """Features, teacher, and the draft rows that are supervised.

    Args:
        target: frozen.
        params: its arrays; not read where the batch has stored features.
        batch: arrays of a `Batch`, and perhaps what a store added.
        layers: whose outputs are wanted.
        packed: several texts share a sequence.
        dtype: of what is returned.
    """
    supervised = supervised_rows(batch["mask"], batch["documents"])
    if "hidden" in batch:
        features = tuple(batch["features"][:, :, index] for index in range(len(layers)))
        teacher = Teacher(batch["hidden"], batch["top"], batch["total"])
    else:
        features, teacher = look(
            target,
            params,
            batch["tokens"],
            batch["positions"],
            batch["documents"],
            jnp.pad(supervised[:, :-1], ((0, 0), (1, 0))),
            feature_layers=layers,
            packed=packed,
        )
    features, hidden = jax.tree.map(lambda x: x.astype(dtype), (features, teacher.hidden))
    return features, teacher._replace(hidden=hidden), supervised


def count_vocab(prepared: Prepared, target: Target, size: int) -> DraftVocab:
    """The draft vocabulary of a run, of the training side's answers."""
    full = target.config.vocab_size
    return count_draft_vocab(
        prepared.training,
        size=min(size, full),
        vocab_size=full,
        always=always_in(target.find_tokenizer(), target.eos_token_ids, full),
        key=prepared.dataset.fingerprint,
    )
