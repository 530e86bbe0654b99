"""Plain and speculative decoding of the same prompts in turns, and the figures that follow."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import jax

from jspec.commands.stages import STAGES, StageTimer
from jspec.engine import Engine, Output, Stats
from jspec.engine.batch import Batch
from jspec.engine.stats import acceptance_by_depth
from jspec.sampling import SamplingParams
from jspec.verify import TargetSampling

WAYS = ("plain", "speculative")

_STAGE_RUNS = 5
"""Runs of every stage a repeat."""


@dataclass
class Runs:
    """What one way of decoding one group of prompts did.

    Attributes:
        capacity: of its cache.
        outputs: of its prompts, the same in every run.
        prefill_seconds, decode_seconds: of each measured run.
    """

    capacity: int = 0
    outputs: list[Output] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Passes of the target after the prefill, for the whole group."""
        return max(output.stats.rounds for output in self.outputs)

    @property
    def decoded(self) -> int:
        """Tokens of all rounds: all but the first of each text, which the prefill gives."""
        return sum(len(output.token_ids) - 1 for output in self.outputs)


class Comparison:
    """Both engines over all groups of prompts.

    Attributes:
        engines: by way.
        groups: token ids of the prompts decoded side by side.
        runs: by way and group.
        timers: stage timers by way and cache capacity.
        peak_memory: bytes, after the first measured repeat.
    """

    def __init__(
        self,
        plain: Engine,
        speculative: Engine,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        batch: int,
    ):
        """Nothing runs yet."""
        self.engines: dict[str, Engine] = {"plain": plain, "speculative": speculative}
        self.groups = [list(prompts[i : i + batch]) for i in range(0, len(prompts), batch)]
        self.slots = min(batch, len(prompts))
        self.sampling = sampling
        self.runs: dict[str, list[Runs]] = {way: [Runs() for _ in self.groups] for way in WAYS}
        self.timers: dict[str, dict[int, StageTimer]] = {way: {} for way in WAYS}
        self.peak_memory: dict[str, int] = {}

    def measure(self, repeats: int, progress: Callable[[str, float], None]) -> None:
        """Warm up, then run every group both ways `repeats` times, each time in the other order."""
        total = (repeats + 1) * len(self.groups)
        for repeat in range(repeats + 1):
            for index in range(len(self.groups)):
                stage = f"repeat {repeat} of {repeats}" if repeat else "warm-up"
                progress(stage, (repeat * len(self.groups) + index) / total)
                order = WAYS if (repeat + index) % 2 else WAYS[::-1]
                for way in order:
                    self._run(way, index, counts=repeat > 0)
            if repeat == 1:
                self.peak_memory = peak_memory()
                progress("compiling the stages", (repeat + 1) / (repeats + 1))
                self._open_timers()
            for timers in self.timers.values() if repeat else ():
                for timer in timers.values():
                    timer.run(_STAGE_RUNS)

    def _batch(self, way: str, index: int) -> Batch:
        group = self.groups[index]
        return Batch(
            self.engines[way], group, [self.sampling] * len(group), self.slots, incremental=False
        )

    def _run(self, way: str, index: int, *, counts: bool) -> None:
        runs = self.runs[way][index]
        start = time.perf_counter()
        batch = self._batch(way, index)
        middle = time.perf_counter()
        while batch.running:
            batch.advance(batch.max_rounds)
        end = time.perf_counter()
        runs.capacity = batch.state.cache.capacity
        runs.outputs = [batch.output(slot) for slot in range(len(self.groups[index]))]
        if counts:
            runs.prefill_seconds.append(middle - start)
            runs.decode_seconds.append(end - middle)

    def _open_timers(self) -> None:
        for way, groups in self.runs.items():
            for index, runs in enumerate(groups):
                if runs.rounds and runs.capacity not in self.timers[way]:
                    batch = self._batch(way, index)
                    if runs.rounds > 1:
                        batch.advance(runs.rounds // 2)
                    timer = StageTimer(self.engines[way], batch.state, sampled=batch.sampled)
                    timer.warm_up()
                    self.timers[way][runs.capacity] = timer

    def figures(self) -> dict[str, Any]:
        """Everything that was found out; NaN where there was nothing to measure."""
        plain, speculative = (self._way(way) for way in WAYS)
        speedup = _ratio(speculative["tokens_per_second"], plain["tokens_per_second"])
        plain_round = plain["round_ms"]["round"] * plain["rounds"] / max(plain["decoded_tokens"], 1)
        stages = speculative["round_ms"]
        passes = stages["verify"] + stages["draft"] + stages["extend"]
        ideal_round = passes * speculative["rounds"] / max(speculative["decoded_tokens"], 1)
        ideal = _ratio(plain_round, ideal_round)
        whole = ("prefill_seconds", "decode_seconds")
        return {
            "plain": plain,
            "speculative": speculative,
            "speedup": speedup,
            "ideal_speedup": ideal,
            "efficiency": _ratio(speedup, ideal),
            "speedup_with_prefill": _ratio(
                speculative["tokens"] / sum(speculative[part] for part in whole),
                plain["tokens"] / sum(plain[part] for part in whole),
            ),
            "round_ms": stages,
            "machinery_share": 1 - _ratio(passes, stages["round"]),
            **self._parity(),
        }

    def _way(self, way: str) -> dict[str, Any]:
        groups = self.runs[way]
        stats = [output.stats for runs in groups for output in runs.outputs]
        decode = sum(median(runs.decode_seconds) for runs in groups)
        prefill = sum(median(runs.prefill_seconds) for runs in groups)
        decoded = sum(runs.decoded for runs in groups)
        rounds = sum(runs.rounds for runs in groups)
        figures = {
            "tokens": sum(len(output.token_ids) for runs in groups for output in runs.outputs),
            "decoded_tokens": decoded,
            "rounds": rounds,
            "tokens_per_second": _ratio(decoded, decode) if rounds else float("nan"),
            "prefill_seconds": prefill,
            "decode_seconds": decode,
            "ms_per_round": 1e3 * _ratio(decode, rounds),
            "round_ms": self._round_ms(way),
        }
        if way == "speculative":
            emitted = [length for one in stats for length in one.accept_lengths]
            widths = sum((self._widths(runs) for runs in groups), Counter())
            figures |= {
                "rule": stats[0].rule,
                "accept_length": _ratio(sum(emitted), len(emitted)),
                "acceptance_by_depth": acceptance_by_depth(stats),
                "drafted": sum(one.drafted for one in stats),
                "correct": sum(one.correct for one in stats),
                "rounds_by_width": {str(w): widths[w] for w in self.engines[way].round.widths},
                "verify_ms_by_width": {
                    str(w): 1e3 * self._mean(way, "verify", only=w)
                    for w in self.engines[way].round.widths
                },
            }
        return figures

    def _round_ms(self, way: str) -> dict[str, float]:
        """Mean over the rounds that happened, each at its own pass width and cache capacity."""
        return {stage: 1e3 * self._mean(way, stage) for stage in (*STAGES, "round")}

    def _mean(self, way: str, stage: str, only: int | None = None) -> float:
        weights: Counter[tuple[int, int]] = Counter()
        for runs in self.runs[way]:
            for width, count in self._widths(runs, way).items():
                weights[runs.capacity, width if only is None else only] += count
        seconds = sum(
            count * self.timers[way][capacity].seconds(stage, width)
            for (capacity, width), count in weights.items()
            if count
        )
        return _ratio(seconds, weights.total())

    def _widths(self, runs: Runs, way: str = "speculative") -> Counter[int]:
        """How many rounds of a group took each pass width."""
        widths = self.engines[way].round.widths
        wide = [widths[-1]] * runs.rounds
        if len(widths) > 1:
            wide = [
                widths[-1] if any(_drafted(output.stats, r) for output in runs.outputs) else 1
                for r in range(runs.rounds)
            ]
        return Counter(wide)

    def _parity(self) -> dict[str, Any]:
        """How many texts, and how many leading tokens of them, are the same both ways."""
        pairs = [
            (plain.token_ids, speculative.token_ids)
            for before, after in zip(self.runs["plain"], self.runs["speculative"])
            for plain, speculative in zip(before.outputs, after.outputs)
        ]
        engine = self.engines["speculative"].round
        simulated = engine.simulate_accept_length is not None
        rule = engine.rule_for(self.sampling.temperature > 0)
        if simulated or not isinstance(rule, TargetSampling):
            pairs = []  # not real text, or drawn with other noise
        same_tokens = sum(_common(one, other) for one, other in pairs)
        return {
            "identical": sum(one == other for one, other in pairs),
            "compared": len(pairs),
            "identical_tokens": same_tokens,
            "compared_tokens": sum(max(len(one), len(other)) for one, other in pairs),
        }


def by_prompt(comparison: Comparison, names: Sequence[str | int]) -> list[dict[str, Any]]:
    """One entry a group of prompts: how long it was, what speculation gained there."""
    entries, start = [], 0
    for group, plain, speculative in zip(
        comparison.groups, comparison.runs["plain"], comparison.runs["speculative"]
    ):
        seconds = [median(runs.decode_seconds) for runs in (plain, speculative)]
        per_token = [_ratio(s, runs.decoded) for s, runs in zip(seconds, (plain, speculative))]
        emitted = [n for output in speculative.outputs for n in output.stats.accept_lengths]
        entries.append(
            {
                "ids": list(names[start : start + len(group)]),
                "prompt_tokens": [len(ids) for ids in group],
                "tokens": [len(output.token_ids) for output in speculative.outputs],
                "decode_seconds": dict(zip(WAYS, seconds)),
                "speedup": _ratio(*per_token),
                "accept_length": _ratio(sum(emitted), len(emitted)),
            }
        )
        start += len(group)
    return entries


def peak_memory() -> dict[str, int]:
    """Peak bytes of this process so far, and of each accelerator."""
    peaks = {}
    try:
        import resource
        import sys

        unit = 1 if sys.platform == "darwin" else 1024
        peaks["process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    except ImportError:  # Windows
        pass
    for device in jax.local_devices():
        stats = device.memory_stats() if device.platform != "cpu" else None
        if stats and "peak_bytes_in_use" in stats:
            peaks[f"{device.platform}:{device.id}"] = int(stats["peak_bytes_in_use"])
    return peaks


def _drafted(stats: Stats, round_number: int) -> bool:
    return round_number < stats.rounds and stats.drafts[round_number] > 0


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return place
    return min(len(one), len(other))


def _ratio(part: float | int, whole: float | int) -> float:
    return part / whole if whole else float("nan")
