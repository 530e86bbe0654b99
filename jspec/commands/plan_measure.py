"""`jspec plan --measure`: acceptance counted and passes timed on this machine, then a check.

What is measured is little: one chain and one tree run through the prompts for acceptance, and the
stages of a few trees timed on the state of a real generation, in turns. Everything else is between
those points.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from math import isnan
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp

from jspec.commands.bench import machine_facts, progress_bar
from jspec.commands.measure import Comparison
from jspec.commands.options import Plan as PlanOptions
from jspec.commands.options import TargetFlags
from jspec.commands.parts import encode_all, target_from
from jspec.commands.prompts import read_or_built_in
from jspec.commands.stages import StageTimer, at_tree
from jspec.cost import Acceptance, Plan, RoundTime, VerifyTimes, make_plan
from jspec.cost.acceptance import fit_siblings
from jspec.cost.planner import Times
from jspec.cost.speedup import interpolate
from jspec.drafters import Drafter, load_drafter
from jspec.engine import Engine, Stats
from jspec.engine.batch import Batch
from jspec.engine.stats import acceptance_by_depth
from jspec.sampling import SamplingParams
from jspec.trees import TreeConfig

_STAGE_RUNS = 10
"""Runs of every stage of every tree that is timed."""

_MOST_ON_CPU = 16
"""Nodes of the largest tree considered on a CPU, where a node of a verify pass is not free."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes(Times):
    """Times on this machine, for one batch.

    Attributes:
        batch: B.
        plain: seconds of a plain round, all of it.
        verify: t_V(T, B).
        drafts: draft and extend, by topk and num_steps.
        rests: the whole round without draft, verify and extend, by T.
        draft_rate: share of one slot's rounds that draft; the others take a one-token pass where
            the drafter may abstain, if all slots abstain together.
    """

    batch: int
    plain: float
    verify: VerifyTimes
    drafts: Mapping[int, Mapping[int, float]]
    rests: Mapping[int, float]
    draft_rate: float = 1.0

    def round_time(self, tree: TreeConfig, batch: int) -> RoundTime:
        """Between the trees that were timed, linear in num_steps, topk and num_nodes.

        Raises:
            ValueError: another batch, or a tree outside of what was timed.
        """
        if batch != self.batch:
            raise ValueError(f"batch={batch}; times were measured for {self.batch}.")
        by_topk = {
            topk: interpolate(levels, tree.num_steps, "the draft", "levels")
            for topk, levels in self.drafts.items()
        }
        wide = 1 - (1 - self.draft_rate) ** batch

        def mixed(times: Callable[[int], float]) -> float:
            return wide * times(tree.num_nodes) + (1 - wide) * times(1)

        return RoundTime(
            plain=self.plain,
            draft=interpolate(by_topk, tree.topk, "the draft", "children"),
            verify=mixed(self.verify),
            rest=mixed(lambda nodes: interpolate(self.rests, nodes, "a round", "nodes")),
        )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A plan from measurements, and how right it was.

    Attributes:
        plan: over all trees.
        predicted: speedup of the best tree.
        speedup: of the same tree, measured.
        accept_length: of the same tree, measured.
        heading, reason: for people.
        figures: for JSON.
    """

    plan: Plan
    predicted: float
    speedup: float
    accept_length: float
    heading: str
    reason: str
    figures: dict[str, Any]


def measure(options: PlanOptions, grid: Callable[..., list[TreeConfig]]) -> Measurement:
    """Count, time, plan, and run the best tree against plain decoding.

    Args:
        options: of the command.
        grid: the trees to choose from, up to `max_nodes`.

    Raises:
        ValueError: what cannot be used; or nothing was drafted.
    """
    flags, batch = options.measure, options.place.batch
    for name in ("repeats", "max_new_tokens"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}; expected at least 1.")
    sampling = SamplingParams(
        max_new_tokens=flags.max_new_tokens or 64, temperature=flags.temperature or 0.0, seed=0
    )
    sampled = sampling.temperature > 0
    requests = read_or_built_in(flags.prompts, flags.limit)
    options.chat.wanted()
    if len(requests) < batch:
        raise ValueError(
            f"--batch {batch} needs as many prompts, there are {len(requests)}; give more, or a "
            "smaller batch."
        )
    if options.model.drafter == "none":
        raise ValueError("--drafter none leaves nothing to plan; name a drafter such as ngram.")
    asked = grid(max_nodes=_MOST_ON_CPU if jax.default_backend() == "cpu" else None)
    target = target_from(
        TargetFlags(
            target=options.model.target,
            dtype=options.model.dtype,
            compilation_cache=options.model.compilation_cache,
        )
    )
    drafter = load_drafter(options.model.drafter, target)
    trees = [tree for tree in asked if _fits(drafter, target, tree)]
    if not trees:
        raise ValueError(f"{drafter.name} can draft none of these trees; allow other ones.")
    plain = Engine(target, None, batch_size=batch)
    prompts = encode_all(plain, requests, options.chat)

    @cache  # so that nothing is compiled twice
    def engine(tree: TreeConfig) -> Engine:
        return Engine(target, drafter, tree=tree, batch_size=batch)

    with progress_bar() as progress:
        progress("counting acceptance", 0.05)
        acceptance, counted = _count(trees, engine, prompts, sampling)
        trees = [tree for tree in trees if tree.num_steps <= len(acceptance.by_depth)]
        if not trees:
            raise ValueError(
                "no prompt was long enough to reach the depth of any tree; give more prompts, or "
                "raise --max-new-tokens."
            )
        progress("timing passes and drafts", 0.3)
        chain = engine(deepest_chain(trees))
        state = _middle(chain, prompts[:batch], sampling)
        lone = StageTimer(plain, _middle(plain, prompts[:batch], sampling), sampled=sampled)
        timers = {
            tree: StageTimer(
                engine(tree),
                at_tree(jax.tree.map(jnp.copy, state), engine(tree).round),
                sampled=sampled,
            )
            for tree in corner_trees(trees)
        }
        times, samples = _time(lone, timers, acceptance.draft_rate, batch)
        plan = make_plan(trees, times, acceptance, batch=batch)
        progress("checking the best tree", 0.7)
        check = Comparison(plain, engine(plan.best.tree), prompts, sampling, batch)
        check.measure(flags.repeats or 3, lambda stage, done: progress(stage, 0.7 + 0.3 * done))
    figures = check.figures()
    return Measurement(
        plan=plan,
        predicted=plan.best.speedup,
        speedup=figures["speedup"],
        accept_length=figures["speculative"]["accept_length"],
        heading=_heading(options, target, drafter, len(prompts)),
        reason=_reason(plan, times),
        figures={
            "settings": {
                "target": options.model.target,
                "drafter": options.model.drafter,
                "dtype": str(target.dtype),
                "batch": batch,
                "prompts": "built-in" if flags.prompts is None else str(flags.prompts),
                "limit": flags.limit,
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "chat": options.chat.wanted(),
            },
            "machine": machine_facts(),
            "acceptance": dataclasses.asdict(acceptance) | counted,
            "times": samples,
            "bench": figures,
        },
    )


def _fits(drafter: Drafter, target, tree: TreeConfig) -> bool:
    try:
        drafter.check(target, tree)
    except (ValueError, NotImplementedError):
        return False
    return True


def _count(
    trees: Sequence[TreeConfig],
    engine: Callable[[TreeConfig], Engine],
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
) -> tuple[Acceptance, dict[str, Any]]:
    """Acceptance by depth from the deepest chain, siblings from the widest tree."""
    stats = _stats(engine(deepest_chain(trees)), prompts, sampling)
    betas = tuple(takewhile(lambda beta: not isnan(beta), acceptance_by_depth(stats)))
    drafts = [drafted > 0 for one in stats for drafted in one.drafts]
    if not betas:
        raise ValueError("nothing was drafted on these prompts; there is nothing to plan with.")
    rate, counted = float(mean(drafts)), {"rounds": len(drafts), "chain_accept_length": _tau(stats)}
    siblings: tuple[float, ...] = ()
    branching = [tree for tree in trees if tree.topk > 1 and tree.num_steps <= len(betas)]
    if branching:
        widest = max(branching, key=lambda tree: (tree.topk, tree.num_nodes, tree.num_steps))
        tau = _tau(_stats(engine(widest), prompts, sampling))
        siblings = fit_siblings(betas, rate, widest, tau)
        counted |= {"tree": dataclasses.asdict(widest), "tree_accept_length": tau}
    return Acceptance(by_depth=betas, siblings=siblings, draft_rate=rate), counted


def deepest_chain(trees: Sequence[TreeConfig]) -> TreeConfig:
    """A chain as deep as any of the trees."""
    return TreeConfig(num_steps=max(tree.num_steps for tree in trees), topk=1)


def _stats(engine: Engine, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[Stats]:
    return [output.stats for output in engine.generate(list(prompts), sampling)]


def _tau(stats: Sequence[Stats]) -> float:
    return float(mean(length for one in stats for length in one.accept_lengths))


def _time(
    lone: StageTimer, timers: Mapping[TreeConfig, StageTimer], draft_rate: float, batch: int
) -> tuple[MeasuredTimes, dict[str, Any]]:
    """Stages of plain decoding and of some trees, in turns."""
    every = [lone, *timers.values()]
    for timer in every:
        timer.warm_up()
    for _ in range(_STAGE_RUNS):
        for timer in every:
            timer.run(1)
    verify, rests = {1: lone.seconds("verify", 1)}, {}
    rests[1] = lone.seconds("round", 1) - verify[1]
    drafts: dict[int, dict[int, float]] = {}
    for tree, timer in timers.items():
        wide = tree.num_nodes
        passes = {stage: timer.seconds(stage, wide) for stage in ("draft", "verify", "extend")}
        verify[wide] = passes["verify"]
        rests[wide] = timer.seconds("round", wide) - sum(passes.values())
        own = drafts.setdefault(tree.topk, {})
        own[tree.num_steps] = passes["draft"] + passes["extend"]
        if 1 in timer.widths:  # an abstaining round's own pass
            parts = sum(timer.seconds(stage, 1) for stage in ("draft", "verify", "extend"))
            rests[1] = timer.seconds("round", 1) - parts
    times = MeasuredTimes(
        batch=batch,
        plain=lone.seconds("round", 1),
        verify=VerifyTimes(verify),
        drafts=drafts,
        rests=rests,
        draft_rate=draft_rate if any(1 in timer.widths for timer in timers.values()) else 1.0,
    )
    return times, {
        "plain_seconds": times.plain,
        "verify_seconds": {str(nodes): verify[nodes] for nodes in sorted(verify)},
        "draft_seconds": {
            str(topk): {str(n): own[n] for n in sorted(own)} for topk, own in drafts.items()
        },
        "rest_seconds": {str(nodes): rests[nodes] for nodes in sorted(rests)},
    }


def corner_trees(trees: Sequence[TreeConfig]) -> list[TreeConfig]:
    """Trees whose times all others lie between: chain or narrowest, shallowest and deepest.

    For the smallest and the largest topk of `trees`, a tree of the fewest levels and few nodes, and
    one of the most levels and the most nodes that it can have.
    """
    topks = {min(tree.topk for tree in trees), max(tree.topk for tree in trees)}
    levels = {min(tree.num_steps for tree in trees), max(tree.num_steps for tree in trees)}
    most = max(tree.num_nodes for tree in trees)
    corners = []
    for topk in sorted(topks):
        for num_steps in sorted(levels):
            pool = topk + (num_steps - 1) * topk**2
            nodes = most if num_steps == max(levels) else num_steps + 2
            nodes = num_steps + 1 if topk == 1 else min(nodes, pool + 1)
            corners.append(TreeConfig(num_steps=num_steps, topk=topk, num_nodes=nodes))
    if corners[-1].num_nodes < most:
        corners.append(max(trees, key=lambda tree: (tree.num_nodes, tree.num_steps)))
    return corners


def _middle(engine: Engine, prompts: Sequence[list[int]], sampling: SamplingParams):
    """The state of a generation in its middle."""
    group = list(prompts)
    batch = Batch(engine, group, [sampling] * len(group), engine.batch_size, incremental=False)
    batch.advance(max(sampling.max_new_tokens // 4, 1))
    return batch.state


def _heading(options: PlanOptions, target, drafter: Drafter, prompts: int) -> str:
    device = jax.devices()[0].device_kind
    return (
        f"{options.model.target} ({target.num_params / 1e6:,.0f}M parameters, {target.dtype}), "
        f"drafter {drafter.name}, on {device}, batch {options.place.batch}: measured on {prompts} "
        "prompts"
    )


def _reason(plan: Plan, times: MeasuredTimes) -> str:
    best = plan.best
    nodes, rounds = best.tree.num_nodes, best.time
    said = (
        f"verifying {nodes} nodes takes {times.verify(nodes) / times.verify(1):.2f} of a one-token "
        f"pass, drafting {rounds.draft / rounds.plain:.2f} of a plain round"
    )
    if times.draft_rate < 1:
        said += f"; {100 * times.draft_rate:.0f} % of rounds draft"
    return said
