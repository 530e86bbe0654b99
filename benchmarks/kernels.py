"""Tree attention on a GPU: correctness, time, bytes and share of the copy bandwidth.

    python benchmarks/kernels.py                  # on a GPU, under 5 minutes
    python benchmarks/kernels.py --compile-only   # without one: registers, spills, shared memory

Both print a table and write one JSON. The first compares the kernel with XLA's attention under an
explicit mask and with `jax.nn.dot_product_attention` at Llama-3-8B's shapes, for trees of 1, 8, 16
and 64 nodes; the aims are 80 % of the measured copy bandwidth from 8k columns on, and 8 nodes for
at most 1.1 times the time of one.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from pallas_kernels import dispatch, masks, timing, tree_attention, tune
from pallas_kernels.compile_cases import SHARED_LIMIT, compile_cases
from pallas_kernels.compile_report import compile_kernels, unavailable
from pallas_kernels.tree_attention.heuristic import choose_config
from pallas_kernels.tree_attention.traffic import bytes_moved

RESULTS = Path(__file__).parent / "results"
HEADS, KV_HEADS, DIM, DTYPE = 32, 8, 128, "bfloat16"
ARCHITECTURES = (80, 90)
# What a baseline's logits may take; beyond it the row says that it was left out.
MOST_LOGITS = 8 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        compile_only: print the resource table; needs no GPU.
        nodes: tree sizes, the root included.
        context: committed columns of every slot.
        batch: slots.
        budget: seconds after which remaining rows are reported as left out.
        out: the JSON; None takes its place under benchmarks/results.
    """

    compile_only: bool = False
    nodes: tuple[int, ...] = (1, 8, 16, 64)
    context: tuple[int, ...] = (512, 2048, 8192, 32768)
    batch: tuple[int, ...] = (1, 8, 64)
    budget: float = 270.0
    out: Path | None = None


def report_resources(out: Path) -> int:
    """Compiles every kernel for every architecture; prints and writes the table."""
    reason = unavailable()
    if reason:
        print(f"kernels: cannot compile without a GPU here: {reason}", file=sys.stderr)
        return 2
    header = ("kernel", "sm", "warps", "registers", "spill B", "shared KB", "mma")
    rows: list[dict[str, Any]] = []
    table: list[tuple[str, ...]] = [header]
    for case, arch in itertools.product(compile_cases(), ARCHITECTURES):
        for report in compile_kernels(case.function, *case.args, arch=arch):
            rows.append({"case": case.name, "bounded": case.bounded, **dataclasses.asdict(report)})
            table.append(
                (
                    case.name,
                    str(arch),
                    str(report.num_warps),
                    str(report.registers),
                    str(report.spill_bytes),
                    f"{report.shared_bytes / 1024:.1f}",
                    str(report.mma),
                )
            )
            print("  ".join(table[-1]), file=sys.stderr)
    broken = [
        row["case"]
        for row in rows
        if row["bounded"] and (row["spill_bytes"] or row["shared_bytes"] > SHARED_LIMIT)
    ]
    text = "\n".join(
        ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        + ["| " + " | ".join(row) + " |" for row in table[1:]]
    )
    print(text)
    from importlib.metadata import version

    versions = {"jax": jax.__version__, "triton": version("triton")}
    write(out, {"versions": versions, "shared_limit": SHARED_LIMIT, "kernels": rows})
    out.with_suffix(".md").write_text(
        "# What the kernels take on a GPU\n\n"
        "Compiled without one by `python benchmarks/kernels.py --compile-only` "
        f"(JAX {versions['jax']}, triton {versions['triton']}); none of this has been run on a "
        "GPU. Promised at the default config: no spills and at most "
        f"{SHARED_LIMIT // 1024} KB of shared memory up to head dim 128 "
        "(more than 128 rows are split over the grid).\n\n" + text + "\n"
    )
    if broken:
        print(f"kernels: beyond their promised resources: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def explicit_mask(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attention as XLA compiles it from einsums: [B, T, S + T] mask, grouped heads."""
    batch, nodes = q.shape[:2]
    q = q.reshape(batch, nodes, KV_HEADS, HEADS // KV_HEADS, DIM)
    logits = jnp.einsum("btkgd,bskd->bktgs", q, k, preferred_element_type=jnp.float32)
    logits = jnp.where(mask[:, None, :, None, :], logits * DIM**-0.5, -1e30)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    out = jnp.einsum("bktgs,bskd->btkgd", weights, v)
    return out.reshape(batch, nodes, HEADS, DIM)


def dot_product(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """The same through JAX's public function."""
    with jax.numpy_dtype_promotion("standard"):  # it mixes dtypes inside
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def kernel(q: Any, *rest: Any) -> Any:
    """The compiled kernel."""
    return tree_attention(q, *rest, implementation="triton")


def baseline_operands(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(k, v, mask) over prefix and tree columns, as a baseline wants them."""
    _, k_cache, v_cache, lengths, k_tree, v_tree, bits = args
    batch, nodes = bits.shape[:2]
    prefix = jnp.arange(k_cache.shape[1], dtype=jnp.int32)[None, None, :] < lengths[:, None, None]
    prefix = jnp.broadcast_to(prefix, (batch, nodes, k_cache.shape[1]))
    return (
        jnp.concatenate([k_cache, k_tree], axis=1),
        jnp.concatenate([v_cache, v_tree], axis=1),
        jnp.concatenate([prefix, masks.to_qlen_only(bits)], axis=2),
    )


METHODS: dict[str, Callable[..., Any]] = {
    "kernel": kernel,
    "xla_explicit_mask": explicit_mask,
    "dot_product_attention": dot_product,
}


def copies(batch: int, context: int) -> int:
    """Operand sets to rotate through, so that no cache on the chip holds the next call's."""
    size = 2 * batch * context * KV_HEADS * DIM * 2
    return max(1, min(16, (256 << 20) // size))


def make_operands(method: str, batch: int, nodes: int, context: int) -> tuple[Any, Any]:
    """(q, the rest) of one call; traceable."""
    args = tune.inputs(
        batch=batch,
        nodes=nodes,
        capacity=context,
        heads=HEADS,
        kv_heads=KV_HEADS,
        dim=DIM,
        dtype=DTYPE,
    )
    return args[0], args[1:] if method == "kernel" else baseline_operands(args)


def measure_copy() -> float:
    """Bytes per second of reading one large array and writing another."""
    source = jnp.ones((1 << 29,), jnp.bfloat16)
    loop = timing.compiled_loop(lambda x, y: y + x[0], source, [(source,)])
    return 2 * source.nbytes / timing.seconds_per_call(loop, source, [(source,)])


def check(batch: int, nodes: int, context: int) -> float:
    """The kernel's largest error in bfloat16 against float32, relative to the largest output."""
    operands = functools.partial(make_operands, "kernel", batch, nodes, context)
    q, rest = jax.jit(operands)()
    got = jax.jit(kernel)(q, *rest)

    def exact(*args: Any) -> Any:
        last = [x[-1:] for x in args]  # one slot: float32 copies of all of them may not fit
        last = [x.astype(jnp.float32) if x.dtype == q.dtype else x for x in last]
        with jax.default_matmul_precision("highest"):
            return tree_attention(*last, implementation="xla")

    want = jax.jit(exact)(q, *rest)
    return float(jnp.abs(got[-1:].astype(jnp.float32) - want).max() / jnp.abs(want).max())


def measure(options: Options) -> Iterator[dict[str, Any]]:
    """One row per shape and method; a row that was left out says why."""
    deadline = time.monotonic() + options.budget
    copy = measure_copy()
    yield {"method": "copy", "gb_per_s": copy / 1e9}
    shapes = list(itertools.product(options.context, options.batch, options.nodes))
    plan = [(m, b, t, s) for m in METHODS for s, b, t in shapes if fits(m, b, t, s)]

    def compiled(method: str, batch: int, nodes: int, context: int) -> Any:
        operands = functools.partial(make_operands, method, batch, nodes, context)
        first, rest = jax.eval_shape(operands)
        return timing.compiled_loop(METHODS[method], first, [rest] * copies(batch, context))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        loops = {row: pool.submit(compiled, *row) for row in plan}
        for method, (context, batch, nodes) in itertools.product(METHODS, shapes):
            row: dict[str, Any] = {
                "method": method,
                "nodes": nodes,
                "context": context,
                "batch": batch,
            }
            key = (method, batch, nodes, context)
            if key not in loops:
                yield row | {"left_out": "its logits would not fit"}
                continue
            if time.monotonic() > deadline:
                loops[key].cancel()
                yield row | {"left_out": f"the time budget of {options.budget:g} s is spent"}
                continue
            try:
                yield row | timed(loops[key].result(), key, copy)
            except jax.errors.JaxRuntimeError as error:
                yield row | {"left_out": str(error).splitlines()[0]}


def timed(loop: Any, key: tuple[str, int, int, int], copy: float) -> dict[str, Any]:
    """Time, bytes and bandwidth of one row."""
    method, batch, nodes, context = key
    operands = jax.jit(functools.partial(make_operands, method, batch, nodes, context))
    sets = [operands() for _ in range(copies(batch, context))]
    seconds = timing.seconds_per_call(loop, sets[0][0], [rest for _, rest in sets])
    config = choose_config(
        batch=batch,
        rows=nodes * HEADS // KV_HEADS,
        capacity=context,
        kv_heads=KV_HEADS,
        dim=DIM,
        dtype=DTYPE,
    )
    traffic = bytes_moved(
        batch=batch,
        queries=nodes,
        nodes=nodes,
        committed=batch * context,
        heads=HEADS,
        kv_heads=KV_HEADS,
        dim=DIM,
        itemsize=2,
        splits=config.splits if method == "kernel" else 1,
    )
    # Every method is charged the same useful bytes; partial results are the kernel's own affair.
    useful = traffic.total - traffic.partials
    row = {
        "seconds": seconds,
        "bytes": useful,
        "mask_bytes": traffic.mask if method == "kernel" else batch * nodes * (context + nodes),
        "gb_per_s": useful / seconds / 1e9,
        "share_of_copy": useful / seconds / copy,
    }
    if method == "kernel":
        row |= {"partial_bytes": traffic.partials, "config": dataclasses.asdict(config)}
        row["relative_error"] = check(batch, nodes, context)
    return row


def fits(method: str, batch: int, nodes: int, context: int) -> bool:
    """Whether a baseline's logits are affordable; the kernel never writes any."""
    return method == "kernel" or batch * HEADS * nodes * (context + nodes) * 4 <= MOST_LOGITS


def aims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the kernel's rows say about the two aims."""
    done = {
        (r["context"], r["batch"], r["nodes"]): r
        for r in rows
        if r["method"] == "kernel" and "seconds" in r
    }
    long = [r["share_of_copy"] for (context, *_), r in done.items() if context >= 8192]
    ratios = [
        row["seconds"] / done[context, batch, 1]["seconds"]
        for (context, batch, nodes), row in done.items()
        if nodes == 8 and context >= 8192 and (context, batch, 1) in done
    ]
    return {
        "least_share_of_copy_from_8k": min(long, default=None),
        "most_time_of_8_nodes_over_1_from_8k": max(ratios, default=None),
    }


def line(row: dict[str, Any]) -> str:
    """One row of the printed table."""
    if row["method"] == "copy":
        return f"copy bandwidth {row['gb_per_s']:.0f} GB/s"
    name = f"{row['method']:22} B={row['batch']:<3} S={row['context']:<6} T={row['nodes']:<3}"
    if "left_out" in row:
        return f"{name} left out: {row['left_out']}"
    error = f"  error {row['relative_error']:.1e}" if "relative_error" in row else ""
    return (
        f"{name} {row['seconds'] * 1e6:9.1f} us  {row['bytes'] / 1e6:9.1f} MB  "
        f"mask {row['mask_bytes']:>9} B  {row['gb_per_s']:7.0f} GB/s  "
        f"{row['share_of_copy']:5.0%}{error}"
    )


def write(path: Path, content: dict[str, Any]) -> None:
    """The one JSON of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def main(options: Options) -> int:
    """Runs one of the two reports; returns the exit code."""
    if options.compile_only:
        return report_resources(options.out or RESULTS / "kernels-compile.json")
    if not dispatch.default_is_cuda():
        print(
            f"kernels: needs a CUDA GPU, found the {jax.default_backend()!r} backend; "
            "--compile-only works without one",
            file=sys.stderr,
        )
        return 2
    rows = []
    for row in measure(options):
        rows.append(row)
        print(line(row), flush=True)
    summary = aims(rows)
    print(json.dumps(summary))
    device = jax.devices()[0].device_kind
    content = {"device": device, "jax": jax.__version__, "aims": summary, "rows": rows}
    write(options.out or RESULTS / "kernels-gpu.json", content)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
