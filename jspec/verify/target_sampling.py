"""Target sampling: draw the target's token first, then see whether it was drafted."""

from typing import ClassVar

from jaxtyping import Array, Float, Int

from jspec.drafters.base import Proposal
from jspec.sampling import choose_tokens
from jspec.verify.rule import Rule, Slots
from pallas_kernels import Walk, greedy_walk


class TargetSampling(Rule):
    """At each node draw y from the target's distribution p there; descend if a child is y.

    Lossless for any tree chosen without knowledge of the draws: y is emitted whether or not it was
    drafted, and y ~ p. The tree only decides whether the walk can go on to a node where the next
    distribution is known already. By induction along the path, the emitted tokens are distributed
    as plain sampling's; and since a draw is keyed by its position, they are the same tokens.

    It accepts a child with probability p(child): as often as any rule can for a draft that is the
    same every time (a point mass q has Σ min(p, q) = p(child)), less often than rejection sampling
    for one that was drawn. At temperature 0 it is greedy verification.

    This is the draw-once form of EAGLE's `evaluate_posterior` and of SGLang's target-only
    sampling, which test the children one after another.
    """

    name: ClassVar[str] = "target-sampling"
    lossless: ClassVar[bool] = True

    def judge(
        self, logits: Float[Array, "B T V"], slots: Slots, depth: Int[Array, "B T"]
    ) -> Int[Array, "B T"]:
        """The token after every node."""
        positions = slots.lengths[:, None] + depth + 1
        return choose_tokens(logits, slots.temperature, slots.keys, positions, sampled=True)

    def walk(
        self,
        judged: Int[Array, "B T"],
        proposal: Proposal,
        slots: Slots,
        *,
        max_path: int,
        implementation: str | None = None,
    ) -> Walk:
        tree = proposal.tree
        return greedy_walk(
            tree.token,
            (tree.parent, tree.links.first_child, tree.links.next_sibling),
            judged,
            max_path=max_path,
            implementation=implementation,
        )


class Greedy(TargetSampling):
    """Target sampling of a batch in which nothing is drawn: the draw is the likeliest token."""

    def judge(
        self, logits: Float[Array, "B T V"], slots: Slots, depth: Int[Array, "B T"]
    ) -> Int[Array, "B T"]:
        """The likeliest token after every node."""
        positions = slots.lengths[:, None] + depth + 1
        return choose_tokens(logits, slots.temperature, slots.keys, positions, sampled=False)
