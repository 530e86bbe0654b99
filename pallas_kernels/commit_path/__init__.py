"""Writes the accepted path into the caches."""
