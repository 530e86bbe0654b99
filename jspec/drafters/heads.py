"""An EAGLE head as published files have it: its facts, and its tensors under one set of names.

The names are those of SafeAILab's EAGLE-1 files, extended by what EAGLE-3 adds: `fc`, `layers.{i}`,
`norm`, `lm_head`, `embed_tokens`, `d2t` (int64 offsets: target id = draft id + d2t), `t2d` (bool),
`input_norm`, `fc_norm.{i}`. Tensors stay numpy arrays in the dtype of the file, so that what was
read can be written back to the bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jspec.drafters.eagle import EagleConfig
from jspec.drafters.eagle3 import Eagle3Config


@dataclass(frozen=True, eq=False, kw_only=True)
class Head:
    """One head.

    Attributes:
        name: where it came from, for messages.
        format: how it was stored: `safeailab`, `specforge`, `speculators` or `modelopt`.
        config: its facts; the type says which method it is.
        tensors: by name, in stored dtype.
        published: the config.json it came with, whose other keys are kept when it is written back.
    """

    name: str
    format: str
    config: EagleConfig | Eagle3Config
    tensors: Mapping[str, np.ndarray] = field(repr=False)
    published: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def method(self) -> str:
        """`eagle` or `eagle3`."""
        return "eagle3" if isinstance(self.config, Eagle3Config) else "eagle"


def target_ids(head: Head) -> np.ndarray | None:
    """Target ids of the draft vocabulary, [Vd] int64; None where both vocabularies are one.

    Raises:
        ValueError: d2t leads outside the vocabulary or twice to one token, t2d says otherwise, or
            the map is missing for a reduced vocabulary.
    """
    config = head.config
    if not isinstance(config, Eagle3Config):
        return None
    size, full = config.draft_vocab_size, config.decoder.vocab_size
    offsets, member = head.tensors.get("d2t"), head.tensors.get("t2d")
    if offsets is None and member is not None and size < full:
        offsets = np.flatnonzero(member) - np.arange(size) if member.sum() == size else None
    if offsets is None:
        if size == full:
            return None
        raise ValueError(
            f"{head.name} drafts {size} of {full} tokens but has no d2t that says which; without "
            "the map its tokens cannot be told apart. Export it again with d2t."
        )
    ids = np.arange(size, dtype=np.int64) + np.asarray(offsets, np.int64)
    if ids.min() < 0 or ids.max() >= full or len(np.unique(ids)) != size:
        raise ValueError(
            f"{head.name}: d2t maps its {size} tokens to ids {ids.min()} to {ids.max()} with "
            f"{len(np.unique(ids))} distinct ones; expected {size} distinct ids below {full} "
            "(d2t holds offsets: target id = draft id + d2t)."
        )
    if member is not None:
        disagree = int((np.isin(np.arange(full), ids) != np.asarray(member, bool)).sum())
        if disagree:
            raise ValueError(
                f"{head.name}: t2d and d2t disagree about {disagree} tokens; the two tensors are "
                "not of the same head."
            )
    if size == full and np.array_equal(ids, np.arange(full)):
        return None
    return ids
