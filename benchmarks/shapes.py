"""What shape of draft is worth what: `python benchmarks/shapes.py [--drafter HEAD] [--quick]`.

chain_or_tree  speed and τ of a chain of 5 levels (T=6) and of trees as deep (topk 4, T=8 and wider)
               at several batch sizes, with plain decoding, in turns
same_rounds    the same shapes, and static trees of equal size, drafting at every position of the
               same texts: what each would have been accepted there
heads          acceptance by depth of every head in --heads, at every position of its own texts

In same_rounds the text moves on by one token whatever was accepted, so every shape drafts from the
same states. There a chain must not beat a tree of more nodes in τ, and a tree must not lose to a
smaller one that it contains in any single round (a dynamic tree contains every smaller one of its
depth and topk); if one of these fails the command says where and exits with 1.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from experiment import Parts, decode_in_turns, parser_of, picture, run_parts, table

import jspec
from jspec.drafters import Drafter
from jspec.drafters.shipped import shipped_heads
from jspec.drawing import draw_acceptance, draw_lines
from jspec.engine.batch import Batch
from jspec.engine.state import LastRound
from jspec.engine.stats import Stats, acceptance_by_depth
from jspec.engine.step import Round
from jspec.targets import Target
from jspec.trees import TreeSpec, cartesian
from jspec.trees.search import best_tree
from pallas_kernels import Walk

STEPS, TOPK = 5, 4
"""Depth of every shape, and children kept a node in the dynamic trees."""

RANKS = 8
"""Siblings looked at to find the best static tree."""


class EveryPosition(Round):
    """A round that moves on by the target's own token, whatever was accepted.

    The path is kept as the last round's, so that it can be read; the next draft starts one token
    later, from the state that plain decoding has there.
    """

    def commit(self, state, tree, logits, passed, walk):
        drafted = jnp.take_along_axis(tree.token, walk.path[:, 1:2], axis=1)[:, 0]
        own = jnp.where(walk.length > 1, drafted, walk.bonus)
        one = Walk(jnp.zeros_like(walk.path), jnp.ones_like(walk.length), own)
        moved, rows, correct = super().commit(state, tree, logits, passed, one)
        last = LastRound(tree, walk.path, jnp.where(state.active, walk.length, 0))
        return dataclasses.replace(moved, last=last), rows, correct


@dataclass(frozen=True)
class Rounds:
    """What was accepted at every position.

    Attributes:
        correct: drafted tokens accepted, [rounds] int.
        first: node id of the accepted child of the root, 0 for none, [rounds] int.
    """

    correct: np.ndarray
    first: np.ndarray

    @property
    def accept_length(self) -> float:
        """τ, bonus included."""
        return 1 + float(self.correct.mean())

    def by_depth(self, num_steps: int) -> list[float]:
        """β at each depth, among the rounds that reached it; NaN where none did."""
        count = len(self.correct)
        stats = Stats(
            accept_lengths=[1] * count,
            corrects=self.correct.tolist(),
            drafts=[num_steps] * count,
            num_steps=num_steps,
            drafter="",
            rule="",
        )
        return acceptance_by_depth([stats])


def every_position(
    target: Target,
    drafter: Drafter,
    tree: TreeSpec,
    prompts: Sequence[list[int]],
    new_tokens: int,
) -> Rounds:
    """Draft and verify at every position of the target's greedy texts."""
    engine = jspec.Engine(target, drafter, tree=tree, batch_size=len(prompts))
    plain = engine.round
    engine.round = EveryPosition(
        **{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
    )
    sampling = jspec.SamplingParams(max_new_tokens=new_tokens + 1, ignore_eos=True)
    batch = Batch(engine, list(prompts), [sampling] * len(prompts), len(prompts), incremental=False)
    correct, first = [], []
    while batch.running:
        batch.advance(1)
        last = jax.device_get(batch.state.last)
        took_part = last.path_length > 0
        correct.append((last.path_length - 1)[took_part])
        first.append(np.where(last.path_length > 1, last.path[:, 1], 0)[took_part])
    return Rounds(np.concatenate(correct), np.concatenate(first))


def chain_or_tree(parts: Parts, args: argparse.Namespace) -> dict[str, Any]:
    """Speeds and τ by batch size."""
    target, drafter, prompts = parts
    figures: dict[str, Any] = {"num_steps": STEPS, "topk": TOPK, "by_batch": {}}
    for batch in args.batches:
        engines = {"plain": jspec.Engine(target, batch_size=batch)} | {
            name: jspec.Engine(target, drafter, tree=tree, batch_size=batch)
            for name, tree in dynamic_shapes(args.nodes).items()
        }
        group = [prompts[i % len(prompts)] for i in range(max(batch, args.texts))]
        found = decode_in_turns(engines, group, args.new_tokens, args.repeats)
        plain = found["plain"]["tokens_per_second"]
        for one in found.values():
            one["speedup"] = one["tokens_per_second"] / plain
        figures["by_batch"][str(batch)] = found
        table(
            f"batch {batch}, {len(group)} texts of {args.new_tokens} tokens",
            ("shape", "τ", "tokens/s", "speedup"),
            [
                (n, f["accept_length"], f["tokens_per_second"], f["speedup"])
                for n, f in found.items()
            ],
        )
    figures["tree_ahead_of_chain"] = ahead = {
        batch: max((f["speedup"], name) for name, f in found.items() if name.startswith("tree"))[0]
        / next(f["speedup"] for name, f in found.items() if name.startswith("chain"))
        for batch, found in figures["by_batch"].items()
    }
    for batch, ratio in ahead.items():
        print(f"batch {batch}: the best tree is {ratio:.2f} times as fast as the chain")
    names = [name for name in figures["by_batch"][str(args.batches[0])] if name != "plain"]

    def draw():
        series = {
            name: (
                list(args.batches),
                [figures["by_batch"][str(batch)][name]["speedup"] for batch in args.batches],
            )
            for name in names
        }
        return draw_lines(
            series,
            title=f"chain or tree, {STEPS} levels",
            xlabel="batch",
            ylabel="speedup over plain decoding",
            log_x=True,
        )

    picture(args, "speedup", draw)
    return figures


def same_rounds(parts: Parts, args: argparse.Namespace) -> dict[str, Any]:
    """τ of dynamic and static shapes at the same positions, and whether they are in order."""
    target, drafter, prompts = parts
    prompts = prompts[: args.texts]

    def run(tree: TreeSpec) -> Rounds:
        return every_position(target, drafter, tree, prompts, args.new_tokens)

    shapes = dynamic_shapes(args.nodes)
    seen = {name: run(tree) for name, tree in shapes.items()}
    accuracies = estimate_accuracies(seen[f"chain T={STEPS + 1}"], run(cartesian([RANKS])))
    static = {f"static T={nodes}": best_tree(accuracies, nodes) for nodes in args.nodes}
    seen |= {name: run(tree) for name, tree in static.items()}
    sizes = {name: tree.num_nodes for name, tree in (shapes | static).items()}
    faults = faults_of(seen, sizes, contained_of(shapes, static))
    table(
        f"the same {len(seen[f'chain T={STEPS + 1}'].correct)} positions",
        ("shape", "nodes", "τ", "deeper than the chain", "less deep"),
        [
            (
                name,
                sizes[name],
                rounds.accept_length,
                int((rounds.correct > seen[f"chain T={STEPS + 1}"].correct).sum()),
                int((rounds.correct < seen[f"chain T={STEPS + 1}"].correct).sum()),
            )
            for name, rounds in seen.items()
        ],
    )
    print(
        "\n".join(faults)
        if faults
        else "no chain beats a tree of more nodes, no tree one it contains"
    )
    picture(args, "equal-nodes", partial(draw_equal_nodes, seen, args.nodes))
    return {
        "rounds": len(seen[f"chain T={STEPS + 1}"].correct),
        "accept_length": {name: rounds.accept_length for name, rounds in seen.items()},
        "static_choices": {name: [list(path) for path in t.choices] for name, t in static.items()},
        "accuracies": accuracies.tolist(),
        "faults": faults,
    }


def dynamic_shapes(nodes: Sequence[int]) -> dict[str, TreeSpec]:
    """The chain and the trees of STEPS levels."""
    trees = {
        f"tree T={n}": jspec.TreeConfig(num_steps=STEPS, topk=TOPK, num_nodes=n) for n in nodes
    }
    return {f"chain T={STEPS + 1}": jspec.TreeConfig(num_steps=STEPS, topk=1), **trees}


def estimate_accuracies(chain: Rounds, siblings: Rounds) -> np.ndarray:
    """[L, R]: how often the guess of rank r at depth l + 1 is right, for `best_tree`.

    The ranks are counted at depth 1. Deeper ones are taken to fall off like the chain does, since
    a chain is all that shows them: β_l / β_1 of the counts.
    """
    ranks = np.asarray([(siblings.first == node).mean() for node in range(1, RANKS + 1)])
    betas = np.nan_to_num(np.asarray(chain.by_depth(STEPS)))
    falls = betas / betas[0] if betas[0] else np.zeros(STEPS)
    return np.clip(falls[:, None] * ranks[None, :], 0.0, 1.0)


def contained_of(
    shapes: Mapping[str, TreeSpec], static: Mapping[str, jspec.StaticTree]
) -> list[tuple[str, str]]:
    """Pairs (smaller, larger) where the larger tree has every node of the smaller, every round."""
    pairs = [
        (small, large)
        for small, large in combinations([n for n in shapes if n.startswith("tree")], 2)
    ]
    chain = {(0,) * depth for depth in range(1, STEPS + 1)}
    pairs += [
        (f"chain T={STEPS + 1}", name)
        for name, tree in static.items()
        if chain <= set(tree.choices)
    ]
    return pairs + [
        (small, large)
        for small, large in combinations(static, 2)
        if set(static[small].choices) <= set(static[large].choices)
    ]


def faults_of(
    seen: Mapping[str, Rounds], sizes: Mapping[str, int], contained: Sequence[tuple[str, str]]
) -> list[str]:
    """What must not be: see the top of this file."""
    faults = []
    for small, large in contained:
        worse = int((seen[large].correct < seen[small].correct).sum())
        if worse:
            faults.append(f"{large} contains {small} and accepted less in {worse} rounds")
    for chain in (name for name in seen if name.startswith("chain")):
        for name, rounds in seen.items():
            if sizes[name] > sizes[chain] and rounds.accept_length < seen[chain].accept_length:
                faults.append(
                    f"{chain} beats {name}: τ {seen[chain].accept_length:.3f} against "
                    f"{rounds.accept_length:.3f}"
                )
    return faults


def draw_equal_nodes(seen: Mapping[str, Rounds], nodes: Sequence[int]):
    """τ over T, a line for dynamic and one for static trees, the chain as a point."""

    def line(kind: str) -> tuple[list[int], list[float]]:
        return list(nodes), [seen[f"{kind} T={n}"].accept_length for n in nodes]

    chain = f"chain T={STEPS + 1}"
    return draw_lines(
        {
            "chosen every round": line("tree"),
            "static": line("static"),
            "chain": ([STEPS + 1], [seen[chain].accept_length]),
        },
        title="τ at equal nodes, the same rounds",
        xlabel="nodes verified a round",
        ylabel="τ, tokens a round",
        log_x=True,
    )


def heads(parts: Parts, args: argparse.Namespace) -> dict[str, Any]:
    """Acceptance by depth of each head's chain."""
    target, drafter, prompts = parts
    named = {"noisy copy": drafter} if args.quick else {}
    named |= {name: jspec.load_drafter(name, target) for name in args.heads}
    figures: dict[str, Any] = {}
    for name, one in named.items():
        deepest = min(STEPS, one.default_tree().num_steps)
        tree = jspec.TreeConfig(num_steps=deepest, topk=1)
        rounds = every_position(target, one, tree, prompts[: args.texts], args.new_tokens)
        figures[name] = {
            "description": one.description,
            "rounds": len(rounds.correct),
            "accept_length": rounds.accept_length,
            "by_depth": rounds.by_depth(deepest),
        }
    table(
        "acceptance by depth, at every position",
        ("head", "τ", *(f"depth {depth}" for depth in range(1, STEPS + 1))),
        [
            (
                n,
                f["accept_length"],
                *f["by_depth"],
                *["" for _ in range(STEPS - len(f["by_depth"]))],
            )
            for n, f in figures.items()
        ],
    )
    picture(args, "heads", lambda: draw_acceptance({n: f["by_depth"] for n, f in figures.items()}))
    return figures


def main() -> int:
    """Run the parts and write the figures."""
    parser = parser_of(__doc__ or "", "shapes")
    parser.add_argument("--heads", nargs="*", help="to compare; default all shipped ones")
    parser.add_argument("--nodes", type=int, nargs="*", default=[8, 16, 32])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    if args.quick:
        args.batches, args.texts, args.new_tokens, args.repeats = [1, 2], 2, 12, 1
        args.nodes = args.nodes[:2]
        args.heads = args.heads or []
    args.heads = list(shipped_heads()) if args.heads is None else args.heads
    experiments = {
        "chain_or_tree": chain_or_tree,
        "same_rounds": same_rounds,
        "heads": heads,
    }
    figures = run_parts(experiments, args)
    return int(bool(figures.get("same_rounds", {}).get("faults")))


if __name__ == "__main__":
    sys.exit(main())
