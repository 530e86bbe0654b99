"""What a verification rule is: how drafted tokens are accepted, and what follows the last one."""

import abc
from dataclasses import dataclass
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int, UInt32

from jspec.drafters.base import Drafter, Proposal
from jspec.sampling import NodeLogits
from jspec.trees import StaticTree, TreeSpec
from pallas_kernels import Walk


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """What a rule may know of each slot beside its tree.

    Attributes:
        temperature: 0 for greedy slots, [B] float32.
        keys: raw key data of the target's noise, [B, 2].
        lengths: committed tokens, [B] int32.
    """

    temperature: Float[Array, "B"]
    keys: UInt32[Array, "B 2"]
    lengths: Int[Array, "B"]


@dataclass(frozen=True)
class Rule(abc.ABC):
    """A verification rule. Greedy slots of a mixed batch are verified greedily by every rule.

    Attributes:
        name: for statistics and messages.
        lossless: emitted tokens follow the target's distribution, whatever the drafter proposes.
        reads_probabilities: it weighs a draft against what it was drawn from.
        draws: the tokens that the target adds are drawn; otherwise they are its likeliest.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    reads_probabilities: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def check(self, drafter: Drafter, tree: TreeSpec) -> None:
        """Refuse a drafter or tree that cannot feed the rule.

        Raises:
            ValueError: with the reason and what to do.
        """
        if self.reads_probabilities:
            check_draws(drafter, tree, f"verification {self.name!r}")

    @abc.abstractmethod
    def walk(
        self,
        logits: NodeLogits,
        proposal: Proposal,
        slots: Slots,
        *,
        max_path: int,
        implementation: str | None = None,
    ) -> Walk:
        """The accepted path, and the token after it.

        Args:
            logits: of the target, after the nodes of the proposal.
            proposal: what was drafted.
            slots: of the batch.
            max_path: P, the most nodes on a path.
            implementation: of the kernels.

        Returns:
            `Walk`; its bonus is NO_TOKEN where no token was possible.
        """


def check_draws(drafter: Drafter, tree: TreeSpec, wish: str) -> None:
    """Refuse a drafter that does not draw its children, or a tree they cannot be drawn in.

    Args:
        wish: what needs drawn children, for the message.

    Raises:
        ValueError: with the reason and what to do.
    """
    if not drafter.can_sample:
        raise ValueError(
            f"{wish} needs a draft that was drawn, and the drafter {drafter.name!r} does not draw "
            "its children; leave it out: its draft is verified by target sampling, which is exact "
            "for any draft."
        )
    if not isinstance(tree, StaticTree):
        if tree.topk > 1:
            raise ValueError(
                f"{wish} needs a tree of fixed shape, since pruning by what was drawn would bias "
                f"it, and TreeConfig(topk={tree.topk}) is pruned every round; give a StaticTree "
                "(chain, cartesian or from_choices), or topk=1."
            )
        return
    children: dict[tuple[int, ...], set[int]] = {}
    for path in tree.choices:
        children.setdefault(path[:-1], set()).add(path[-1])
    for parent, ranks in children.items():
        missing = sorted(set(range(len(ranks))) - ranks)
        if missing:
            raise ValueError(
                f"{wish} needs every node's first children, since a child is drawn given those "
                f"before it, and below {list(parent)} rank {missing[0]} is left out; add choice "
                f"{[*parent, missing[0]]}."
            )
