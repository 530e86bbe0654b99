"""Which tree is fastest: every sensible shape, its E and the time of its round."""

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jspec.cost.acceptance import Acceptance
from jspec.cost.drafting import DrafterShape
from jspec.cost.hardware import Hardware
from jspec.cost.passes import memory_needed, target_pass
from jspec.cost.shapes import ModelShape
from jspec.cost.speedup import RoundTime, paying_batches
from jspec.trees import MAX_NODES, TreeConfig

REST_SECONDS = 10e-6
"""Tree building, walk and commit on an accelerator, where nothing was measured: an assumption."""

STEPS = (1, 2, 3, 4, 5, 6, 7, 8)
TOPKS = (1, 2, 4, 8)
NODES = (4, 6, 8, 12, 16, 24, 32, 48, 64)
"""What `tree_grid` combines; chains have num_steps + 1 nodes instead."""


class Times(abc.ABC):
    """Where a plan takes its times from."""

    @abc.abstractmethod
    def round_time(self, tree: TreeConfig, batch: int) -> RoundTime:
        """Of one round with this tree and so many slots."""


@dataclass(frozen=True, kw_only=True)
class Roofline(Times):
    """Times on paper.

    Attributes:
        target, drafter: their shapes.
        hardware: whose peaks are used.
        context: S, committed tokens of each slot.
        dtype: of weights and products.
        rest: seconds of a round that are neither target nor drafter.
    """

    target: ModelShape
    drafter: DrafterShape
    hardware: Hardware
    context: int = 1024
    dtype: str = "bfloat16"
    rest: float = REST_SECONDS

    def verify(self, nodes: int, batch: int):
        """The target's pass over T nodes of each slot."""
        return target_pass(
            self.target, batch=batch, nodes=nodes, context=self.context, dtype=self.dtype
        )

    def round_time(self, tree: TreeConfig, batch: int) -> RoundTime:
        """Of one round; the drafter's and the target's passes run one after the other."""
        draft = self.drafter.seconds(
            self.hardware,
            num_steps=tree.num_steps,
            topk=tree.topk,
            batch=batch,
            context=self.context,
            dtype=self.dtype,
        )
        return RoundTime(
            plain=self.verify(1, batch).seconds(self.hardware),
            draft=draft,
            verify=self.verify(tree.num_nodes, batch).seconds(self.hardware),
            rest=self.rest,
        )

    @property
    def largest_batch(self) -> int:
        """Slots that fit beside the weights; the drafter's own memory is not counted."""
        weights = memory_needed(self.target, dtype=self.dtype)
        slot = memory_needed(self.target, batch=1, context=self.context, dtype=self.dtype) - weights
        room = self.hardware.memory - weights
        return max(int(room // slot), 0) if slot else 2**31 - 1

    def check_memory(self, batch: int) -> None:
        """Refuse what does not fit.

        Raises:
            ValueError: weights and caches are larger than the memory.
        """
        needed = memory_needed(self.target, batch=batch, context=self.context, dtype=self.dtype)
        if needed > self.hardware.memory:
            raise ValueError(
                f"{self.target.name} in {self.dtype} needs {needed / 1e9:,.1f} GB for weights and "
                f"caches of {batch} x {self.context} tokens, {self.hardware.name} has "
                f"{self.hardware.memory / 1e9:,.0f} GB; take more devices, or lower batch, context "
                "or dtype."
            )

    def reason(self, tree: TreeConfig, batch: int) -> str:
        """Why the verify pass costs what it costs, in a line."""
        cost, ridge = self.verify(tree.num_nodes, batch), self.hardware.ridge(self.dtype)
        plain, wide = (one.seconds(self.hardware) for one in (self.verify(1, batch), cost))
        bound = cost.bound(self.hardware)
        return (
            f"verifying {tree.num_nodes} nodes of {batch} slots does {cost.intensity:,.0f} "
            f"operations a byte, the ridge is {ridge:,.0f}: {bound}-bound, {wide / plain:.2f} of a "
            "plain step"
        )


@dataclass(frozen=True, kw_only=True)
class Option:
    """One tree and what it would do.

    Attributes:
        tree: its bounds.
        accept_length: E, bonus included.
        time: of a round.
        speedup: over plain decoding.
        tokens_per_second: of all slots together.
    """

    tree: TreeConfig
    accept_length: float
    time: RoundTime
    speedup: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All options, the fastest first.

    Attributes:
        batch: B.
        options: by falling speedup.
        plain_tokens_per_second: of all slots together, without a drafter.
    """

    batch: int
    options: tuple[Option, ...]
    plain_tokens_per_second: float

    @property
    def best(self) -> Option:
        """The fastest tree; plain decoding is faster still where its speedup is below 1."""
        return self.options[0]


def tree_grid(
    steps: Sequence[int] = STEPS,
    topks: Sequence[int] = TOPKS,
    nodes: Sequence[int] = NODES,
    *,
    max_steps: int | None = None,
    max_topk: int | None = None,
) -> Iterator[TreeConfig]:
    """Every combination that can exist and uses its levels: more nodes than levels, no more than
    there are candidates.

    Args:
        steps, topks, nodes: to be combined; a chain (topk 1) takes num_steps + 1 nodes.
        max_steps, max_topk: larger ones are left out.
    """
    for num_steps in steps:
        if max_steps is not None and num_steps > max_steps:
            continue
        for topk in topks:
            if max_topk is not None and topk > max_topk:
                continue
            if topk == 1:
                yield TreeConfig(num_steps=num_steps, topk=1)
                continue
            pool = topk + (num_steps - 1) * topk**2
            for num_nodes in nodes:
                if num_steps + 1 < num_nodes <= min(pool + 1, MAX_NODES):
                    yield TreeConfig(num_steps=num_steps, topk=topk, num_nodes=num_nodes)


def evaluate(tree: TreeConfig, times: Times, acceptance: Acceptance, batch: int) -> Option:
    """What one tree would do."""
    expected = acceptance.accept_length(tree)
    time = times.round_time(tree, batch)
    return Option(
        tree=tree,
        accept_length=expected,
        time=time,
        speedup=time.speedup(expected),
        tokens_per_second=time.tokens_per_second(expected, batch),
    )


def make_plan(
    trees: Sequence[TreeConfig], times: Times, acceptance: Acceptance, *, batch: int = 1
) -> Plan:
    """Evaluate every tree.

    Args:
        trees: at least one; see `tree_grid`.
        times: a `Roofline`, or measured.
        acceptance: by depth and rank.
        batch: B.

    Raises:
        ValueError: no tree, batch below 1, or more depths or ranks than acceptance is known for.
    """
    if batch < 1:
        raise ValueError(f"batch={batch}; expected at least 1.")
    if not trees:
        raise ValueError("no tree is left to choose from; allow more steps, topk or nodes.")
    options = [evaluate(tree, times, acceptance, batch) for tree in trees]
    # Between equally fast trees the smaller one.
    options.sort(key=lambda one: (-one.speedup, one.tree.num_nodes, one.tree.num_steps))
    return Plan(
        batch=batch,
        options=tuple(options),
        plain_tokens_per_second=batch / options[0].time.plain,
    )


def plan_paying_batches(
    trees: Sequence[TreeConfig], times: Times, acceptance: Acceptance, *, limit: int = 1024
) -> list[tuple[int, int]]:
    """Batches at which some tree pays, whatever its shape; see `paying_batches`."""
    known = [(tree, acceptance.accept_length(tree)) for tree in trees]

    def pays(batch: int) -> bool:
        return any(times.round_time(tree, batch).speedup(e) > 1 for tree, e in known)

    return paying_batches(pays, limit)
