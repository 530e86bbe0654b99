"""Losses of each method, as pure functions over a draft module and a batch."""
