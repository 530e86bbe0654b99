"""The training loop, from first to last step."""

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from train.acceptance import acceptance_sums, figures
from train.checkpoints import Checkpoints, Figure
from train.config import OptimizerConfig, RunConfig
from train.data import Batch, Schedule, iterate
from train.journal import Journal
from train.objectives.teacher import DraftRows
from train.placement import Placement
from train.state import make_eval, make_step, start_state


def no_extras(batch: Batch) -> dict[str, np.ndarray]:
    """Nothing beside the batch's own arrays."""
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """What is trained and how; everything the loop does not need to know.

    Attributes:
        name: of the method.
        trained: starting parameters.
        frozen: arrays that the loss reads, the target's among them.
        observe: (trained, frozen, batch, key) -> loss of a batch, and what every draft row did;
            without a key nothing is random.
        decay: weight of draft step k in the loss is decay^k.
        export: writes trained parameters as a head folder that does not exist yet.
        extras: host arrays that a batch gets beside its own (stored features).
        facts: what identifies the run, to be equal on resume.
        best_by: which figure of an evaluation says what the best weights are. A drafter's is tau;
            a target in training has its highest tau while it has learnt to say one thing only.
    """

    name: str
    trained: PyTree
    frozen: PyTree
    observe: Callable[[PyTree, PyTree, PyTree, Any], tuple[Array, DraftRows]]
    decay: float
    export: Callable[[PyTree, Path], None]
    extras: Callable[[Batch], dict[str, np.ndarray]] = no_extras
    facts: dict[str, Any]
    best_by: Figure = "tau"

    def loss(self, trained: PyTree, frozen: PyTree, batch: PyTree, key: Any):
        """A `LossFunction`: loss of a batch, and what it adds to the figures."""
        value, rows = self.observe(trained, frozen, batch, key)
        return value, acceptance_sums(rows, self.decay)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended.

    Attributes:
        steps: taken.
        stopped: it was asked to stop (SIGTERM) and can be resumed.
        tau: of the best head on the validation side, NaN if none was evaluated.
        last: figures of the last evaluation.
    """

    steps: int
    stopped: bool
    tau: float
    last: dict[str, Any]


class Diverged(ValueError):
    """Too many steps in a row without a finite loss."""


def fit(
    method: Method,
    schedule: Schedule,
    validation: Sequence[Batch],
    run: RunConfig,
    optimizer: OptimizerConfig,
    *,
    dtype,
) -> Result:
    """Train.

    Args:
        method: what.
        schedule: batches.
        validation: batches to evaluate on; may be empty.
        run: how long.
        optimizer: how.
        dtype: to compute in.

    Raises:
        ValueError: a folder in use without `resume`, or one of another run.
        Diverged: see `OptimizerConfig.max_bad_steps`.
    """
    placement = Placement.over(run.devices, fsdp=run.fsdp)
    steps = total_steps(schedule, run, optimizer)
    _claim(method, run, steps)
    checkpoints = Checkpoints(run.out / "checkpoints", keep=run.keep, best_by=method.best_by)
    state = placement.weights(start_state(method.trained, optimizer, steps))
    frozen = placement.everywhere(method.frozen)
    batches = iterate(schedule)
    if checkpoints.latest_step() is not None:
        state, data = checkpoints.restore(state)
        batches.set_state(data["batches"])
    step = make_step(method.loss, optimizer, steps, dtype=dtype, seed=run.seed)
    evaluate = make_eval(method.loss, dtype=dtype)
    done, first = int(state.step), jax.process_index() == 0
    journal = Journal(
        _notes_folder(run.out),
        tensorboard=run.tensorboard,
        steps=steps,
        done=done,
        quiet=run.quiet or not first,
    )
    last: dict[str, Any] = {}
    pending: tuple | None = None
    clock = time.perf_counter()

    def put(batch: Batch) -> PyTree:
        return placement.batch(batch.arrays() | method.extras(batch))

    def finish(number: int, told: dict, tokens: int, supervised: int) -> None:
        """Read a step's figures, one step late, so that the device never waits for the host."""
        nonlocal clock
        told = jax.device_get(told)
        now = time.perf_counter()
        seconds, clock = now - clock, now
        seen = {
            "loss": float(told["loss"]),
            "grad_norm": float(told["grad_norm"]),
            "learning_rate": float(told["learning_rate"]),
            "skipped": int(told["skipped"]),
            "tokens_per_second": tokens / seconds,
            "supervised_per_second": supervised / seconds,
            "memory_bytes": memory_bytes(),
            **figures(told["sums"]),
        }
        journal.write("train", number, seen)
        if number % run.log_every == 0 or number == done + 1:
            journal.show(number, _line(number, steps, seen))
        if told["bad_steps"] >= optimizer.max_bad_steps:
            raise Diverged(
                f"{int(told['bad_steps'])} steps in a row had no finite loss or gradient, up to "
                f"step {number}; lower the learning rate, or look at the data"
            )

    def look(number: int) -> None:
        nonlocal last, clock
        if not validation:
            return
        weights = state.best
        told = [jax.device_get(evaluate(weights, frozen, put(b))) for b in validation]
        sums = {name: np.sum([sums[name] for _, sums in told], axis=0) for name in told[0][1]}
        last = {"loss": float(np.mean([value for value, _ in told])), **figures(sums)}
        journal.write("eval", number, last)
        better = checkpoints.save_best(number, weights, last)
        journal.say(f"evaluation at step {number}: {_short(last)}{' (best)' if better else ''}")
        if better:
            publish(method, placement, weights, run.out, first)
        clock = time.perf_counter()

    def save(number: int) -> None:
        checkpoints.save(number, state, {"batches": batches.get_state()})

    with _SigTerm() as asked:
        try:
            for number in range(done + 1, steps + 1):
                group = [next(batches) for _ in range(optimizer.accumulate)]
                state, told = step(state, frozen, [put(batch) for batch in group])
                counts = (
                    sum(int((batch.documents >= 0).sum()) for batch in group),
                    sum(int(batch.mask.sum()) for batch in group),
                )
                if pending is not None:
                    finish(*pending)
                pending = (number, told, *counts)
                pauses = number == steps or asked.now or number % run.save_every == 0
                if pauses or number % run.eval_every == 0:
                    finish(*pending)
                    pending = None
                if pauses:
                    save(number)
                if asked.now:
                    journal.say(f"stopped at step {number}; --resume goes on from here")
                    return Result(steps=number, stopped=True, tau=_tau(checkpoints), last=last)
                if number % run.eval_every == 0 or number == steps:
                    look(number)
            if not validation:
                publish(method, placement, state.best, run.out, first)
            return Result(steps=steps, stopped=False, tau=_tau(checkpoints), last=last)
        finally:
            checkpoints.close()
            journal.close()


def total_steps(schedule: Schedule, run: RunConfig, optimizer: OptimizerConfig) -> int:
    """Optimiser steps of a run."""
    if run.steps is not None:
        return run.steps
    return max(1, round(run.epochs * schedule.batches_per_epoch / optimizer.accumulate))


def publish(method: Method, placement: Placement, weights: PyTree, out: Path, first: bool) -> None:
    """Put a head at `out/head`; whoever looks finds the old one or the new one, whole."""
    params = placement.gathered(weights)
    if not first:
        return
    new, old = out / ".head.new", out / ".head.old"
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)
    method.export(params, new)
    if (out / "head").exists():
        os.rename(out / "head", old)
    os.rename(new, out / "head")
    shutil.rmtree(old, ignore_errors=True)


def memory_bytes() -> int:
    """Most memory ever in use: of the device, or of this process on CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _SigTerm:
    """Turns SIGTERM into a flag while a run lasts."""

    def __init__(self):
        self.now = False

    def __enter__(self) -> "_SigTerm":
        def ask(signum, frame):
            self.now = True

        try:
            self._before = signal.signal(signal.SIGTERM, ask)
        except ValueError:  # not the main thread: nobody can signal it
            self._before = None
        return self

    def __exit__(self, *_):
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


def _claim(method: Method, run: RunConfig, steps: int) -> None:
    """Make the folder this run's, or check that it is."""
    facts = json.loads(json.dumps(method.facts | {"method": method.name, "steps": steps}))
    _notes_folder(run.out).mkdir(parents=True, exist_ok=True)
    note = run.out / "run.json"
    if note.exists():
        if not run.resume:
            raise ValueError(f"{run.out} holds a run already; say --resume, or another --out")
        before = json.loads(note.read_text(encoding="utf-8"))
        changed = [key for key in sorted(facts) if before.get(key) != facts[key]]
        if changed:
            said = ", ".join(f"{k}: {before.get(k)!r} then, {facts[k]!r} now" for k in changed)
            raise ValueError(f"{run.out} holds another run ({said}); resume it as it was")
        return
    if jax.process_index() == 0:
        note.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _notes_folder(out: Path) -> Path:
    """Where this process writes its metrics: the run's folder, or one of its own inside it."""
    number = jax.process_index()
    return out / f"process{number}" if number else out


def _tau(checkpoints: Checkpoints) -> float:
    checkpoints.best.wait_until_finished()
    step = checkpoints.best.best_step()
    return float("nan") if step is None else checkpoints.tau_of(step)


def _line(number: int, steps: int, seen: dict[str, Any]) -> str:
    return (
        f"step {number}/{steps}  {_short(seen)}  {seen['supervised_per_second']:.0f} supervised "
        f"of {seen['tokens_per_second']:.0f} tokens/s  lr {seen['learning_rate']:.1e}"
    )


def _short(seen: dict[str, Any]) -> str:
    depths = "/".join(f"{x:.2f}"[1:] if x < 1 else "1" for x in seen["acceptance"])
    return f"loss {seen['loss']:.4f}  tau {seen['tau']:.3f}  acceptance {depths}"
