"""Speed against plain decoding, from E and the times of a round's parts."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """Seconds of one round, and of the plain step it replaces.

    Attributes:
        plain: t_V(1, B), a step of plain decoding.
        draft: t_D, all of the drafter's passes.
        verify: t_V(T, B), the target over T nodes of each slot.
        rest: tree building, walk, commit: what is neither target nor drafter.
    """

    plain: float
    draft: float
    verify: float
    rest: float = 0.0

    @property
    def seconds(self) -> float:
        """t_D + t_V(T, B) + rest."""
        return self.draft + self.verify + self.rest

    def speedup(self, accept_length: float) -> float:
        """E · t_V(1, B) / (t_D + t_V(T, B) + rest): E tokens in the time of this round, against E
        plain steps. E is the mean over slots; rounds of any acceptance take equally long."""
        return accept_length * self.plain / self.seconds

    def tokens_per_second(self, accept_length: float, batch: int = 1) -> float:
        """B · E tokens a round."""
        return batch * accept_length / self.seconds


def constant_cost_speedup(accept_length: float, draft_cost: float, num_steps: int) -> float:
    """E / (κ·c + 1), where verifying costs a plain step whatever T is.

    Holds while a verify pass is memory-bound. Leviathan et al. 2023,
    https://arxiv.org/abs/2211.17192, theorem 3.8. E = 2.94, c = 0.165, κ = 5 give 1.61; c = 0.05
    gives 2.35.

    Args:
        accept_length: E.
        draft_cost: c, a draft pass in plain steps.
        num_steps: κ.
    """
    return accept_length / (num_steps * draft_cost + 1)


def lost_to_drafting(draft_cost: float, num_steps: int) -> float:
    """Share of E that drafting takes back, 1 - 1/(κ·c + 1): 45 % for c = 0.165 and κ = 5."""
    return 1 - 1 / (num_steps * draft_cost + 1)


@dataclass(frozen=True)
class VerifyTimes:
    """t_V(T, B) measured at some T, for one B; between them it is taken as linear.

    Attributes:
        seconds: by T.
    """

    seconds: Mapping[int, float]

    def __post_init__(self):
        if 1 not in self.seconds:
            raise ValueError("t_V(1) is missing: without the plain step there is no speedup.")

    def __call__(self, nodes: int) -> float:
        """t_V(T).

        Raises:
            ValueError: T outside what was measured.
        """
        return interpolate(self.seconds, nodes, "t_V", "nodes")


def interpolate(points: Mapping[int, float], at: int, name: str, unit: str) -> float:
    """Between the two nearest points, linearly.

    Args:
        points: known values by place.
        at: the place asked for.
        name, unit: of value and place, for messages.

    Raises:
        ValueError: a place outside the points.
    """
    known = sorted(points)
    if not known[0] <= at <= known[-1]:
        raise ValueError(f"{at} {unit}; {name} was measured from {known[0]} to {known[-1]}.")
    place = bisect_left(known, at)
    high = known[place]
    if high == at:
        return points[at]
    low = known[place - 1]
    part = (at - low) / (high - low)
    return (1 - part) * points[low] + part * points[high]


def paying_batches(pays: Callable[[int], bool], limit: int = 1024) -> list[tuple[int, int]]:
    """Batches at which speculation pays, as runs (first, last).

    There may be gaps: with routed experts a few slots' trees read many more experts than the slots
    alone, and many slots' trees hardly any more; and long contexts make the cache, which a tree
    does not enlarge, the larger part of what is read. Four batches an octave are tried, and where
    two neighbours differ the edge between them is searched.

    Args:
        pays: whether the speedup of a batch is above 1.
        limit: largest batch tried.
    """
    octaves = limit.bit_length()
    tried = sorted({min(round(2 ** (step / 4)), limit) for step in range(4 * octaves + 1)})
    known = [pays(batch) for batch in tried]
    runs: list[tuple[int, int]] = []
    first = tried[0]
    for (low, high), (here, there) in zip(pairwise(tried), pairwise(known)):
        if here == there:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if pays(middle) == here else (low, middle)
        if here:
            runs.append((first, low))
        first = high
    return [*runs, (first, limit)] if known[-1] else runs


def break_even_batch(runs: Sequence[tuple[int, int]], limit: int) -> int | None:
    """The batch from which on speculation no longer pays; None where it pays at the limit.

    Args:
        runs: from `paying_batches`.
        limit: as there.
    """
    last = runs[-1][1] if runs else 0
    return last + 1 if last < limit else None
