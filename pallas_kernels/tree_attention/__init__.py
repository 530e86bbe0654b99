"""Attention of tree nodes over a cached prefix and over their own ancestors."""
