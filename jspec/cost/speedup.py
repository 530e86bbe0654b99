"""Speed against plain decoding, from E and the times of a round's parts."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass


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
        known = sorted(self.seconds)
        if not known[0] <= nodes <= known[-1]:
            raise ValueError(f"{nodes} nodes; t_V was measured from {known[0]} to {known[-1]}.")
        place = bisect_left(known, nodes)
        high = known[place]
        if high == nodes:
            return self.seconds[nodes]
        low = known[place - 1]
        part = (nodes - low) / (high - low)
        return (1 - part) * self.seconds[low] + part * self.seconds[high]


def break_even_batch(pays: Callable[[int], bool], limit: int = 1024) -> int | None:
    """The first batch at which speculation no longer pays.

    Every batch from 1 up is tried, since the speedup may rise again where long contexts make the
    cache the larger part of what is read.

    Args:
        pays: whether the speedup of a batch is above 1.
        limit: largest batch tried.

    Returns:
        None where it pays up to the limit.
    """
    return next((batch for batch in range(1, limit + 1) if not pays(batch)), None)
