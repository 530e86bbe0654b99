"""Rejection sampling: accept a drawn child as often as target and drafter agree on it."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.base import Proposal
from jspec.sampling import NodeLogits, draw, probabilities, verdict_uniforms
from jspec.trees import Tree
from jspec.verify.rule import Rule, Slots
from pallas_kernels import Walk


class RejectionSampling(Rule):
    """Accept child c with probability min(1, p(c) / q(c)), else go on with the residual.

    At a node with target distribution r₀ = p, the children c₁, c₂, … were drawn from q without
    replacement: c_j from q_j, which is q without c₁ … c_{j-1}, normalised. In turn:

        accept c_j if u·q_j(c_j) < r_{j-1}(c_j), with u uniform in [0, 1);
        otherwise r_j = (r_{j-1} - q_j)₊, normalised.

    Where no child is accepted, the next token is drawn from the last r.

    Lossless: say that stage j, given what came before, must emit a token distributed as r_{j-1}.
    It emits x as c_j with probability q_j(x)·min(1, r_{j-1}(x)/q_j(x)) = min(q_j(x), r_{j-1}(x)),
    and otherwise, with the probability that is left, 1 - Σ min(q_j, r_{j-1}) = Σ (r_{j-1} - q_j)₊,
    it asks the next stage for r_j ∝ (r_{j-1} - q_j)₊. If that emits r_j, the sum is
    min(q_j, r_{j-1}) + (r_{j-1} - q_j)₊ = r_{j-1}. The last stage draws from its r, so by induction
    from the last child to the first, the node emits p. A child's own children were drawn without
    looking at this node's coins, so the same holds below it.

    A child that q does not know of (q_j(c) = 0: fewer tokens than children, a slot whose draft is
    not drawn, NaN) is tested as if it had been certain, q_j a point mass on it: accepted with
    r_{j-1}(c), which is exact however it was chosen. With q of point masses throughout, this is
    EAGLE's `evaluate_posterior`; on a chain it is Leviathan et al. 2023
    (https://arxiv.org/abs/2211.17192). Without replacement: Jeon et al. 2024
    (https://arxiv.org/abs/2402.14160). A drafter with a vocabulary of its own is one whose q is
    zero on all other tokens.
    """

    name: ClassVar[str] = "rejection"
    lossless: ClassVar[bool] = True
    reads_probabilities: ClassVar[bool] = True

    def walk(
        self,
        logits: NodeLogits,
        proposal: Proposal,
        slots: Slots,
        *,
        max_path: int,
        implementation: str | None = None,
    ) -> Walk:
        nodes = proposal.tree.num_nodes
        coins = verdict_uniforms(slots.keys, slots.lengths, nodes + 2)
        return rejection_walk(
            logits, proposal, slots.temperature, coins[:, :nodes], coins[:, nodes:], max_path
        )


def rejection_walk(
    logits: NodeLogits,
    proposal: Proposal,
    temperature: Float[Array, "B"],
    coins: Float[Array, "B T"],
    final: Float[Array, "B 2"],
    max_path: int,
) -> Walk:
    """The rule with its coins given.

    Args:
        logits: of the target after the nodes.
        proposal: the tree, and what its children were drawn from.
        temperature: 0 for greedy slots.
        coins: in [0, 1), one for each node as a child.
        final: in [0, 1), for the token after the path.
        max_path: P.
    """
    tree = proposal.tree
    batch, vocabulary = tree.token.shape[0], logits.vocabulary
    rows = jnp.arange(batch)

    def test(carry: Any) -> Any:
        """One child of every slot that still has one to test, at nodes that may be new to it."""
        node, arrived, child, path, length, residual, draft = carry
        new = arrived[:, None]
        residual, draft = jax.lax.cond(
            arrived.any(),
            lambda: (
                jnp.where(new, probabilities(logits.at(node), temperature), residual),
                jnp.where(new, draft_rows(proposal, node, vocabulary), draft),
            ),
            lambda: (residual, draft),
        )
        testing = child >= 0
        at = jnp.maximum(child, 0)
        token = tree.token[rows, at]
        certain = jax.nn.one_hot(token, vocabulary, dtype=jnp.float32)
        drawn_from = jnp.where((draft[rows, token] > 0)[:, None], draft, certain)
        accepted = testing & (coins[rows, at] * drawn_from[rows, token] < residual[rows, token])
        rest = jnp.maximum(residual - drawn_from, 0.0)
        left = rest.sum(axis=-1, keepdims=True)
        # Where p = q nothing is ever rejected, except by rounding: then p stands.
        rejected = jnp.where(left > 0, rest / left, residual)
        others = draft * (1.0 - certain)
        remaining = others.sum(axis=-1, keepdims=True)
        others = jnp.where(remaining > 0, others / remaining, 0.0)

        aside = (testing & ~accepted)[:, None]
        residual = jnp.where(aside, rejected, residual)
        draft = jnp.where(aside, others, draft)
        node = jnp.where(accepted, at, node)
        place = jnp.arange(max_path, dtype=jnp.int32)[None, :]
        path = jnp.where(accepted[:, None] & (place >= length[:, None]), at[:, None], path)
        length = length + accepted.astype(jnp.int32)
        following = jnp.where(accepted, tree.links.first_child[rows, at], _sibling(tree, at))
        child = jnp.where(testing & (length < max_path), following, -1)
        return node, accepted, child, path, length, residual, draft

    root = jnp.zeros((batch,), jnp.int32)
    nothing = jnp.zeros((batch, vocabulary), jnp.float32)
    start = (
        root,
        root == 0,
        tree.links.first_child[:, 0] if max_path > 1 else root - 1,
        jnp.zeros((batch, max_path), jnp.int32),
        root + 1,
        nothing,
        nothing,
    )
    *_, path, length, residual, _ = jax.lax.while_loop(
        lambda carry: (carry[1] | (carry[2] >= 0)).any(), test, start
    )
    return Walk(path, length, draw(residual, final))


def draft_rows(proposal: Proposal, node: Int[Array, "B"], vocabulary: int) -> Float[Array, "B V"]:
    """What a node's children were drawn from, over the target's vocabulary; zeros if unknown."""
    batch = node.shape[0]
    if proposal.probabilities is None:
        return jnp.zeros((batch, vocabulary), jnp.float32)
    rows = jnp.arange(batch)
    row = proposal.probabilities[rows, node]
    row = jnp.where(row > 0, row, 0.0)  # NaN is no probability
    total = row.sum(axis=-1, keepdims=True)
    row = jnp.where(total > 0, row / total, 0.0)
    if proposal.token_map is None:
        return row
    zeros = jnp.zeros((batch, vocabulary), jnp.float32)
    return zeros.at[rows[:, None], proposal.token_map[None, :]].set(row)


def _sibling(tree: Tree, node: Int[Array, "B"]) -> Int[Array, "B"]:
    return jnp.take_along_axis(tree.links.next_sibling, node[:, None], axis=1)[:, 0]
