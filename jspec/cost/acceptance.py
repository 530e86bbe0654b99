"""How many tokens a round emits: E, from how often guesses are right.

β_i is conditional: the share of rounds that accept a token at depth i among those that accepted one
at depth i - 1. Every E counts the bonus, so E is the expected accept_length τ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

import numpy as np

from jspec.trees import StaticTree, TreeConfig, from_choices
from jspec.trees.search import expected_accept_length

CATCH = 0.28
"""Assumed share of what the guesses before missed that the next sibling is right about.

With it a chain of five guesses at τ 3.20 becomes a tree of 25 at τ 3.94: the step that EAGLE-1
reports from a chain to its static tree (https://arxiv.org/abs/2401.15077, ablation of the tree)."""


def chain_accept_length(alpha: float, num_steps: int) -> float:
    """E = (1 - α^(κ+1)) / (1 - α) for a chain of κ guesses, each right with α.

    Assumes that guesses are right independently of each other and of depth (Leviathan et al. 2023,
    https://arxiv.org/abs/2211.17192, equation 1). κ = 5, α = 0.70 give 2.94.

    Raises:
        ValueError: α outside 0 to 1, or no guess.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}; expected 0 to 1.")
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}; expected at least 1.")
    if alpha == 1:
        return float(num_steps + 1)
    return (1 - alpha ** (num_steps + 1)) / (1 - alpha)


def accept_length_by_depth(betas: Sequence[float]) -> float:
    """E_tree = 1 + Σ_d Π_{i<=d} β_i, for a tree or a chain of any acceptance.

    Exact for the rounds that β was counted on. With every β_i = α it is `chain_accept_length`.

    Args:
        betas: β_1, β_2, …: for a tree, that any child at that depth was accepted.

    Raises:
        ValueError: a value outside 0 to 1.
    """
    for depth, beta in enumerate(betas, start=1):
        if not 0 <= beta <= 1:
            raise ValueError(f"acceptance {beta} at depth {depth}; expected 0 to 1.")
    return 1.0 + sum(accumulate(betas, mul))


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How often guesses are right, by depth and by rank among their siblings.

    The first guess at depth d is right with β_d. Where it is wrong, the guess of rank r >= 1 is
    right with s_r, at every depth, but never more often than the guess before it:
    p[d, 0] = β_d, p[d, r] = min((1 - β_d)·s_r, p[d, r - 1]). Guesses of different depths are taken
    as independent, and a tree grows by these averages: a drafter that knows when it is sure does
    better than that with the same β.

    Attributes:
        by_depth: β_1, β_2, … of a chain.
        siblings: s_1, s_2, …, what they sum to is at most 1. Default: each guess catches the same
            share q = `CATCH` of what the ones before it missed, s_r = q·(1 - q)^(r-1); an
            assumption, to be replaced by a measurement.
        draft_rate: share of rounds in which anything is drafted (prompt lookup often has nothing).
    """

    by_depth: tuple[float, ...]
    siblings: tuple[float, ...] | None = None
    draft_rate: float = 1.0

    def __post_init__(self):
        if not self.by_depth:
            raise ValueError("no acceptance is given; expected one value a depth.")
        accept_length_by_depth(self.by_depth)  # refuses what is outside 0 to 1
        shares = self.siblings or ()
        if any(not 0 <= share <= 1 for share in shares) or sum(shares) > 1 + 1e-9:
            raise ValueError(
                f"siblings {list(shares)}; expected shares from 0 to 1 that sum to at most 1."
            )
        if not 0 <= self.draft_rate <= 1:
            raise ValueError(f"draft_rate={self.draft_rate}; expected 0 to 1.")

    @property
    def max_topk(self) -> int | None:
        """Children whose acceptance is known; None without a limit."""
        return None if self.siblings is None else len(self.siblings) + 1

    def table(self, num_steps: int, topk: int) -> np.ndarray:
        """p, [num_steps, topk] float64: see above.

        Raises:
            ValueError: more depths or ranks than are known.
        """
        if num_steps > len(self.by_depth):
            raise ValueError(
                f"num_steps={num_steps}, but acceptance is known for {len(self.by_depth)} depths."
            )
        if self.siblings is None:
            shares = geometric_siblings(CATCH, topk - 1)
        elif topk - 1 > len(self.siblings):
            raise ValueError(
                f"topk={topk}, but acceptance is known for {self.max_topk} children of a node."
            )
        else:
            shares = self.siblings[: topk - 1]
        first = np.asarray(self.by_depth[:num_steps], np.float64)[:, None]
        table = np.concatenate([first, (1 - first) * np.asarray(shares)[None, :]], axis=1)
        return np.minimum.accumulate(table, axis=1)

    def tree(self, config: TreeConfig) -> StaticTree:
        """What EAGLE-2's expansion grows where the scores are the averages; see `expand`."""
        return expand(self.table(config.num_steps, config.topk), config)

    def accept_length(self, config: TreeConfig) -> float:
        """E_tree of such a tree: 1 + draft_rate · Σ over its nodes of Π p on the node's path."""
        table = self.table(config.num_steps, config.topk)
        drafted = expected_accept_length(expand(table, config), table)
        return 1.0 + self.draft_rate * (drafted - 1.0)

    def tree_by_depth(self, config: TreeConfig) -> list[float]:
        """β of such a tree: that any child at depth i is accepted, given one at i - 1 was.

        0 from the depth on that the tree does not reach. By construction `accept_length_by_depth`
        of it is `accept_length`, for a draft_rate of 1.
        """
        table = self.table(config.num_steps, config.topk)
        reached = [1.0] + [0.0] * config.num_steps
        for path in expand(table, config).choices:
            reached[len(path)] += float(np.prod([table[d, r] for d, r in enumerate(path)]))
        return [now / before if before else 0.0 for before, now in pairwise(reached)]


def geometric_siblings(catch: float, count: int) -> tuple[float, ...]:
    """s_1 … s_count where each guess is right about `catch` of what those before it missed."""
    return tuple(catch * (1 - catch) ** rank for rank in range(count))


def fit_siblings(
    by_depth: Sequence[float], draft_rate: float, tree: TreeConfig, accept_length: float
) -> tuple[float, ...]:
    """The geometric shares with which `Acceptance` gives a tree the E that was measured.

    Found among catches of 0, 0.01, … 1. What the one number stands for is more than siblings: that
    a tree shaped by the drafter's own scores is better than one of averages counts there too.

    Args:
        by_depth, draft_rate: of a chain, measured.
        tree: another tree, on the same prompts.
        accept_length: E that it reached.

    Returns:
        s_1 … s_{topk-1}.
    """

    def off(catch: float) -> float:
        siblings = geometric_siblings(catch, tree.topk - 1)
        known = Acceptance(by_depth=tuple(by_depth), siblings=siblings, draft_rate=draft_rate)
        return abs(known.accept_length(tree) - accept_length)

    return geometric_siblings(min((i / 100 for i in range(101)), key=off), tree.topk - 1)


def expand(table: np.ndarray, config: TreeConfig) -> StaticTree:
    """EAGLE-2's expansion and rerank with fixed scores.

    Each level continues the `topk` likeliest nodes of the level before by `topk` children; of all
    candidates, topk + (num_steps - 1)·topk², the num_nodes - 1 likeliest stay
    (https://arxiv.org/abs/2406.16858, section 4). Ties go to the earlier candidate, so that a
    node's parent always stays with it.

    Args:
        table: p by depth and rank, [num_steps, topk].
        config: the bounds.
    """
    frontier: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for row in table[: config.num_steps]:
        grown = [
            (value * float(chance), (*path, rank))
            for value, path in frontier
            for rank, chance in enumerate(row[: config.topk])
        ]
        pool += grown
        frontier = sorted(grown, key=lambda node: -node[0])[: config.topk]
    kept = sorted(pool, key=lambda node: -node[0])[: config.num_nodes - 1]
    return from_choices(path for _, path in kept)
