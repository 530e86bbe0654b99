"""The figures of `jspec bench` for people."""

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from jspec.commands.show import NOT_REAL


def print_table(figures: dict[str, Any], console: Console) -> None:
    """What was measured, then where a round's time goes, then what it means."""
    settings, machine = figures["settings"], figures["machine"]
    console.print(
        f"{settings['target']} ({settings['parameters'] / 1e6:,.0f}M parameters, "
        f"{settings['dtype']}), drafter {settings['drafter']}, {settings['num_nodes']} nodes, "
        f"batch {settings['batch']}, on {machine['device']} with JAX {machine['jax']}"
    )
    if figures["simulated"]:
        console.print(NOT_REAL, style="bold red")
    console.print(_ways(figures))
    console.print(_stages(figures))
    console.print(_verdict(figures))


def _ways(figures: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("decoding")
    for heading in ("tokens", "rounds", "tokens/s", "ms/round", "τ"):
        table.add_column(heading, justify="right")
    for way in ("plain", "speculative"):
        one = figures[way]
        table.add_row(
            way,
            str(one["tokens"]),
            str(one["rounds"]),
            _figure(one["tokens_per_second"], 1),
            _figure(one["ms_per_round"], 1),
            _figure(one.get("accept_length", 1.0), 2),
        )
    return table


def _stages(figures: dict[str, Any]) -> Table:
    table = Table(title="one round, ms (each stage run on its own)", title_justify="left")
    stages = list(figures["round_ms"])
    table.add_column("decoding")
    for stage in stages:
        table.add_column(stage, justify="right")
    for way in ("plain", "speculative"):
        times = figures[way]["round_ms"]
        table.add_row(way, *(_figure(times[stage], 2) for stage in stages))
    return table


def _verdict(figures: dict[str, Any]) -> str:
    speculative = figures["speculative"]
    depths = " ".join(_figure(value, 2) for value in speculative["acceptance_by_depth"])
    widths = ", ".join(
        f"{count} of {width} nodes ({_figure(speculative['verify_ms_by_width'][width], 1)} ms)"
        for width, count in speculative["rounds_by_width"].items()
    )
    memory = ", ".join(
        f"{name} {peak / 2**20:,.0f} MiB" for name, peak in figures["peak_memory_bytes"].items()
    )
    lines = [
        f"speedup {_figure(figures['speedup'], 2)}x; ideal {_figure(figures['ideal_speedup'], 2)}x,"
        f" efficiency {_figure(figures['efficiency'], 2)}; with the prompts' own passes "
        f"{_figure(figures['speedup_with_prefill'], 2)}x",
        f"machinery {_percent(figures['machinery_share'])} of a round (all but target and drafter)",
        f"passes: {widths}",
        f"acceptance by depth: {depths}",
    ]
    if figures["compared"]:
        lines.append(
            f"identical: {figures['identical']} of {figures['compared']} texts, "
            f"{figures['identical_tokens']} of {figures['compared_tokens']} tokens"
        )
    if memory:
        lines.append(f"peak memory: {memory}")
    return "\n".join(lines)


def _figure(value: float, digits: int) -> str:
    return "n/a" if math.isnan(value) else f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{100 * value:.1f} %"
