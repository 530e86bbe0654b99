"""The best static tree of a given size, from how often each guess was right."""

import heapq

import numpy as np

from jspec.trees.config import StaticTree, from_choices


def best_tree(accuracies: np.ndarray, num_nodes: int) -> StaticTree:
    """The tree of num_nodes nodes, the root included, with the largest expected accept_length.

    A node is accepted with the product of the accuracies on its path, the guesses of different
    depths taken as independent. No child is likelier than its parent, so growing the tree by
    whichever node is likeliest among those that could hang from it is optimal (Medusa, appendix on
    sparse trees, https://arxiv.org/abs/2401.10774). Ties go to the shallower node, then the lower
    rank.

    Args:
        accuracies: [L, R], share of places where the guess of rank r for depth l + 1 was right.
        num_nodes: T, at least 2.

    Raises:
        ValueError: accuracies outside 0 to 1, or fewer paths than nodes.
    """
    accuracies = _checked(accuracies)
    levels, ranks = accuracies.shape
    paths = sum(ranks**depth for depth in range(1, levels + 1))
    if not 2 <= num_nodes <= paths + 1:
        raise ValueError(
            f"num_nodes={num_nodes} with the root; {levels} depths of {ranks} ranks give 2 to "
            f"{paths + 1} nodes."
        )
    chosen: list[tuple[int, ...]] = []
    candidates: list[tuple[float, int, tuple[int, ...]]] = []

    def push_children(path: tuple[int, ...], value: float) -> None:
        if len(path) < levels:
            for rank, accuracy in enumerate(accuracies[len(path)]):
                child = (*path, rank)
                heapq.heappush(candidates, (-value * float(accuracy), len(child), child))

    push_children((), 1.0)
    while len(chosen) < num_nodes - 1:
        value, _, path = heapq.heappop(candidates)
        chosen.append(path)
        push_children(path, -value)
    return from_choices(chosen)


def expected_accept_length(tree: StaticTree, accuracies: np.ndarray) -> float:
    """τ of a tree, bonus included, where guesses of different depths are independent.

    Args:
        tree: no deeper or wider than `accuracies`.
        accuracies: [L, R], as in `best_tree`.
    """
    accuracies = _checked(accuracies)
    levels, ranks = accuracies.shape
    if tree.num_steps > levels or tree.topk > ranks:
        raise ValueError(
            f"the tree has {tree.num_steps} levels of rank {tree.topk - 1} or less, but accuracies "
            f"are known for {levels} levels of {ranks} ranks."
        )
    return 1.0 + sum(
        float(np.prod([accuracies[depth, rank] for depth, rank in enumerate(path)]))
        for path in tree.choices
    )


def _checked(accuracies: np.ndarray) -> np.ndarray:
    accuracies = np.asarray(accuracies, np.float64)
    if accuracies.ndim != 2 or not accuracies.size:
        raise ValueError(
            f"accuracies have shape {accuracies.shape}; expected [depths, ranks], at least 1 each."
        )
    if not ((accuracies >= 0) & (accuracies <= 1)).all():
        raise ValueError("accuracies must lie between 0 and 1.")
    return accuracies
