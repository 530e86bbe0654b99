"""How large and of what shape a draft may be; fixed before compilation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import jax.numpy as jnp
import numpy as np

from pallas_kernels import TreeLinks

MAX_NODES = 128
"""Widest tree the kernels take: four mask words a node."""


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """A tree whose shape the drafter chooses every round, within these bounds.

    Attributes:
        num_steps: levels below the root (EAGLE's `depth` d is num_steps = d + 1).
        topk: children kept per frontier node; 1 means a chain.
        num_nodes: T, nodes verified a round, the root included. Default: the whole chain for
            topk = 1, else 8 or as many as there are candidates.
    """

    num_steps: int = 5
    topk: int = 4
    num_nodes: int = None  # type: ignore[assignment]  # resolved below

    def __post_init__(self):
        for name in ("num_steps", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; expected at least 1.")
        chain = self.num_steps + 1
        if self.num_nodes is None:
            chosen = chain if self.topk == 1 else min(8, self.num_candidates + 1)
            object.__setattr__(self, "num_nodes", chosen)
        if self.num_nodes < 2:
            raise ValueError(
                f"num_nodes={self.num_nodes} counts the root; expected at least 2. "
                "For plain decoding use no drafter."
            )
        if self.topk == 1 and self.num_nodes != chain:
            raise ValueError(
                f"a chain (topk=1) of num_steps={self.num_steps} has {chain} nodes with its root, "
                f"got num_nodes={self.num_nodes}; leave num_nodes out or set num_steps="
                f"{self.num_nodes - 1}."
            )
        if self.num_nodes - 1 > self.num_candidates:
            raise ValueError(
                f"num_nodes={self.num_nodes} needs {self.num_nodes - 1} drafted nodes, but "
                f"num_steps={self.num_steps} with topk={self.topk} gives only "
                f"{self.num_candidates} candidates; lower num_nodes or raise num_steps or topk."
            )
        _check_width(self.num_nodes)

    @property
    def num_candidates(self) -> int:
        """Scored candidates of EAGLE's expansion: topk, then topk² a level."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def path_width(self) -> int:
        """P, the longest path with its root."""
        return self.num_steps + 1


@dataclass(frozen=True)
class StaticTree:
    """A tree whose shape is fixed; a node is the path of sibling ranks that leads to it.

    Medusa calls the paths choices: (0,) is the likeliest first token, (0, 1) the second-likeliest
    token below it (https://arxiv.org/abs/2401.10774, section 3.2).

    Attributes:
        choices: the paths, sorted by depth and then by rank, without the root.
    """

    choices: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        known = set(self.choices)
        if len(known) != len(self.choices):
            twice = next(path for path in self.choices if self.choices.count(path) > 1)
            raise ValueError(f"choice {list(twice)} is listed twice; siblings must be distinct.")
        for path in self.choices:
            if not path or min(path) < 0:
                raise ValueError(f"choice {list(path)}: expected one or more ranks of at least 0.")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(
                    f"choice {list(path)} hangs from {list(path[:-1])}, which is not listed; "
                    "add it, since a node needs its parent."
                )
        if not self.choices:
            raise ValueError("a static tree needs at least one choice; for none use no drafter.")
        ordered = tuple(sorted(self.choices, key=lambda path: (len(path), path)))
        object.__setattr__(self, "choices", ordered)
        _check_width(self.num_nodes)

    @property
    def num_nodes(self) -> int:
        """T, the root included."""
        return len(self.choices) + 1

    @property
    def num_steps(self) -> int:
        """Levels below the root."""
        return len(self.choices[-1])

    @property
    def topk(self) -> int:
        """Candidates needed a level: the largest rank, plus one."""
        return 1 + max(path[-1] for path in self.choices)

    @property
    def path_width(self) -> int:
        """P, the longest path with its root."""
        return self.num_steps + 1

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent id of each node, -1 for the root."""
        ids = {path: index for index, path in enumerate(self.choices, start=1)} | {(): 0}
        return (-1, *(ids[path[:-1]] for path in self.choices))

    def links(self) -> TreeLinks:
        """Depth, ancestor bits, first child and next sibling, worked out once on the host.

        Leading axis 1, to be broadcast over slots.
        """
        parents = self.parents
        ancestors = np.zeros((1, self.num_nodes, -(-self.num_nodes // 32)), np.uint32)
        first_child, next_sibling = np.full((2, 1, self.num_nodes), -1, np.int32)
        newest: dict[int, int] = {}
        for node, parent in enumerate(parents):
            if parent >= 0:
                ancestors[0, node] = ancestors[0, parent]
                if parent in newest:
                    next_sibling[0, newest[parent]] = node
                else:
                    first_child[0, parent] = node
                newest[parent] = node
            ancestors[0, node, node // 32] |= np.uint32(1 << node % 32)
        depth = np.asarray(self.depths, np.int32)[None]
        return TreeLinks(*map(jnp.asarray, (depth, ancestors, first_child, next_sibling)))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node."""
        return (0, *(len(path) for path in self.choices))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node among its siblings' candidates, 0 for the root."""
        return (0, *(path[-1] for path in self.choices))


TreeSpec = TreeConfig | StaticTree


def from_choices(choices: Iterable[Sequence[int]]) -> StaticTree:
    """Static tree from rank paths in any order, such as Medusa's `mc_sim_7b_63`."""
    return StaticTree(tuple(tuple(int(rank) for rank in path) for path in choices))


def chain(num_steps: int) -> StaticTree:
    """The likeliest token at every level: num_steps nodes below the root."""
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}; expected at least 1.")
    return from_choices([0] * depth for depth in range(1, num_steps + 1))


def cartesian(sizes: Sequence[int]) -> StaticTree:
    """Every combination of the sizes[0] likeliest first tokens, the sizes[1] second ones, …

    Nodes: sizes[0] + sizes[0]·sizes[1] + … (Medusa, section 3.1.1).
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes={list(sizes)}; expected at least one level, each of 1 or more.")
    levels = [
        product(*(range(size) for size in sizes[:depth])) for depth in range(1, len(sizes) + 1)
    ]
    return from_choices(path for level in levels for path in level)


def _check_width(num_nodes: int) -> None:
    if num_nodes > MAX_NODES:
        raise ValueError(f"{num_nodes} nodes with the root; the widest tree has {MAX_NODES}.")
