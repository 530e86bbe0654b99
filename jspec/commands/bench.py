"""`jspec bench`: what speculation gains here, against plain decoding and against the ideal."""

import dataclasses
import datetime
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import jspec
from jspec.commands.figures import check_writable, dump_json, write_json
from jspec.commands.measure import Comparison, by_prompt
from jspec.commands.options import Bench
from jspec.commands.parts import (
    drafter_from,
    encode_all,
    rule_from,
    sampling_from,
    target_from,
    tree_from,
)
from jspec.commands.prompts import read_or_built_in
from jspec.commands.show import PlainConsole
from jspec.commands.table import print_table
from jspec.engine import Engine


def run(options: Bench) -> int:
    """Measure, print a table, and write the figures."""
    measure = options.measure
    _check(options)
    requests = read_or_built_in(measure.prompts, measure.limit)
    options.chat.wanted()
    tree, sampling = tree_from(options.model, options.tree), sampling_from(options.sampling)
    rule = rule_from(options.model, options.verify)
    if sampling.seed is None:
        sampling = dataclasses.replace(sampling, seed=0)  # both ways must draw the same noise
    target = target_from(options.model)
    plain = Engine(target, None, batch_size=measure.batch)
    speculative = Engine(
        target,
        drafter_from(options.model),
        tree=tree,
        batch_size=measure.batch,
        verification=rule,
        draft_temperature=options.verify.draft_temperature,
        simulate_accept_length=options.model.simulate_accept_length,
    )
    prompts = encode_all(plain, requests, options.chat)
    comparison = Comparison(plain, speculative, prompts, sampling, measure.batch)
    with progress_bar() as progress:
        comparison.measure(measure.repeats, progress)
    figures = comparison.figures() | {
        "simulated": options.model.simulate_accept_length is not None,
        "prompts": by_prompt(comparison, [request.id for request in requests]),
        "peak_memory_bytes": comparison.peak_memory,
        "settings": _settings(options, speculative),
        "machine": machine_facts(),
    }
    to_stdout = measure.json is not None and str(measure.json) == "-"
    print_table(figures, PlainConsole(stderr=to_stdout))
    if to_stdout:
        print(dump_json(figures))
    elif measure.json is not None:
        write_json(measure.json, figures)
    return 0


def _check(options: Bench) -> None:
    measure = options.measure
    if options.model.drafter == "none":
        raise ValueError("--drafter none leaves nothing to compare; name a drafter such as ngram.")
    for name in ("batch", "repeats"):
        if getattr(measure, name) < 1:
            raise ValueError(f"--{name} {getattr(measure, name)}; expected at least 1.")
    if measure.json is not None and str(measure.json) != "-":
        check_writable(measure.json)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, a line per stage elsewhere; on stderr."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def say(stage: str, done: float) -> None:
            if stage not in seen:
                seen.add(stage)
                print(f"jspec: {stage}", file=sys.stderr, flush=True)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warm-up", total=1.0)
        yield lambda stage, done: bar.update(task, description=stage, completed=done)


def _settings(options: Bench, engine: Engine) -> dict[str, Any]:
    tree = engine.tree
    target = engine.target
    return {
        "target": options.model.target,
        "parameters": target.num_params,
        "drafter": drafter_from(options.model),
        "dtype": str(target.dtype),
        "num_steps": tree.num_steps if tree else None,
        "topk": tree.topk if tree else None,
        "num_nodes": tree.num_nodes if tree else None,
        "tree": str(options.tree.tree) if options.tree.tree else None,
        "simulate_accept_length": options.model.simulate_accept_length,
        "prompts": _name(options.measure.prompts),
        "limit": options.measure.limit,
        "batch": options.measure.batch,
        "repeats": options.measure.repeats,
        "chat": options.chat.wanted(),
        **dataclasses.asdict(options.sampling),
        **dataclasses.asdict(options.verify),
    }


def _name(path: Path | None) -> str:
    return "built-in" if path is None else str(path)


def machine_facts() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jspec": jspec.__version__,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
