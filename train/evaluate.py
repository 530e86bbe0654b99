"""What a head reaches when it serves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jspec.engine import Engine
from jspec.engine.engine import Prompt
from jspec.engine.stats import acceptance_by_depth
from jspec.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Served:
    """Figures over a set of prompts.

    Attributes:
        texts: prompts answered.
        tokens: generated, all of them.
        rounds: of drafting and verifying.
        tau: tokens a round, bonus included, all rounds of all texts counted alike.
        acceptance: at each depth, among rounds that reached it.
    """

    texts: int
    tokens: int
    rounds: int
    tau: float
    acceptance: list[float]


def serve(engine: Engine, prompts: Sequence[Prompt], sampling: SamplingParams) -> Served:
    """Generate for every prompt.

    Args:
        engine: with the drafter to measure.
        prompts: texts, ids or messages.
        sampling: for all.
    """
    outputs = engine.generate(list(prompts), sampling)
    lengths = [length for output in outputs for length in output.stats.accept_lengths]
    return Served(
        texts=len(outputs),
        tokens=sum(len(output.token_ids) for output in outputs),
        rounds=len(lengths),
        tau=float(np.mean(lengths)) if lengths else float("nan"),
        acceptance=acceptance_by_depth([output.stats for output in outputs]),
    )
