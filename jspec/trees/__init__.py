"""Token trees: their arrays, their shapes, and how candidates become one."""

from jspec.trees.build import fill_static, place_static, select_nodes
from jspec.trees.config import (
    MAX_NODES,
    StaticTree,
    TreeConfig,
    TreeSpec,
    cartesian,
    chain,
    from_choices,
)
from jspec.trees.tree import Tree, build

__all__ = [
    "MAX_NODES",
    "StaticTree",
    "Tree",
    "TreeConfig",
    "TreeSpec",
    "build",
    "cartesian",
    "chain",
    "fill_static",
    "from_choices",
    "place_static",
    "select_nodes",
]
