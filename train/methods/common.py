"""What every method needs: the data of a run, and features out of the target or out of a file."""

from dataclasses import dataclass

import jax.numpy as jnp

from jspec.targets import Target
from train.config import DataConfig
from train.data import (
    Batch,
    BatchConfig,
    Dataset,
    Example,
    Schedule,
    load_dataset,
    split,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """Data that is ready to train on.

    Attributes:
        dataset: everything.
        training, validation: the two sides.
        schedule: training batches.
        checks: validation batches.
    """

    dataset: Dataset
    training: list[Example]
    validation: list[Example]
    schedule: Schedule
    checks: list[Batch]

    @property
    def examples(self) -> list[Example]:
        """Both sides, training first."""
        return [*self.training, *self.validation]


def prepare(
    config: DataConfig, target: Target, *, lookback: int, seed: int, eval_batches: int
) -> Prepared:
    """Read the data and plan batches.

    Args:
        config: which data.
        target: whose tokenizer and length limit apply.
        lookback: see `BatchConfig`.
        seed: of the order.
        eval_batches: at most.

    Raises:
        ValueError: data that cannot be used.
    """
    longest = min(config.max_length, target.config.max_context)
    dataset = load_dataset(
        config.data,
        target.find_tokenizer(),
        max_length=longest,
        limit=config.limit,
        last_turn_only=config.last_turn_only,
    )
    training, validation = split(dataset.examples, config.validation)
    batches = BatchConfig(
        tokens=max(config.batch_tokens, longest),
        max_length=longest,
        packing=config.packing,
        shortest=min(64, longest),
        lookback=lookback,
        seed=seed,
    )
    checks = []
    if validation:
        side = Schedule(validation, batches, first=len(training))
        checks = [side[i] for i in range(min(eval_batches, side.batches_per_epoch))]
    return Prepared(
        dataset=dataset,
        training=training,
        validation=validation,
        schedule=Schedule(training, batches),
        checks=checks,
    )


def compute_dtype(target: Target, name: str | None):
    """What a run computes in: asked for, else the target's own."""
    return target.dtype if name is None else jnp.dtype(name)
