"""Block verification: decide about a drawn chain as a whole."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.base import Drafter, Proposal
from jspec.sampling import NodeLogits, draw, probabilities, verdict_uniforms
from jspec.trees import TreeSpec
from jspec.verify.rejection import draft_rows
from jspec.verify.rule import Rule, Slots
from pallas_kernels import Walk


class BlockVerification(Rule):
    """Accept the longest prefix of a chain that its joint probability allows.

    For a chain x₁ … x_γ drawn from q, with p and q read at the node before each token:

        w₀ = 1,  w_i = min(1, w_{i-1}·p(x_i)/q(x_i))
        s_i = Σ_x (w_i·p(x) - q(x))₊ at node i,  h_i = s_i / (s_i + 1 - w_i) for i < γ,  h_γ = w_γ
        τ = the largest i with u_i < h_i, each u_i uniform in [0, 1); 0 if there is none

    Then x₁ … x_τ are accepted, and the next token is drawn from (w_τ·p - q)₊ normalised at node τ,
    from p itself if τ = γ.

    Lossless (Sun et al. 2024, https://arxiv.org/abs/2403.10444): say that a prefix of length i is
    reached if some i' ≥ i is accepted. Backwards over i, one shows P(τ ≥ i | x₁ … x_i) = w_i:
    it holds at γ, since h_γ = w_γ. If it holds at i + 1, then averaged over x_{i+1} ~ q the longer
    ones are accepted with probability Σ_x q(x)·min(1, w_i·p(x)/q(x)) = Σ_x min(q, w_i·p) =
    w_i - s_i, and otherwise i is with h_i: w_i - s_i + (1 - w_i + s_i)·h_i = w_i. So x₁ … x_i x is
    emitted with probability q(x₁ … x_i)·[min(q(x), w_i·p(x)) + s_i·(w_i·p(x) - q(x))₊/s_i] =
    q(x₁ … x_i)·w_i·p(x): as drafted token or as the one after, x follows x₁ … x_i with p(x).

    No rule accepts a longer chain on average, and it accepts one at least as long as rejection
    sampling, which decides token by token. A token that q does not know of is taken as certain, as
    in `RejectionSampling`.
    """

    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True
    reads_probabilities: ClassVar[bool] = True

    def check(self, drafter: Drafter, tree: TreeSpec) -> None:
        super().check(drafter, tree)
        if tree.num_nodes != tree.path_width:
            raise ValueError(
                f"verification {self.name!r} decides about one chain, and this tree branches "
                f"({tree.num_nodes} nodes, {tree.path_width} on its longest path); give "
                "jspec.trees.chain(num_steps) or TreeConfig(topk=1), or use 'rejection'."
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
        coins = verdict_uniforms(slots.keys, slots.lengths, max_path + 2)
        return block_walk(
            logits, proposal, slots.temperature, coins[:, :max_path], coins[:, max_path:]
        )


def block_walk(
    logits: NodeLogits,
    proposal: Proposal,
    temperature: Float[Array, "B"],
    coins: Float[Array, "B T"],
    final: Float[Array, "B 2"],
) -> Walk:
    """The rule with its coins given.

    Args:
        logits: of the target after the nodes.
        proposal: a chain, and what its tokens were drawn from.
        temperature: 0 for greedy slots.
        coins: in [0, 1), one for each node but the root's, which is not looked at.
        final: in [0, 1), for the token after the path.
    """
    token = proposal.tree.token
    batch, nodes = token.shape
    last = proposal.tree.valid.sum(axis=1).astype(jnp.int32) - 1
    rows = jnp.arange(batch)

    def distributions(node: Int[Array, ""]) -> tuple[Array, Array]:
        """p after a node, and what its child was drawn from."""
        target = probabilities(logits.at(jnp.full((batch,), node)), temperature)
        draft = draft_rows(proposal, jnp.full((batch,), node), target.shape[-1])
        child = token[:, jnp.minimum(node + 1, nodes - 1)]
        certain = jax.nn.one_hot(child, target.shape[-1], dtype=jnp.float32)
        draft = jnp.where((draft[rows, child] > 0)[:, None], draft, certain)
        return target, jnp.where((node < last)[:, None], draft, 0.0)

    def look(carry: Any, node: Int[Array, ""]) -> tuple[Any, None]:
        """May the accepted chain end at this node?"""
        weight, ends, residual = carry
        target, draft = distributions(node)
        rest = jnp.maximum(weight[:, None] * target - draft, 0.0)
        left = rest.sum(axis=-1)
        # A weight of 1 lets the chain get here for certain, also where p = q leaves nothing.
        chance = jnp.where(weight < 1.0, left / (left + 1.0 - weight), 1.0)
        chance = jnp.where(node == last, weight, chance)
        here = ((coins[:, node] < chance) | (node == 0)) & (node <= last)
        ends = jnp.where(here, node, ends)
        rest = jnp.where((left > 0)[:, None], rest, target)
        residual = jnp.where(here[:, None], rest, residual)
        child = token[:, jnp.minimum(node + 1, nodes - 1)]
        ratio = target[rows, child] / jnp.where(draft[rows, child] > 0, draft[rows, child], 1.0)
        return (jnp.minimum(weight * ratio, 1.0), ends, residual), None

    start = (
        jnp.ones((batch,), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch, logits.vocabulary), jnp.float32),
    )
    steps = jnp.arange(nodes, dtype=jnp.int32)
    (_, ends, residual), _ = jax.lax.scan(look, start, steps)
    path = jnp.minimum(steps[None, :], ends[:, None])
    return Walk(path, ends + 1, draw(residual, final))
