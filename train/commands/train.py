"""`jspec train METHOD`: data, head and loop put together."""

import math
from collections.abc import Callable
from typing import Any

from rich.console import Console

from jspec.cache_dirs import enable_compilation_cache
from jspec.targets import Target, load_target
from train.commands.plan import show_plan
from train.data import Schedule
from train.loop import Method, fit
from train.methods.common import Prepared, compute_dtype, prepare
from train.methods.eagle1 import eagle1_method
from train.methods.eagle3 import eagle3_method
from train.methods.medusa import medusa_method
from train.methods.mtp import mtp_method
from train.options import TrainEagle1, TrainEagle3, TrainMedusa, TrainMTP
from train.placement import join

STOPPED = 143
"""128 + SIGTERM, as shells report it."""

Build = Callable[[Any, Target, Prepared], Method]


def run(options: TrainEagle3 | TrainEagle1 | TrainMedusa | TrainMTP) -> int:
    """Train as asked.

    Returns:
        0, or 143 after SIGTERM, when the run can be resumed.
    """
    join(options.run.coordinator, options.run.processes, options.run.process)
    if options.model.compilation_cache:
        enable_compilation_cache()
    target = load_target(options.model.target, dtype=options.run.dtype)
    lookback, build = _METHODS[type(options)]
    prepared = prepare(
        options.data,
        target,
        lookback=lookback(options),
        seed=options.run.seed,
        eval_batches=options.run.eval_batches,
    )
    console = Console(stderr=True, quiet=options.run.quiet)
    say_data(prepared, prepared.schedule, console)
    method = build(options, target, prepared)
    if options.model.dry_run:
        show_plan(method, prepared, options.run, options.optimizer, Console())
        return 0
    result = fit(
        method,
        prepared.schedule,
        prepared.checks,
        options.run,
        options.optimizer,
        dtype=compute_dtype(target, options.run.dtype),
    )
    if result.stopped:
        return STOPPED
    tau = "" if math.isnan(result.tau) else f", simulated tau {result.tau:.3f}"
    console.print(f"{result.steps} steps; head in {options.run.out / 'head'}{tau}")
    return 0


def say_data(prepared: Prepared, schedule: Schedule, console: Console) -> None:
    """One line on what is learnt from, and one on batches."""
    data = prepared.dataset
    console.print(
        f"{len(prepared.training):,} examples ({len(prepared.validation):,} for validation), "
        f"{data.num_tokens:,} tokens, {100 * data.coverage:.1f} % supervised",
        highlight=False,
    )
    for reason, count in data.skipped.most_common():
        console.print(f"skipped {count:,}: {reason}", highlight=False)
    shapes = ", ".join(f"{b}x{t} ({r} draft rows)" for b, t, r in schedule.shapes)
    console.print(f"{schedule.batches_per_epoch:,} batches an epoch: {shapes}", highlight=False)


def _eagle3(options: TrainEagle3, target: Target, prepared: Prepared) -> Method:
    return eagle3_method(
        options.head,
        target,
        prepared,
        max_length=prepared.schedule.config.max_length,
        seed=options.run.seed,
        features=options.data.features,
    )


def _eagle1(options: TrainEagle1, target: Target, prepared: Prepared) -> Method:
    return eagle1_method(
        options.head,
        target,
        prepared,
        max_length=prepared.schedule.config.max_length,
        seed=options.run.seed,
        features=options.data.features,
    )


def _medusa(options: TrainMedusa, target: Target, prepared: Prepared) -> Method:
    return medusa_method(options.head, target, prepared, features=options.data.features)


def _mtp(options: TrainMTP, target: Target, prepared: Prepared) -> Method:
    return mtp_method(
        options.head, target, prepared, seed=options.run.seed, features=options.data.features
    )


_METHODS: dict[type, tuple[Callable[[Any], int], Build]] = {
    TrainEagle3: (lambda options: options.head.objective.num_steps - 1, _eagle3),
    TrainEagle1: (lambda options: 0, _eagle1),
    TrainMedusa: (lambda options: options.head.num_heads - 1, _medusa),
    TrainMTP: (lambda options: options.head.objective.num_steps - 1, _mtp),
}
