"""Serving: continuous batching and the batch inference script. Nothing here yet."""
