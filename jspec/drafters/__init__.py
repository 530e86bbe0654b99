"""Drafters: whatever proposes tokens."""

from jspec.drafters.base import DraftContext, Drafter, Proposal, Rows
from jspec.drafters.load import load_drafter
from jspec.drafters.ngram import NGram

__all__ = ["DraftContext", "Drafter", "NGram", "Proposal", "Rows", "load_drafter"]
