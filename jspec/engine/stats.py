"""What a generation tells about itself. One module defines every figure, so that they agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from jspec.engine.state import RoundLog


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counters of one request.

    Attributes:
        accept_lengths: tokens emitted in each round, bonus included, after any cut; the first
            token comes from the prefill, so they sum to the number of tokens minus one.
        corrects: drafted tokens accepted in each round, before any cut by a stop or a limit.
        drafts: nodes proposed in each round.
        num_steps: deepest level a draft may have, 0 for plain decoding.
        drafter: its name, `none` for plain decoding.
        rule: verification rule, by its name in `jspec.verify.RULES`; `target-sampling` for plain
            decoding and for greedy requests; or `simulated`.
    """

    accept_lengths: list[int]
    corrects: list[int]
    drafts: list[int]
    num_steps: int
    drafter: str
    rule: str

    @property
    def rounds(self) -> int:
        """Passes of the target after the prefill."""
        return len(self.accept_lengths)

    @property
    def accept_length(self) -> float:
        """τ, tokens emitted per round, bonus included; NaN without a round."""
        return float(np.mean(self.accept_lengths)) if self.accept_lengths else float("nan")

    @property
    def drafted(self) -> int:
        """Nodes proposed in all rounds."""
        return sum(self.drafts)

    @property
    def correct(self) -> int:
        """Drafted tokens accepted in all rounds."""
        return sum(self.corrects)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """See `acceptance_by_depth`."""
        return acceptance_by_depth([self])

    def from_draft(self) -> list[bool]:
        """For every emitted token, the prefill's first, whether the drafter wrote it."""
        marks = [False]
        for emitted, correct in zip(self.accept_lengths, self.corrects):
            marks += [place < correct for place in range(emitted)]
        return marks


def acceptance_by_depth(stats: Sequence[Stats]) -> list[float]:
    """β_1, β_2, …: the share of rounds that accepted a drafted token at depth i.

    Counted among the rounds that accepted one at depth i - 1; for i = 1 among those that drafted
    anything. NaN where there was no such round.
    """
    depths = range(1, max((s.num_steps for s in stats), default=0) + 1)
    corrects = [c for s in stats for c, drafted in zip(s.corrects, s.drafts) if drafted]
    reached = [sum(c >= depth for c in corrects) for depth in (0, *depths)]
    return [now / before if before else float("nan") for before, now in pairwise(reached)]


def read_stats(
    log: RoundLog, slot: int, *, num_steps: int, drafter: str, rule: str, max_tokens: int
) -> Stats:
    """Stats of one slot, from a log already on the host.

    Args:
        max_tokens: tokens of the text that count: rounds after it are left out, and the round
            that crosses it is cut.
    """
    rounds = int(log.rounds[slot])
    emitted = [int(n) for n in log.emitted[slot][:rounds]]
    before = list(accumulate(emitted, initial=1))
    kept = [min(n, max_tokens - start) for n, start in zip(emitted, before) if start < max_tokens]
    return Stats(
        accept_lengths=kept,
        corrects=[int(n) for n in log.correct[slot][: len(kept)]],
        drafts=[int(n) for n in log.drafted[slot][: len(kept)]],
        num_steps=num_steps,
        drafter=drafter,
        rule=rule,
    )
