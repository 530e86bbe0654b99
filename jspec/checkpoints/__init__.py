"""Reading and writing public checkpoint formats, strictly."""

from jspec.checkpoints.fetch import ALIASES, Alias, describe, resolve_source
from jspec.checkpoints.source import (
    Checkpoint,
    StoredTensor,
    StrictReader,
    open_checkpoint,
    open_draft_checkpoint,
)

__all__ = [
    "ALIASES",
    "Alias",
    "Checkpoint",
    "StoredTensor",
    "StrictReader",
    "describe",
    "open_checkpoint",
    "open_draft_checkpoint",
    "resolve_source",
]
