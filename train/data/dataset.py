"""A data file as examples: rendered, cut to length, counted, split for validation."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jspec.tokenizer import Tokenizer
from train.data.chat import Example, Unusable, render
from train.data.records import Record, read_records


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Examples with what became of the records they came from.

    Attributes:
        examples: in file order.
        records: how many were read.
        truncated: how many were cut to the longest length.
        skipped: reason -> records left out.
        fingerprint: of tokens, masks and tokenizer; two equal ones train the same.
    """

    examples: tuple[Example, ...]
    records: int
    truncated: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    fingerprint: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return sum(len(example.tokens) for example in self.examples)

    @property
    def num_supervised(self) -> int:
        """Supervised tokens of all examples."""
        return sum(int(example.mask.sum()) for example in self.examples)

    @property
    def coverage(self) -> float:
        """Share of tokens that are supervised."""
        return self.num_supervised / max(self.num_tokens, 1)

    def check(self, *, text: bool = False) -> "Dataset":
        """Itself, if there is something to learn and something that is not supervised.

        Args:
            text: the data is plain text or pre-tokenised, where everything may be supervised.

        Raises:
            ValueError: no examples, or a mask that is all 0 or all 1.
        """
        if not self.examples:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.skipped.most_common())
            raise ValueError(f"no usable examples in {self.records} records: {reasons or 'empty'}")
        if self.num_supervised == 0:
            raise ValueError(
                "no token is supervised (the loss mask is all 0): the chat template does not mark "
                "answers; look at `jspec data inspect`"
            )
        if self.coverage == 1.0 and not text:
            raise ValueError(
                "every token is supervised (the loss mask is all 1), prompts too: the chat "
                "template marks more than answers; look at `jspec data inspect`"
            )
        return self


def load_dataset(
    source: str | Path | Iterable[Record],
    tokenizer: Tokenizer | None,
    *,
    max_length: int,
    limit: int | None = None,
    last_turn_only: bool = False,
) -> Dataset:
    """Read, render and cut.

    Args:
        source: what `read_records` takes, or records.
        tokenizer: the target's.
        max_length: longer examples lose their end.
        limit: only this many records.
        last_turn_only: of several answers supervise only the last.

    Raises:
        ValueError: unreadable data, none that can be used, or an all-0 or all-1 mask.
    """
    records = read_records(source) if isinstance(source, str | Path) else source
    examples: list[Example] = []
    skipped: Counter[str] = Counter()
    count = truncated = 0
    chats = False
    digest = hashlib.sha256(tokenizer_hash(tokenizer).encode())
    for record in records:
        if limit is not None and count >= limit:
            break
        count += 1
        chats = chats or record.messages is not None
        try:
            example = render(record, tokenizer, last_turn_only=last_turn_only)
        except Unusable as error:
            skipped[error.reason] += 1
            continue
        if len(example.tokens) > max_length:
            truncated += 1
            example = Example(
                id=example.id, tokens=example.tokens[:max_length], mask=example.mask[:max_length]
            )
        if not example.mask.any():
            skipped[f"no supervised token in the first {max_length}"] += 1
            continue
        digest.update(example.tokens.tobytes() + example.mask.tobytes())
        examples.append(example)
    return Dataset(
        examples=tuple(examples),
        records=count,
        truncated=truncated,
        skipped=skipped,
        fingerprint=digest.hexdigest()[:16],
    ).check(text=not chats)


def split(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Training and validation examples.

    By a hash of the prompt, so that the same question never is on both sides, and adding data moves
    nothing from one side to the other.

    Args:
        examples: all.
        share: of the validation side, 0 to below 1.
    """
    if not 0 <= share < 1:
        raise ValueError(f"validation share {share}; expected 0 or more, and below 1")
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        prompt = example.tokens[: int(np.argmax(example.mask))]
        key = prompt if len(prompt) else example.tokens
        place = int.from_bytes(hashlib.sha256(key.tobytes()).digest()[:8], "little") / 2**64
        sides[place < share].append(example)
    if share and not sides[1] and len(examples) > 1:
        sides[1].append(sides[0].pop())
    return sides


def tokenizer_hash(tokenizer: Tokenizer | None) -> str:
    """Of what decides tokens: vocabulary, merges, added tokens and chat template."""
    if tokenizer is None:
        return "none"
    rust = getattr(tokenizer.backend, "backend_tokenizer", None)
    parts = rust.to_str() if rust is not None else json.dumps(sorted(tokenizer.backend.get_vocab()))
    template = tokenizer.backend.chat_template
    text = parts + (template if isinstance(template, str) else json.dumps(template))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def length_histogram(examples: Sequence[Example]) -> list[tuple[int, int]]:
    """(longest length, examples) of power-of-two bins, empty ones in between included."""
    bins = Counter(1 << max(0, math.ceil(math.log2(len(e.tokens)))) for e in examples)
    if not bins:
        return []
    size, found = min(bins), []
    while size <= max(bins):
        found.append((size, bins[size]))
        size *= 2
    return found
