"""SGLang's target sampling with two thresholds that accept more. Lossy below 1."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.drafters.base import Proposal
from jspec.sampling import NO_TOKEN, NodeLogits, probabilities, verdict_uniforms
from jspec.verify.rule import Rule, Slots
from pallas_kernels import Walk, sampling_walk


@dataclass(frozen=True)
class Thresholds(Rule):
    """Test children in order with one uniform u at their parent, whose distribution is p.

    A child c is accepted if u < (sum of p over it and its elder siblings) / acc, or if
    p(c) ≥ single. Where none is, the next token is drawn from p without the children.

    With both at 1 this is target sampling, tested child by child. Lower ones are lossy: acc
    multiplies every child's share by 1/acc, eldest first, until nothing is left to share; single
    makes the first child with p(c) ≥ single certain, unless an elder one is accepted. At one node
    with children of mass m = Σ p(c), the emitted token's total variation from p is m/acc - m for
    single = 1 and m ≤ acc, and up to 1 - p(c) where a child c is made certain.

    Source: SGLang's `tree_speculative_sampling_target_only` with
    `speculative_accept_threshold_single` and `_acc`.

    Attributes:
        single: accept any child at least this probable.
        acc: divides the running sum.
    """

    single: float = 1.0
    acc: float = 1.0
    name: ClassVar[str] = "thresholds"
    lossless: ClassVar[bool] = False

    def __post_init__(self):
        for field in ("single", "acc"):
            if not 0.0 <= getattr(self, field) <= 1.0:
                raise ValueError(
                    f"threshold {field}={getattr(self, field)}; expected a number from 0 to 1."
                )

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
        batch, nodes = tree.token.shape

        def put(node: Array, table: Array) -> Array:
            row = probabilities(logits.at(jnp.full((batch,), node)), slots.temperature)
            return table.at[:, node].set(row)

        # Row by row, so that the kernel's table is all that is as large as the logits.
        chance = jnp.zeros((batch, nodes, logits.vocabulary), jnp.float32)
        chance = jax.lax.fori_loop(0, nodes, put, chance)
        coins = verdict_uniforms(slots.keys, slots.lengths, nodes + 1)
        walk = sampling_walk(
            tree.token,
            (tree.parent, tree.links.first_child, tree.links.next_sibling),
            chance,
            coins[:, :nodes],
            coins[:, nodes],
            max_path=max_path,
            threshold_single=self.single,
            threshold_acc=self.acc,
            implementation=implementation,
        )
        rows = jnp.arange(batch)
        last = chance[rows, walk.path[:, -1]]
        # Where rounding left nothing to draw from, the walk names an impossible token.
        bonus = jnp.where(last[rows, walk.bonus] > 0, walk.bonus, jnp.argmax(last, axis=1))
        possible = last.max(axis=1) > 0
        return walk._replace(bonus=jnp.where(possible, bonus, NO_TOKEN).astype(jnp.int32))
