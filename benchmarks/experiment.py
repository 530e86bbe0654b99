"""What the experiments share: the machine they ran on, runs in turns, decoding times, results."""

import argparse
import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jspec
from jspec.commands.figures import write_json
from jspec.drafters import Drafter
from jspec.drafters.shipped import default_drafter
from jspec.drafters.standalone import standalone
from jspec.drawing import Chart
from jspec.engine.batch import Batch
from jspec.targets import Prefix, RopeConfig, Target, TargetConfig, random_target
from jspec.targets.masks import causal_bits

PROMPTS = {
    "story": "Write a short story about a lighthouse keeper who finds a letter.",
    "advice": "How should I prepare for my first day at a new job?",
    "science": "Explain why the sky is blue to a ten-year-old.",
    "travel": "Describe an afternoon in Lisbon.",
    "list": "List five healthy breakfast ideas.",
    "history": "Who was Marie Curie, and what is she known for?",
    "code": "Write a Python function that reverses the words of a sentence.",
    "letter": "Write a short email to a neighbour about a lost cat.",
}
"""Ordinary requests; nothing in them is there to be copied."""

TINY = TargetConfig(
    family="llama",
    vocab_size=40,
    hidden_size=24,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4, dim=8),
    max_context=512,
)
"""What --quick runs on."""

RESULTS = Path(__file__).parent / "results"
IDLE = 0.1
"""Share of all cores' time that others may take on a machine that counts as idle."""


def parser_of(doc: str, name: str) -> argparse.ArgumentParser:
    """Flags that every experiment has.

    Args:
        doc: the module's docstring; its first line is the description.
        name: of the JSON and the pictures in benchmarks/results.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", help="default the target's shipped head")
    parser.add_argument("--only", nargs="*", metavar="PART", help="parts to run; default all")
    parser.add_argument("--quick", action="store_true", help="few and small runs, to try it out")
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json")
    return parser


def facts() -> dict[str, Any]:
    """The machine, the versions, and whether anybody else was using it just now."""
    busy = busy_share()
    return {
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "busy_share_before": busy,
        "idle": None if busy is None else busy < IDLE,
    }


def busy_share(seconds: float = 2.0) -> float | None:
    """Share of all cores' time that is taken while this process sleeps; None if not on Linux."""

    def read() -> tuple[int, int]:
        with open("/proc/stat", encoding="ascii") as file:
            times = [int(x) for x in file.readline().split()[1:9]]
        return sum(times), times[3] + times[4]  # idle and waiting for a disk

    try:
        whole, idle = read()
        time.sleep(seconds)
        whole_after, idle_after = read()
    except OSError:
        return None
    return 1 - (idle_after - idle) / max(whole_after - whole, 1)


def in_turns(programs: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, list[float]]:
    """Seconds of every program, run one after the other `repeats` times after a warm-up."""
    times: dict[Any, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            if repeat:
                times[name].append(time.perf_counter() - start)
    return times


def decode_in_turns(
    engines: Mapping[str, jspec.Engine],
    prompts: Sequence[list[int]],
    new_tokens: int,
    repeats: int,
) -> dict[str, dict[str, Any]]:
    """Greedy decoding of the same prompts by every engine, in turns after a warm-up.

    Args:
        engines: by name; each decodes `batch_size` prompts side by side.
        prompts: token ids.
        new_tokens: of every text; end tokens do not end it.
        repeats: runs that count.

    Returns:
        By name: tokens per second of the rounds (without prefill, medians), τ, rounds, and the
        number of texts.
    """
    sampling = jspec.SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    lengths: dict[str, list[int]] = {}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            taken, lengths[name] = 0.0, []
            for start in range(0, len(prompts), engine.batch_size):
                group = list(prompts[start : start + engine.batch_size])
                batch = Batch(
                    engine, group, [sampling] * len(group), engine.batch_size, incremental=False
                )
                jax.block_until_ready(batch.state.lengths)
                before = time.perf_counter()
                batch.advance(batch.max_rounds)
                taken += time.perf_counter() - before
                outputs = [batch.output(slot) for slot in range(len(group))]
                lengths[name] += [n for output in outputs for n in output.stats.accept_lengths]
            if repeat:
                seconds[name].append(taken)
    return {
        name: {
            "tokens_per_second": sum(lengths[name]) / median(seconds[name]),
            "accept_length": sum(lengths[name]) / len(lengths[name]),
            "rounds": len(lengths[name]),
            "texts": len(prompts),
        }
        for name in engines
    }


def verify_pass(
    target: Target, *, nodes: int, batch: int = 1, capacity: int = 512, length: int = 400
) -> Callable[[], Any]:
    """One pass over a chain of new tokens behind a cache, and the argmax of its logits.

    Args:
        target: the model.
        nodes: T.
        batch: B.
        capacity: S, of the cache; its content does not matter.
        length: committed tokens of every slot.
    """

    @jax.jit
    def run(params, cache, lengths, tokens):
        positions = lengths[:, None] + jnp.arange(nodes, dtype=jnp.int32)[None, :]
        bits = jnp.broadcast_to(causal_bits(nodes), (batch, nodes, -(-nodes // 32)))
        passed = target.forward(params, tokens, positions, Prefix(cache, lengths), bits)
        return target.logits(params, passed.hidden).argmax(axis=-1), passed.new

    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, target.config.vocab_size, (batch, nodes)), jnp.int32)
    cache = target.empty_cache(batch, capacity)
    lengths = jnp.full((batch,), length, jnp.int32)
    return lambda: run(target.params, cache, lengths, tokens)


class Parts(NamedTuple):
    """What an experiment runs on."""

    target: Target
    drafter: Drafter
    prompts: list[list[int]]


def load_parts(args: argparse.Namespace) -> Parts:
    """The target, its drafter, and PROMPTS as chats.

    With --quick a tiny random target, a copy of it with noise on its weights, and random prompts.
    """
    if not args.quick:
        target = jspec.load_target(args.target)
        chats = ([{"role": "user", "content": text}] for text in PROMPTS.values())
        return Parts(
            target,
            jspec.load_drafter(args.drafter, target, probe=False),
            [target.tokenizer.encode_chat(chat) for chat in chats],
        )
    target = random_target(TINY, seed=9, sharpness=3.0)
    rng = np.random.default_rng(4)
    noisy = jax.tree.map(
        lambda w: w + 0.2 * np.std(w) * rng.standard_normal(w.shape).astype(np.float32),
        target.params,
    )
    drafter = standalone(dataclasses.replace(target, name="noisy copy", params=noisy), target)
    prompts = [rng.integers(0, TINY.vocab_size, 6).tolist() for _ in range(8)]
    return Parts(target, drafter, prompts)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; numbers with a point get three digits."""
    drawn = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        drawn.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row))
    Console(width=110).print(drawn)


def run_parts(
    parts: Mapping[str, Callable[[Parts, argparse.Namespace], dict[str, Any]]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Run the parts that were asked for, writing the figures after each.

    Raises:
        SystemExit: a part that is not there.
    """
    unknown = [name for name in args.only or [] if name not in parts]
    if unknown:
        raise SystemExit(f"no part {', '.join(unknown)}; expected {', '.join(parts)}")
    args.drafter = args.drafter or default_drafter(args.target)
    loaded = load_parts(args)
    figures = facts() | {
        "quick": args.quick,
        "target": loaded.target.name,
        "drafter": loaded.drafter.description or loaded.drafter.name,
    }
    for name in args.only or parts:
        figures[name] = parts[name](loaded, args)
        figures["busy_share_after"] = busy_share()
        write_json(args.json, figures)
    print(f"wrote {args.json}")
    return figures


def picture(args: argparse.Namespace, name: str, draw: Callable[[], Chart]) -> None:
    """Save a chart beside the JSON; says so where matplotlib is missing."""
    path = args.json.with_name(f"{args.json.stem}-{name}.png")
    try:
        draw().save(path)
    except ValueError as error:
        print(f"no picture {path.name}: {error}")
