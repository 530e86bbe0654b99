"""Target sampling: draw the target's token first, then see whether it was drafted."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jspec.drafters.base import Proposal
from jspec.sampling import NodeLogits, choose_tokens, likeliest
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

    def walk(
        self,
        logits: NodeLogits,
        proposal: Proposal,
        slots: Slots,
        *,
        max_path: int,
        implementation: str | None = None,
    ) -> Walk:
        """Node by node: a slot draws where it stands, until a draw is no child."""
        tree = proposal.tree
        batch = tree.token.shape[0]
        place = jnp.arange(max_path, dtype=jnp.int32)[None, :]

        def descend(carry: Any) -> Any:
            node, path, length, _, going = carry
            drawn = choose_tokens(
                logits.at(node)[:, None],
                slots.temperature,
                slots.keys,
                (slots.lengths + length)[:, None],
                sampled=True,
            )
            hit = (tree.parent == node[:, None]) & (tree.token == drawn)
            going = going & hit.any(axis=1) & (length < max_path)
            node = jnp.where(going, jnp.argmax(hit, axis=1).astype(jnp.int32), node)
            path = jnp.where(going[:, None] & (place >= length[:, None]), node[:, None], path)
            # A slot that has stopped stays where it is, and draws the same token again.
            return node, path, length + going.astype(jnp.int32), drawn[:, 0], going

        root = jnp.zeros((batch,), jnp.int32)
        path = jnp.zeros((batch, max_path), jnp.int32)
        start = (root, path, root + 1, root, jnp.ones((batch,), bool))
        _, path, length, bonus, _ = jax.lax.while_loop(
            lambda carry: carry[-1].any(), descend, start
        )
        return Walk(path, length, bonus)


class Greedy(TargetSampling):
    """Target sampling of a batch in which nothing is drawn: the draw is the likeliest token.

    That costs so little that it is taken at all nodes at once, and the walk is a kernel.
    """

    def walk(
        self,
        logits: NodeLogits,
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
            likeliest(logits.every()),
            max_path=max_path,
            implementation=implementation,
        )
