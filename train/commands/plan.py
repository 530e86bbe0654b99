"""`--dry-run`: what a run would hold and how long it would take, before anything is trained."""

import jax
from rich.console import Console
from rich.table import Table

from jspec.cost.hardware import product_speed
from train.config import OptimizerConfig, RunConfig
from train.loop import Method, total_steps
from train.methods.common import Prepared
from train.placement import Placement
from train.state import make_step, start_state


def show_plan(
    method: Method,
    prepared: Prepared,
    run: RunConfig,
    optimizer: OptimizerConfig,
    console: Console,
) -> None:
    """Print shapes, parameters, memory and time.

    The step of the largest batch is compiled, so its memory is the compiler's own figure; its time
    comes from its arithmetic and the speed of a matrix product here.
    """
    schedule = prepared.schedule
    steps = total_steps(schedule, run, optimizer)
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in method.facts.items():
        table.add_row(key, str(value))
    trained = sum(x.size for x in jax.tree.leaves(method.trained))
    table.add_row("trained parameters", f"{trained:,} ({trained * 2 / 1e6:.1f} MB in bfloat16)")
    for path, x in sorted(method.trained.items(), key=str):
        table.add_row(f"  {'.'.join(map(str, path))}", str(tuple(x.shape)))
    table.add_row("frozen arrays", f"{_bytes(method.frozen) / 1e6:,.0f} MB")
    table.add_row("weights and optimiser", f"{4 * 3 * trained / 1e6:,.0f} MB")
    compiled = _compiled(method, prepared, run, optimizer, steps)
    memory = compiled.memory_analysis()
    table.add_row("activations of a step", f"{memory.temp_size_in_bytes / 1e6:,.0f} MB")
    speed = product_speed()
    flops = _flops(compiled)
    table.add_row("speed of a matrix product", f"{speed / 1e9:,.1f} GFLOP/s")
    table.add_row("steps", f"{steps:,}")
    if flops:
        seconds = flops / speed
        table.add_row("a step", f"{flops / 1e9:,.0f} GFLOP, {seconds:.1f} s at that speed")
        table.add_row("the run", f"about {steps * seconds / 3600:.1f} h")
    console.print(table)


def _compiled(method: Method, prepared: Prepared, run: RunConfig, optimizer, steps: int):
    placement = Placement.over(run.devices, fsdp=run.fsdp)
    batch = prepared.schedule[0]
    arrays = placement.batch(batch.arrays() | method.extras(batch))
    dtype = jax.tree.leaves(method.trained)[0].dtype
    step = make_step(method.loss, optimizer, steps, dtype=dtype, seed=run.seed)
    state = placement.weights(start_state(method.trained, optimizer, steps))
    frozen = placement.everywhere(method.frozen)
    return step.lower(state, frozen, [arrays] * optimizer.accumulate).compile()


def _flops(compiled) -> float:
    """The compiler's count, 0 where it gives none; a loop's body is counted once."""
    cost = compiled.cost_analysis()
    return float((cost or {}).get("flops", 0.0))


def _bytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
