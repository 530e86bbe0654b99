"""Serving: continuous batching and the batch inference script."""

from serve.seat import Handle
from serve.server import Server

__all__ = ["Handle", "Server"]
