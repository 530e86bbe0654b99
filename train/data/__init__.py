"""Training data: read, render, mask, count, batch."""

from train.data.batches import Batch, BatchConfig, Schedule, iterate
from train.data.chat import Example, render
from train.data.dataset import Dataset, load_dataset, split
from train.data.records import Record, read_records
from train.data.vocab import DraftVocab, always_in, count_draft_vocab

__all__ = [
    "Batch",
    "BatchConfig",
    "Dataset",
    "DraftVocab",
    "Example",
    "Record",
    "Schedule",
    "always_in",
    "count_draft_vocab",
    "iterate",
    "load_dataset",
    "read_records",
    "render",
    "split",
]
