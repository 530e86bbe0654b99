"""Examples to batches of few, fixed shapes: length buckets or packing, shuffled the same way twice.

The plan of an epoch is a function of (seed, epoch) alone, so an iterator's whole state is how far
it is; grain keeps that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import grain
import numpy as np

from train.data.chat import Example

_OPEN = 500
"""Sequences that packing tries to fill further; older ones are as full as they get."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How batches are made.

    Attributes:
        tokens: of a batch, padding included; a batch of length T has tokens / T sequences.
        max_length: T of the longest sequences.
        packing: fill sequences of `max_length` with several examples instead of padding; they do
            not see each other.
        shortest: T of the shortest bucket; buckets double from there. Unused when packing.
        lookback: draft rows before the first supervised token that an objective needs.
        seed: of the order.
    """

    tokens: int = 2048
    max_length: int = 512
    packing: bool = True
    shortest: int = 64
    lookback: int = 8
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.shortest <= self.max_length <= self.tokens:
            raise ValueError(
                f"shortest={self.shortest}, max_length={self.max_length}, tokens={self.tokens}; "
                "expected 0 < shortest <= max_length <= tokens"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One step's input, on the host.

    Attributes:
        tokens: [B, T] int32, 0 where there is none.
        mask: [B, T] bool, supervised tokens.
        documents: [B, T] int32, which example a token belongs to; -1 for padding.
        positions: [B, T] int32, place in its example.
        rows: [B, R] int32, the positions a draft head has to be run at, ascending; T for none.
        examples: [B, T] int32, index of the example in the data; -1 for padding.
    """

    tokens: np.ndarray
    mask: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    examples: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """By name, for a jitted step."""
        return {
            name: getattr(self, name)
            for name in ("tokens", "mask", "documents", "positions", "rows")
        }


def needed_rows(mask: np.ndarray, lookback: int) -> np.ndarray:
    """Positions that predict a supervised token directly or after up to `lookback` draft steps.

    Row t reads the target's state at t and token t+1, and predicts token t+2.
    """
    needed = np.zeros(len(mask), bool)
    for ahead in range(2, 3 + lookback):
        needed[: max(len(mask) - ahead, 0)] |= mask[ahead:]
    return needed


class Schedule:
    """Batches by number, for ever: a random-access source for grain.

    Each example occurs once an epoch. Which examples share a sequence is fixed; which sequences
    share a batch, and the order of the batches, are drawn anew every epoch.
    """

    def __init__(self, examples: Sequence[Example], config: BatchConfig, *, first: int = 0):
        """Plan.

        Args:
            examples: to make batches of.
            config: how.
            first: number of the first example, for `Batch.examples`.
        """
        if not examples:
            raise ValueError("no examples to make batches of")
        self.examples = examples
        self.config = config
        self.first = first
        counts = [int(needed_rows(e.mask, config.lookback).sum()) for e in examples]
        self._bins = _packed(examples, counts, config) if config.packing else {}
        if not config.packing:
            for index, example in enumerate(examples):
                self._bins.setdefault(_bucket(len(example.tokens), config), []).append([index])
        self._rows = {
            length: _round_up(max(sum(counts[i] for i in group) for group in bins), 16, length)
            for length, bins in self._bins.items()
        }
        self._epoch: tuple[int, list[tuple[int, list[list[int]]]]] = (-1, [])

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(B, T, R) of every kind of batch."""
        return [(self._width(t), t, self._rows[t]) for t in sorted(self._bins)]

    @property
    def batches_per_epoch(self) -> int:
        """Batches until every example was used once more."""
        return sum(-(-len(bins) // self._width(t)) for t, bins in self._bins.items())

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Batch:
        epoch, place = divmod(int(index), self.batches_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._plan(epoch))
        length, groups = self._epoch[1][place]
        return self._collate(length, groups)

    def _width(self, length: int) -> int:
        return max(1, self.config.tokens // length)

    def _plan(self, epoch: int) -> list[tuple[int, list[list[int]]]]:
        rng = np.random.default_rng([self.config.seed, epoch])
        plan = []
        for length in sorted(self._bins):
            bins, width = self._bins[length], self._width(length)
            order = rng.permutation(len(bins))
            for start in range(0, len(bins), width):
                plan.append((length, [bins[i] for i in order[start : start + width]]))
        return [plan[i] for i in rng.permutation(len(plan))]

    def _collate(self, length: int, groups: list[list[int]]) -> Batch:
        shape = (self._width(length), length)
        tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        documents, examples = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        mask = np.zeros(shape, bool)
        rows = np.full((shape[0], self._rows[length]), length, np.int32)
        for b, group in enumerate(groups):
            start, needed = 0, []
            for document, index in enumerate(group):
                example = self.examples[index]
                span = slice(start, start + len(example.tokens))
                tokens[b, span], mask[b, span] = example.tokens, example.mask
                documents[b, span], examples[b, span] = document, self.first + index
                positions[b, span] = np.arange(len(example.tokens))
                here = np.nonzero(needed_rows(example.mask, self.config.lookback))[0]
                needed.append(start + here)
                start += len(example.tokens)
            found = np.concatenate(needed)
            rows[b, : len(found)] = found
        return Batch(
            tokens=tokens,
            mask=mask,
            documents=documents,
            positions=positions,
            rows=rows,
            examples=examples,
        )


def iterate(schedule: Schedule, start: int = 0):
    """A grain iterator over batches; `get_state()` and `set_state()` make it resumable.

    Args:
        schedule: where they come from.
        start: number of the first batch.
    """
    dataset = grain.MapDataset.source(schedule)
    # One reading thread: the plan of an epoch is cached, and collating costs microseconds.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    iterator = iter(dataset.to_iter_dataset(options))
    if start:
        state = iterator.get_state()
        iterator.set_state(state | {"next_index": start})
    return iterator


def _bucket(size: int, config: BatchConfig) -> int:
    length = config.shortest
    while length < size:
        length *= 2
    return min(length, config.max_length)


def _round_up(value: int, step: int, limit: int) -> int:
    return min(-(-max(value, 1) // step) * step, limit)


def _packed(
    examples: Sequence[Example], counts: list[int], config: BatchConfig
) -> dict[int, list[list[int]]]:
    """First fit, longest first, under two limits: tokens, and draft rows.

    Without the second one, a few sequences full of answers would set R for all.
    """
    length = config.max_length
    total = sum(len(e.tokens) for e in examples)
    share = min(1.0, 1.08 * sum(counts) / max(total, 1))
    budget = _round_up(int(share * length), 16, length)
    order = sorted(range(len(examples)), key=lambda i: (-len(examples[i].tokens), i))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in order:
        size, rows = len(examples[index].tokens), counts[index]
        if size > length:
            raise ValueError(f"example {examples[index].id} has {size} tokens, expected {length}")
        recent = range(max(0, len(bins) - _OPEN), len(bins))
        place = next((i for i in recent if room[i][0] >= size and room[i][1] >= rows), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append((length, max(budget, rows)))
        bins[place].append(index)
        room[place] = (room[place][0] - size, room[place][1] - rows)
    return {length: bins}
