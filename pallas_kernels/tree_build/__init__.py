"""Depth, ancestor bits and child links of a batch of trees."""
