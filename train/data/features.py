"""The target's hidden states on disk, so that several epochs and several heads need one pass.

One file of fixed-size rows a shard, and one byte an example that says whether its rows are there.
The byte is set after the rows are flushed, so a run that dies leaves nothing half true, and the
next one goes on with what is missing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from train.data.batches import Batch
from train.data.chat import Example

_NOTE = "features.json"
_SHARD = 1 << 30
"""Bytes of a shard, about."""


@dataclass(frozen=True, kw_only=True)
class FeatureShape:
    """What is stored a token.

    Attributes:
        layers: target layers whose outputs are kept.
        hidden_size: E.
    """

    layers: tuple[int, ...]
    hidden_size: int

    @property
    def row(self) -> np.dtype:
        """One token: features and final hidden in bfloat16, the likeliest token, the log-total."""
        return np.dtype(
            [
                ("features", np.uint16, (len(self.layers), self.hidden_size)),
                ("hidden", np.uint16, (self.hidden_size,)),
                ("top", np.int32),
                ("total", np.float32),
            ]
        )


class FeatureStore:
    """Features by example; opened for reading and for adding what is missing."""

    def __init__(
        self, folder: Path, examples: Sequence[Example], shape: FeatureShape, *, fingerprint: str
    ):
        """Open or begin a store for these very examples.

        Args:
            folder: of the store.
            examples: in order.
            shape: what is stored.
            fingerprint: of data and target; a store of another one is refused.

        Raises:
            ValueError: the folder holds features of other data, another target or other layers.
        """
        self.shape = shape
        lengths = np.asarray([len(example.tokens) for example in examples], np.int64)
        self._start = np.concatenate([[0], np.cumsum(lengths)])
        note = {
            "fingerprint": fingerprint,
            "layers": list(shape.layers),
            "hidden_size": shape.hidden_size,
            "tokens": int(lengths.sum()),
            "examples": len(examples),
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _NOTE
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = [key for key in note if before.get(key) != note[key]]
            if changed:
                said = ", ".join(f"{k}: {before.get(k)} there, {note[k]} here" for k in changed)
                raise ValueError(
                    f"{folder} holds features of something else ({said}); give another"
                )
        else:
            path.write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        self._rows = _Shards(folder, shape.row, int(lengths.sum()))
        self._done = _mapped(folder / "done.bin", np.dtype(np.uint8), len(examples))

    @property
    def num_bytes(self) -> int:
        """Of the whole store once it is full."""
        return self._rows.total * self.shape.row.itemsize

    def missing(self) -> np.ndarray:
        """Numbers of the examples without features."""
        return np.flatnonzero(self._done == 0)

    def has_all(self, batch: Batch) -> bool:
        """Whether every example of a batch is there."""
        used = np.unique(batch.examples[batch.examples >= 0])
        return bool(self._done[used].all())

    def add(self, batch: Batch, features, hidden, top, total) -> None:
        """Keep what the target said about a batch.

        Args:
            batch: whose examples these are.
            features: one array [B, T, E] a layer.
            hidden: [B, T, E], after the final norm.
            top: [B, T].
            total: [B, T].
        """
        real = batch.examples >= 0
        rows = np.zeros((int(real.sum()),), self.shape.row)
        for index, layer in enumerate(features):
            rows["features"][:, index] = _bits(np.asarray(layer)[real])
        rows["hidden"] = _bits(np.asarray(hidden)[real])
        rows["top"], rows["total"] = np.asarray(top)[real], np.asarray(total)[real]
        self._rows.write(self._places(batch)[real], rows)
        self._rows.flush()
        self._done[np.unique(batch.examples[real])] = 1
        self._done.flush()

    def batch(self, batch: Batch) -> dict[str, np.ndarray]:
        """What `add` was given, for a batch in any arrangement; zeros where there is no token."""
        real = batch.examples >= 0
        rows = np.zeros(batch.tokens.shape, self.shape.row)
        rows[real] = self._rows.read(self._places(batch)[real])
        return {
            "features": rows["features"].view(ml_dtypes.bfloat16),
            "hidden": rows["hidden"].view(ml_dtypes.bfloat16),
            "top": np.ascontiguousarray(rows["top"]),
            "total": np.ascontiguousarray(rows["total"]),
        }

    def _places(self, batch: Batch) -> np.ndarray:
        return self._start[np.maximum(batch.examples, 0)] + batch.positions


def store_bytes(examples: Sequence[Example], shape: FeatureShape) -> int:
    """Size of a full store, to announce before it is begun."""
    return sum(len(example.tokens) for example in examples) * shape.row.itemsize


class _Shards:
    """A long array of rows over several mapped files."""

    def __init__(self, folder: Path, row: np.dtype, total: int):
        self.total = total
        self._per = max(1, _SHARD // row.itemsize)
        self._maps = [
            _mapped(folder / f"shard-{i:05d}.bin", row, min(self._per, total - i * self._per))
            for i in range(-(-total // self._per))
        ]

    def read(self, places: np.ndarray) -> np.ndarray:
        found = np.empty(places.shape, self._maps[0].dtype)
        for number, shard in enumerate(self._maps):
            here = places // self._per == number
            if here.any():
                found[here] = shard[places[here] % self._per]
        return found

    def write(self, places: np.ndarray, rows: np.ndarray) -> None:
        for number, shard in enumerate(self._maps):
            here = places // self._per == number
            if here.any():
                shard[places[here] % self._per] = rows[here]

    def flush(self) -> None:
        for shard in self._maps:
            shard.flush()


def _mapped(path: Path, dtype: np.dtype, count: int) -> np.memmap:
    size = dtype.itemsize * count
    if not path.exists() or path.stat().st_size < size:
        with path.open("ab") as file:
            file.truncate(size)  # zeros that take no room until they are written
    return np.memmap(path, dtype, mode="r+", shape=(count,))


def _bits(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)
