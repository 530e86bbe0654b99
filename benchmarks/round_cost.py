"""What a round costs, and where: `python benchmarks/round_cost.py [--drafter HEAD] [--quick]`.

verify       t_V(T, B): a pass of the target over T nodes of B slots, over a one-token pass
context      the same against the committed length
stages       draft, verify, accept, commit and extend of a chain and of trees
simulated    speedup at simulated τ of 1 to 6: the machinery alone, whatever the drafter is worth
masks        bytes of the tree mask in every encoding

Every time is a median of runs in turns; read the ratios. `simulated` drafts with the n-gram
drafter, which costs next to nothing.
"""

import argparse
import sys
from itertools import product
from statistics import median
from typing import Any

import jax.numpy as jnp
import numpy as np
from experiment import (
    Parts,
    decode_in_turns,
    in_turns,
    parser_of,
    picture,
    run_parts,
    table,
    verify_pass,
)

import jspec
from jspec.commands.stages import STAGES, StageTimer
from jspec.drawing import draw_lines, draw_shares
from jspec.engine.batch import Batch
from jspec.engine.prefill import capacity_bucket
from jspec.trees import build
from pallas_kernels import masks


def verify(parts: Parts, args: argparse.Namespace) -> dict[str, Any]:
    """t_V(T, B)."""
    target = parts.target
    shapes = list(product(args.batches, args.nodes))
    times = in_turns(
        {
            (batch, nodes): verify_pass(target, nodes=nodes, batch=batch, length=args.length)
            for batch, nodes in shapes
        },
        args.repeats,
    )
    ms = {shape: 1e3 * median(taken) for shape, taken in times.items()}
    ratios = {
        str(batch): {str(nodes): ms[batch, nodes] / ms[batch, 1] for nodes in args.nodes}
        for batch in args.batches
    }
    table(
        "a pass over T nodes, over a pass over one",
        ("batch", "ms of T=1", *(f"T={nodes}" for nodes in args.nodes)),
        [(str(batch), ms[batch, 1], *ratios[str(batch)].values()) for batch in args.batches],
    )
    picture(
        args,
        "verify",
        lambda: draw_lines(
            {
                f"batch {batch}": (args.nodes, list(ratios[str(batch)].values()))
                for batch in args.batches
            },
            title="cost of a verify pass",
            xlabel="nodes T",
            ylabel="time over a one-token pass",
            log_x=True,
        ),
    )
    return {
        "length": args.length,
        "ms": {str(b): {str(t): ms[b, t] for t in args.nodes} for b in args.batches},
        "ratio": ratios,
    }


def context(parts: Parts, args: argparse.Namespace) -> dict[str, Any]:
    """Cost of a pass against the committed length, for one node and for a tree."""
    target = parts.target
    widths = (1, 8)
    times = in_turns(
        {
            (length, nodes): verify_pass(
                target, nodes=nodes, length=length, capacity=capacity_bucket(length + 64)
            )
            for length, nodes in product(args.lengths, widths)
        },
        args.repeats,
    )
    shortest = min(args.lengths)
    ms = {shape: 1e3 * median(taken) for shape, taken in times.items()}
    table(
        "a pass against the committed length, batch 1",
        ("length", "ms, T=1", "ms, T=8", "T=8 over T=1"),
        [(str(n), ms[n, 1], ms[n, 8], ms[n, 8] / ms[n, 1]) for n in args.lengths],
    )
    picture(
        args,
        "context",
        lambda: draw_lines(
            {
                f"T={nodes}": (args.lengths, [ms[n, nodes] / ms[shortest, 1] for n in args.lengths])
                for nodes in widths
            },
            title="cost of a verify pass by context",
            xlabel="committed tokens",
            ylabel=f"time over T=1 at {shortest}",
            log_x=True,
        ),
    )
    return {"ms": {str(n): {str(t): ms[n, t] for t in widths} for n in args.lengths}}


def stages(parts: Parts, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of every stage of a round, and the draft's share."""
    target, drafter, prompts = parts
    shapes = {
        "chain T=6": jspec.TreeConfig(num_steps=5, topk=1),
        "tree T=8": jspec.TreeConfig(num_steps=5, topk=4, num_nodes=8),
        "tree T=32": jspec.TreeConfig(num_steps=5, topk=4, num_nodes=32),
    }
    sampling = jspec.SamplingParams(max_new_tokens=32, ignore_eos=True)
    timers = {}
    for name, tree in shapes.items():
        engine = jspec.Engine(target, drafter, tree=tree, batch_size=1)
        batch = Batch(engine, prompts[:1], [sampling], 1, incremental=False)
        batch.advance(2)
        timers[name] = StageTimer(engine, batch.state, sampled=False)
        timers[name].warm_up()
    for _ in range(args.repeats):
        for timer in timers.values():
            timer.run(1)
    ms = {
        name: {stage: 1e3 * timer.seconds(stage, timer.widths[-1]) for stage in (*STAGES, "round")}
        for name, timer in timers.items()
    }
    shares = {
        name: (one["draft"] + one["extend"]) / sum(one[stage] for stage in STAGES)
        for name, one in ms.items()
    }
    table(
        "one round, ms (each stage run on its own), batch 1",
        ("shape", *STAGES, "round", "draft share"),
        [(name, *one.values(), shares[name]) for name, one in ms.items()],
    )
    pieces = {name: {stage: one[stage] for stage in STAGES} for name, one in ms.items()}
    picture(args, "stages", lambda: draw_shares(pieces, title="one round", xlabel="ms, batch 1"))
    return {"drafter": drafter.description, "ms": ms, "draft_share": shares}


def simulated(parts: Parts, args: argparse.Namespace) -> dict[str, Any]:
    """Speedup over plain decoding where the number of accepted tokens is given."""
    target, _, prompts = parts
    tree = jspec.TreeConfig(num_steps=5, topk=1)
    engines = {"plain": jspec.Engine(target, batch_size=1)} | {
        str(length): jspec.Engine(
            target, "ngram", tree=tree, batch_size=1, simulate_accept_length=float(length)
        )
        for length in range(1, tree.path_width + 1)
    }
    found = decode_in_turns(engines, prompts[: args.texts], args.new_tokens, args.repeats)
    plain = found["plain"]["tokens_per_second"]
    lengths = [int(name) for name in engines if name != "plain"]
    speedups = [found[str(length)]["tokens_per_second"] / plain for length in lengths]
    # One pass of T nodes instead of one: what the machinery adds would bend this line.
    cost = [length / speedup for length, speedup in zip(lengths, speedups)]
    table(
        f"simulated acceptance on a chain of {tree.num_steps} (T={tree.num_nodes}), batch 1",
        ("τ asked", "τ", "speedup", "round over a plain round"),
        [
            (str(n), found[str(n)]["accept_length"], s, c)
            for n, s, c in zip(lengths, speedups, cost)
        ],
    )
    picture(
        args,
        "simulated",
        lambda: draw_lines(
            {
                "measured": (lengths, speedups),
                "a verify pass as cheap as a plain one": (lengths, lengths),
            },
            title="simulated acceptance: the machinery alone",
            xlabel="τ, tokens a round",
            ylabel="speedup over plain decoding",
        ),
    )
    return {
        "num_nodes": tree.num_nodes,
        "speedup": {str(n): s for n, s in zip(lengths, speedups)},
        "round_over_plain_round": {str(n): c for n, c in zip(lengths, cost)},
        "runs": found,
    }


def mask_sizes(parts: Parts, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of the arrays themselves, made by the conversions that parity tests use."""
    rows = []
    for batch, prefix, nodes in product((1, 64), args.lengths, (8, 32)):
        parent = jnp.broadcast_to(jnp.arange(-1, nodes - 1, dtype=jnp.int32), (batch, nodes))
        token = jnp.zeros((batch, nodes), jnp.int32)
        tree = build(token, parent, jnp.ones((batch, nodes), bool))
        full = masks.to_full(tree.ancestors, jnp.full((batch,), prefix, jnp.int32))
        rows.append(
            {
                "batch": batch,
                "prefix": prefix,
                "nodes": nodes,
                "full": full.nbytes,
                "qlen_only": np.asarray(masks.to_qlen_only(tree.ancestors)).nbytes,
                "packed": np.asarray(masks.to_packed(tree.ancestors)).nbytes,
                "words": np.asarray(tree.ancestors).nbytes,
            }
        )
    table(
        "bytes of a tree mask (words: what the engine keeps)",
        tuple(rows[0]),
        [tuple(f"{value:,}" for value in row.values()) for row in rows],
    )
    shown = [row for row in rows if row["nodes"] == 8]

    def draw():
        chart = draw_lines(
            {
                f"{kind}, batch {batch}": (
                    list(args.lengths),
                    [row[kind] for row in shown if row["batch"] == batch],
                )
                for kind in ("full", "words")
                for batch in (1, 64)
            },
            title="bytes of a tree mask, 8 nodes",
            xlabel="committed tokens",
            ylabel="bytes",
            log_x=True,
        )
        chart.axes.set_yscale("log")
        return chart

    picture(args, "masks", draw)
    return {"rows": rows}


def main() -> int:
    """Run the parts and write the figures."""
    parser = parser_of(__doc__ or "", "round-cost")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 512, 2048, 4096])
    parser.add_argument("--length", type=int, default=400, help="committed tokens, for verify")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    if args.quick:
        args.nodes, args.batches, args.lengths = [1, 2, 4], [1, 2], [32, 64]
        args.length, args.texts, args.new_tokens, args.repeats = 32, 1, 8, 2
    if 1 not in args.nodes:
        parser.error("--nodes needs 1, which the others are compared with")
    experiments = {
        "verify": verify,
        "context": context,
        "stages": stages,
        "simulated": simulated,
        "masks": mask_sizes,
    }
    run_parts(experiments, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
