"""Drafters that know the answer (always, never or sometimes), and one that draws its guesses.

They exist to drive the engine down every branch, not to be good.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import Drafter, Proposal
from jspec.drafters.draw import pick_children
from jspec.trees import StaticTree, chain, fill_static, place_static, select_nodes

KINDS = ("right", "wrong", "random")


@dataclass(frozen=True, eq=False, kw_only=True)
class Scripted(Drafter):
    """Proposes from a table of what greedy decoding writes.

    Attributes:
        kind: `right` puts the true token at rank 0 of every level, `wrong` nowhere, `random` at a
            random rank of some levels. It travels with the parameters, so that one compiled engine
            serves all kinds.
        answers: the true token at every position of every slot, [B, C] int32.
        vocab_size: to draw other tokens from.
    """

    kind: str
    answers: np.ndarray
    vocab_size: int
    feature_layers: tuple[int, ...] = ()

    @property
    def name(self):
        return self.kind

    @property
    def params(self):
        return jnp.asarray(self.answers, jnp.int32), jnp.asarray(KINDS.index(self.kind))

    def check(self, target, tree):
        if tree.topk >= self.vocab_size:
            raise ValueError("not enough tokens")

    def init_state(self, params, batch, capacity):
        return jnp.zeros((batch,), jnp.int32)

    def prefill(self, params, state, rows):
        return state

    def extend(self, params, state, rows, correct):
        return state + 1

    def propose(self, params, state, context, tree):
        answers, kind = params
        batch = context.root.shape[0]
        levels = jnp.arange(1, tree.num_steps + 1, dtype=jnp.int32)
        place = jnp.minimum(context.lengths[:, None] + levels[None, :], answers.shape[1] - 1)
        answer = jnp.take_along_axis(answers[:batch], place, axis=1)[:, :, None]  # [B, L, 1]
        rank = jnp.arange(tree.topk, dtype=jnp.int32)[None, None, :]
        # topk distinct tokens that are not the answer: the ones after it, cyclically.
        token = jnp.broadcast_to(
            (answer + 1 + rank) % self.vocab_size, (batch, tree.num_steps, tree.topk)
        )
        key = jax.random.fold_in(jax.random.key(7), jnp.sum(state + context.lengths))
        lucky = jax.random.randint(key, (batch, tree.num_steps, 1), 0, tree.topk + 1)
        nowhere = jnp.full_like(lucky, -1)
        where = jnp.select([kind == 0, kind == 1], [jnp.zeros_like(lucky), nowhere], lucky)
        token = jnp.where(rank == where, answer, token)
        if isinstance(tree, StaticTree):
            return Proposal(fill_static(tree, context.root, token), state)
        return Proposal(self._scored(key, context, token, tree), state)

    def _scored(self, key, context, token, tree):
        """A full topk-ary pool cut to the first candidates, with random falling scores."""
        parents, depths, ranks = [], [], []
        frontier = [-1]
        while frontier and len(parents) < 4 * tree.num_nodes:
            parent = frontier.pop(0)
            depth = 0 if parent < 0 else depths[parent] + 1
            if depth >= tree.num_steps:
                continue
            for rank in range(tree.topk):
                frontier.append(len(parents))
                parents.append(parent)
                depths.append(depth)
                ranks.append(rank)
        batch, pool_size = context.root.shape[0], len(parents)
        lineage = np.eye(pool_size, dtype=np.float32)  # row i: candidate i and what is above it
        for node, parent in enumerate(parents):
            if parent >= 0:
                lineage[node] += lineage[parent]
        factor = jax.random.uniform(key, (batch, pool_size), minval=0.3, maxval=1.0)
        score = jnp.exp(jnp.log(factor) @ jnp.asarray(lineage.T))
        flat = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), score.shape)
        pool = token[:, np.asarray(depths), np.asarray(ranks)]
        return select_nodes(
            context.root, pool, flat, score, jnp.ones(score.shape, bool), tree.num_nodes
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Drawn(Drafter):
    """Draws children from a table by the token before them, or takes the likeliest ones.

    Attributes:
        table: logits after every token, [V, Vd] float32.
        ids: target ids of the draft vocabulary, [Vd]; None where both are one.
    """

    table: np.ndarray
    ids: np.ndarray | None = None
    name = "drawn"
    can_sample = True

    @property
    def params(self):
        return jnp.asarray(self.table, jnp.float32)

    def check(self, target, tree):
        if tree.topk > self.table.shape[1]:
            raise ValueError("not enough tokens")

    def init_state(self, params, batch, capacity):
        return ()

    def prefill(self, params, state, rows):
        return state

    def extend(self, params, state, rows, correct):
        return state

    def propose(self, params, state, context, tree):
        shape = tree if isinstance(tree, StaticTree) else chain(tree.num_steps)
        batch, size = context.root.shape[0], params.shape[1]
        known = None if self.ids is None else jnp.asarray(self.ids, jnp.int32)
        token = jnp.zeros((batch, shape.num_nodes), jnp.int32).at[:, 0].set(context.root)
        drawn_from = jnp.zeros((batch, shape.num_nodes, size))
        parents, ranks = np.asarray(shape.parents), np.asarray(shape.ranks)
        for node in range(shape.num_nodes):
            below = np.flatnonzero(parents == node)
            if not below.size:
                continue
            width = int(ranks[below].max()) + 1
            found = pick_children(params[token[:, node]][:, None], width, context, node)
            ids = found.ids[:, 0, ranks[below]]
            token = token.at[:, below].set(ids if known is None else known[ids])
            if found.probabilities is not None:
                drawn_from = drawn_from.at[:, node].set(found.probabilities[:, 0])
        tree = place_static(shape, token, jnp.ones(token.shape))
        if context.temperature is None:
            return Proposal(tree, state)
        return Proposal(tree, state, drawn_from, known)


def answers_from(outputs, capacity: int) -> np.ndarray:
    """Table of prompt + plain greedy output, one row a slot, zeros after the end."""
    table = np.zeros((len(outputs), capacity), np.int32)
    for row, output in enumerate(outputs):
        text = [*output.prompt_token_ids, *output.token_ids]
        table[row, : len(text)] = text
    return table
