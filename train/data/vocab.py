"""The draft vocabulary: the tokens a head may propose, and how it names them.

Counted over supervised tokens only (what the target writes), with every special and end token in
it: a head that cannot say "end" loses a round at every end. `d2t` is an offset, as EAGLE-3's public
files have it: target id = draft id + d2t[draft id].
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jspec.tokenizer import Tokenizer
from train.data.chat import Example

_FILE = "draft_vocab.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftVocab:
    """Which target tokens a draft head knows.

    Attributes:
        ids: target ids, ascending, [Vd] int32.
        vocab_size: V.
        covered: share of the counted tokens that are in it.
        key: of the data and tokenizer it was counted on.
    """

    ids: np.ndarray
    vocab_size: int
    covered: float
    key: str

    @property
    def size(self) -> int:
        """Vd."""
        return len(self.ids)

    @property
    def is_full(self) -> bool:
        """Both vocabularies are one; heads then store no mapping."""
        return self.size == self.vocab_size

    @property
    def d2t(self) -> np.ndarray:
        """Offset of each draft id to its target id, [Vd] int64."""
        return self.ids.astype(np.int64) - np.arange(self.size)

    @property
    def t2d(self) -> np.ndarray:
        """Whether each target id is in it, [V] bool."""
        member = np.zeros((self.vocab_size,), bool)
        member[self.ids] = True
        return member

    def save(self, folder: Path) -> None:
        """Write `draft_vocab.json`."""
        content = {
            "key": self.key,
            "vocab_size": self.vocab_size,
            "covered": self.covered,
            "ids": self.ids.tolist(),
        }
        (folder / _FILE).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, key: str) -> "DraftVocab":
        """Read `draft_vocab.json`.

        Raises:
            ValueError: it was counted on other data or for another tokenizer.
        """
        content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        if content["key"] != key:
            raise ValueError(
                f"{folder / _FILE} was counted on other data or another tokenizer (key "
                f"{content['key']}, expected {key}); train into another folder, or delete it"
            )
        ids = np.asarray(content["ids"], np.int32)
        return cls(ids=ids, vocab_size=content["vocab_size"], covered=content["covered"], key=key)


def count_draft_vocab(
    examples: Iterable[Example],
    *,
    size: int,
    vocab_size: int,
    always: Iterable[int] = (),
    key: str = "",
) -> DraftVocab:
    """The `size` most frequent supervised tokens.

    Args:
        examples: to count; unsupervised tokens do not.
        size: Vd. With fewer distinct tokens it is filled up with the lowest ids not seen.
        vocab_size: V.
        always: tokens that are in it whatever their count (special and end tokens).
        key: kept with it, see `DraftVocab.load`.

    Raises:
        ValueError: a size that is not 1 to V, or too small for `always`.
    """
    counts = np.zeros((vocab_size,), np.int64)
    for example in examples:
        counts += np.bincount(example.tokens[example.mask], minlength=vocab_size)
    must = np.unique(np.fromiter(always, np.int64))
    if not max(1, len(must)) <= size <= vocab_size:
        raise ValueError(
            f"draft vocabulary of {size}; expected {max(1, len(must))} (its special tokens) to "
            f"{vocab_size}"
        )
    # Most frequent first, ties by id; what must be in comes before everything.
    rank = counts.copy()
    rank[must] = np.iinfo(np.int64).max
    order = np.lexsort((np.arange(vocab_size), -rank))
    ids = np.sort(order[:size]).astype(np.int32)
    total = int(counts.sum())
    return DraftVocab(
        ids=ids,
        vocab_size=vocab_size,
        covered=float(counts[ids].sum() / total) if total else 0.0,
        key=key,
    )


def always_in(tokenizer: Tokenizer | None, eos_token_ids: Iterable[int], vocab_size: int):
    """Special and end tokens of a target, as far as the model has rows for them."""
    special: Sequence[int] = [] if tokenizer is None else tokenizer.backend.all_special_ids
    ends = set(eos_token_ids) | (set() if tokenizer is None else set(tokenizer.eos_token_ids))
    return sorted({token for token in {*special, *ends} if 0 <= token < vocab_size})
