"""`jspec plan`: which tree would be fastest, and when speculation pays."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table

from jspec.commands.figures import check_writable, dump_json, write_json
from jspec.commands.options import Plan as PlanOptions
from jspec.commands.options import PlanTrees
from jspec.commands.plan_measure import Measurement, measure
from jspec.commands.show import PlainConsole
from jspec.cost import (
    Acceptance,
    Option,
    Plan,
    Roofline,
    break_even_batch,
    find_drafter,
    find_hardware,
    find_shape,
    make_plan,
    plan_paying_batches,
    tree_grid,
)
from jspec.cost.planner import NODES, STEPS, TOPKS
from jspec.trees import TreeConfig

ASSUMED = Acceptance(by_depth=(0.7,) * 8)
"""Where nothing is known: the alpha of the field's worked examples."""

BREAK_EVEN_LIMIT = 1024
"""Largest batch that is tried."""

_ON_PAPER = ("hardware", "devices", "context", "draft_vocab", "acceptance", "siblings")
_MEASURED = ("prompts", "limit", "max_new_tokens", "temperature", "repeats")

Number = TypeVar("Number", int, float)


def run(options: PlanOptions) -> int:
    """Plan, print a table, and write the figures."""
    _check(options)
    figures, lines = _measured(options) if options.measure.measure else _on_paper(options)
    to_stdout = options.trees.json is not None and str(options.trees.json) == "-"
    console = PlainConsole(stderr=to_stdout)
    heading, table, *rest = lines
    console.print(heading)
    console.print(table)
    for line in rest:
        console.print(line)
    if to_stdout:
        print(dump_json(figures))
    elif options.trees.json is not None:
        write_json(options.trees.json, figures)
    return 0


def _check(options: PlanOptions) -> None:
    given = {
        name: value
        for group in (options.model, options.place, options.acceptance, options.measure)
        for name, value in vars(group).items()
        if value is not None
    }
    for name in _ON_PAPER if options.measure.measure else _MEASURED:
        if name in given:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} is for plans on paper; leave out {flag} or --measure."
                if options.measure.measure
                else f"{flag} says how to measure; add --measure or leave out {flag}."
            )
    if not options.measure.measure and options.chat.wanted() is not None:
        raise ValueError("--chat and --no-chat are for --measure; leave them out.")
    if options.place.batch < 1:
        raise ValueError(f"--batch {options.place.batch}; expected at least 1.")
    if options.trees.rows < 1:
        raise ValueError(f"--rows {options.trees.rows}; expected at least 1.")
    if options.trees.json is not None and str(options.trees.json) != "-":
        check_writable(options.trees.json)


def _on_paper(options: PlanOptions) -> tuple[dict[str, Any], list[Any]]:
    place, batch = options.place, options.place.batch
    if place.hardware is None:
        raise ValueError("--hardware NAME is missing; name one, or --measure this machine.")
    devices, context = _or(place.devices, 1), _or(place.context, 1024)
    if context < 0:
        raise ValueError(f"--context {context}; expected at least 0.")
    acceptance = _acceptance(options)
    target = find_shape(options.model.target)
    drafter = find_drafter(options.model.drafter, target, draft_vocab=options.model.draft_vocab)
    trees = _trees(
        options.trees,
        max_steps=min(len(acceptance.by_depth), drafter.max_steps or len(acceptance.by_depth)),
        max_topk=acceptance.max_topk,
    )
    times = Roofline(
        target=target,
        drafter=drafter,
        hardware=find_hardware(place.hardware).times(devices),
        context=context,
        dtype=options.model.dtype or "bfloat16",
    )
    times.check_memory(batch)
    plan = make_plan(trees, times, acceptance, batch=batch)
    limit = min(times.largest_batch, BREAK_EVEN_LIMIT)
    pays = plan_paying_batches(trees, times, acceptance, limit=limit)
    reason = times.reason(plan.best.tree, batch)
    assumed = options.acceptance.acceptance is None
    figures = {
        "settings": {
            "target": target.name,
            "drafter": drafter.name,
            "hardware": dataclasses.asdict(times.hardware),
            "batch": batch,
            "context": context,
            "dtype": times.dtype,
            "rest_seconds": times.rest,
        },
        "acceptance": dataclasses.asdict(acceptance) | {"assumed": assumed},
        **_plan_figures(plan),
        "break_even_batch": break_even_batch(pays, limit),
        "paying_batches": pays,
        "largest_batch_tried": limit,
        "reason": reason,
    }
    lines = [
        f"{target.name} ({target.num_params / 1e9:,.2f}B parameters, {times.dtype}), drafter "
        f"{drafter.name}, on {times.hardware.name}, batch {batch}, context {context}: on paper, "
        "from datasheet peaks",
        _table(plan, options.trees.rows),
        _verdict(plan),
        reason,
        _break_even(pays, limit, fits=limit == times.largest_batch),
    ]
    if assumed:
        lines.append("acceptance is assumed, 0.7 at every depth; give --acceptance, or --measure")
    return figures, lines


def _measured(options: PlanOptions) -> tuple[dict[str, Any], list[Any]]:
    found: Measurement = measure(options, lambda **bounds: _trees(options.trees, **bounds))
    plan, best = found.plan, found.plan.best
    off = found.predicted / found.speedup - 1
    figures = {
        **found.figures,
        **_plan_figures(plan),
        "break_even_batch": None,
        "reason": found.reason,
        "check": {
            "tree": dataclasses.asdict(best.tree),
            "predicted_speedup": found.predicted,
            "measured_speedup": found.speedup,
            "predicted_accept_length": best.accept_length,
            "measured_accept_length": found.accept_length,
            "off": off,
        },
    }
    lines = [
        found.heading,
        _table(plan, options.trees.rows),
        _verdict(plan),
        found.reason,
        f"check: predicted {found.predicted:.2f}x, measured {found.speedup:.2f}x "
        f"({100 * off:+.0f} %); τ predicted {best.accept_length:.2f}, measured "
        f"{found.accept_length:.2f}",
    ]
    return figures, lines


def _plan_figures(plan: Plan) -> dict[str, Any]:
    return {
        "plain_tokens_per_second": plan.plain_tokens_per_second,
        "best": _option_figures(plan.best),
        "options": [_option_figures(one) for one in plan.options],
    }


def _option_figures(option: Option) -> dict[str, Any]:
    return {
        **dataclasses.asdict(option.tree),
        "accept_length": option.accept_length,
        "draft_seconds": option.time.draft,
        "verify_seconds": option.time.verify,
        "rest_seconds": option.time.rest,
        "round_seconds": option.time.seconds,
        "tokens_per_second": option.tokens_per_second,
        "speedup": option.speedup,
    }


def _table(plan: Plan, rows: int) -> Table:
    table = Table(title="times in ms", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = ("num_steps", "topk", "num_nodes", "τ", "draft", "verify", "round", "tokens/s")
    for heading in (*headings, "speedup"):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, one in enumerate(plan.options[:rows]):
        table.add_row(
            f"{'' if place else 'best '}{one.tree.num_steps}",
            str(one.tree.topk),
            str(one.tree.num_nodes),
            f"{one.accept_length:.2f}",
            f"{1e3 * one.time.draft:.3g}",
            f"{1e3 * one.time.verify:.3g}",
            f"{1e3 * one.time.seconds:.3g}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.speedup:.2f}",
        )
    return table


def _verdict(plan: Plan) -> str:
    best, plain = plan.best, f"plain decoding {plan.plain_tokens_per_second:,.0f} tokens/s"
    if best.speedup <= 1:
        return f"no tree pays: {plain}, the best tree {best.tokens_per_second:,.0f}"
    tree = best.tree
    return (
        f"best: --num-steps {tree.num_steps} --topk {tree.topk} --num-nodes {tree.num_nodes}, "
        f"{best.tokens_per_second:,.0f} tokens/s, {best.speedup:.2f} times {plain}"
    )


def _break_even(pays: Sequence[tuple[int, int]], limit: int, *, fits: bool) -> str:
    top = f"{limit}, the largest that {'fits' if fits else 'was tried'}"
    even = break_even_batch(pays, limit)
    if even == 1:
        return f"break-even: no tree pays at any batch up to {top}"
    runs = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in pays)
    if even is not None:
        return f"break-even: batch {even}; a tree pays at {runs}"
    if len(pays) > 1:
        return f"break-even: not up to batch {top}; a tree pays at {runs}"
    return f"break-even: a tree pays at every batch up to {top}"


def _acceptance(options: PlanOptions) -> Acceptance:
    flags = options.acceptance
    betas = ASSUMED.by_depth
    if flags.acceptance is not None:
        betas = _numbers("--acceptance", flags.acceptance, float, "0.8,0.75,0.7")
    siblings = None
    if flags.siblings is not None:
        siblings = _numbers("--siblings", flags.siblings, float, "0.35,0.15,0.08")
    return Acceptance(by_depth=betas, siblings=siblings)


def _trees(
    flags: PlanTrees,
    *,
    max_steps: int | None = None,
    max_topk: int | None = None,
    max_nodes: int | None = None,
) -> list[TreeConfig]:
    """The grid that was asked for; what was named and cannot be is refused, not left out.

    Args:
        flags: of the command.
        max_steps, max_topk: that are known.
        max_nodes: largest tree considered where no --num-nodes are given.
    """
    steps = STEPS if flags.num_steps is None else _counts("--num-steps", flags.num_steps)
    topks = TOPKS if flags.topk is None else _counts("--topk", flags.topk)
    usual = [nodes for nodes in NODES if max_nodes is None or nodes <= max_nodes]
    nodes = usual if flags.num_nodes is None else _counts("--num-nodes", flags.num_nodes)
    if flags.num_steps is not None and max_steps is not None and max(steps) > max_steps:
        raise ValueError(
            f"--num-steps {max(steps)}; drafter and acceptance go to a depth of {max_steps}."
        )
    if flags.topk is not None and max_topk is not None and max(topks) > max_topk:
        raise ValueError(
            f"--topk {max(topks)}; acceptance is known for {max_topk} children of a node."
        )
    trees = list(tree_grid(steps, topks, nodes, max_steps=max_steps, max_topk=max_topk))
    if not trees:
        raise ValueError(
            "no such tree: expected more nodes than levels, and no more than topk + (num_steps - 1)"
            " · topk² below the root."
        )
    return trees


def _counts(flag: str, text: str) -> tuple[int, ...]:
    counts = _numbers(flag, text, int, "1,4")
    if min(counts) < 1:
        raise ValueError(f"{flag} {text}; expected numbers of at least 1.")
    return tuple(sorted(set(counts)))


def _numbers(
    flag: str, text: str, kind: Callable[[str], Number], example: str
) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"{flag} {text}; expected numbers separated by commas, such as {example}."
        ) from None


def _or(given: int | None, default: int) -> int:
    return default if given is None else given
