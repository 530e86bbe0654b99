"""A round's tree on the host, for people: nodes, scores, and which path was accepted."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class NodeView:
    """One node.

    Attributes:
        token: id.
        parent: node id, -1 for the root.
        depth: edges from the root.
        score: the drafter's confidence.
        accepted: on the path.
    """

    token: int
    parent: int
    depth: int
    score: float
    accepted: bool


@dataclass(frozen=True)
class RoundView:
    """The tree of one round of one slot.

    Attributes:
        nodes: by node id; None where the tree has padding.
        bonus: the token the target added after the path; None where the text ended before it.
    """

    nodes: list[NodeView | None]
    bonus: int | None

    def children(self, node: int) -> list[int]:
        """Node ids below `node`, in order."""
        return [i for i, view in enumerate(self.nodes) if view is not None and view.parent == node]

    @property
    def drafted(self) -> int:
        """Nodes proposed, the root not counted."""
        return sum(node is not None for node in self.nodes) - 1

    @property
    def path(self) -> list[int]:
        """Accepted node ids, the root first."""
        return [i for i, node in enumerate(self.nodes) if node is not None and node.accepted]

    def below(self, node: int) -> list[int | None]:
        """What is drawn below `node`: the bonus (None) or the accepted child, then the others."""
        path = self.path
        children = sorted(self.children(node), key=lambda child: child not in path)
        last = path[-1] if path else 0
        return [None, *children] if node == last and self.bonus is not None else [*children]


def view_round(tree, path: np.ndarray, path_length: int, slot: int, bonus: int | None) -> RoundView:
    """Read one slot of a tree already on the host.

    Args:
        tree: `Tree` of numpy arrays.
        path: accepted node ids of the slot, [P].
        path_length: how many of them count.
        slot: which tree.
        bonus: token after the path, if it was emitted.
    """
    accepted = {int(node) for node in path[:path_length]}
    depth = tree.links.depth
    nodes = [
        NodeView(
            int(tree.token[slot, i]),
            int(tree.parent[slot, i]),
            int(depth[slot, i]),
            float(tree.score[slot, i]),
            i in accepted,
        )
        if tree.valid[slot, i]
        else None
        for i in range(tree.token.shape[1])
    ]
    return RoundView(nodes, bonus)
