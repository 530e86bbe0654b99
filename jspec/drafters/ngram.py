"""Prompt lookup: what followed the last few tokens the last time they occurred.

No training and no parameters. The suffix of prompt + output is matched against all of it, on the
device; the continuations of the best matches are merged into one tree.

References:
    Saxena 2023, Prompt Lookup Decoding.
    Yang et al. 2023, Inference with Reference (https://arxiv.org/abs/2304.04487).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.base import DraftContext, Drafter, Proposal, Rows
from jspec.targets.target import Target
from jspec.trees import Tree, TreeConfig, TreeSpec, select_nodes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NGramState:
    """What each slot learned about its own matches.

    Attributes:
        gain: drafted tokens accepted a round, a running mean by length of the best match,
            [B, max_match + 1].
        matched: length of the best match in the last round, 0 for none, [B] int32.
        drafted: whether the last round drafted, [B].
    """

    gain: Float[Array, "B M"]
    matched: Int[Array, "B"]
    drafted: Bool[Array, "B"]


@dataclass(frozen=True, kw_only=True)
class NGram(Drafter):
    """Drafts by looking up the current suffix in the text so far.

    Attributes:
        min_match: shortest suffix worth following, in tokens.
        max_match: longest suffix compared.
        num_matches: occurrences whose continuations are merged.
        min_gain: accepted tokens a drafted round must be worth on average: what a tree pass costs
            over a one-token pass, in one-token passes. A slot whose matches of some length fall
            below it stops following them, and tries again now and then. 0 always drafts.
    """

    min_match: int = 2
    max_match: int = 8
    num_matches: int = 8
    min_gain: float = 0.5
    name = "ngram"
    description = "prompt lookup, no parameters"
    may_abstain = True

    def __post_init__(self):
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                f"min_match={self.min_match}, max_match={self.max_match}; expected "
                "1 <= min_match <= max_match."
            )
        if self.num_matches < 1:
            raise ValueError(f"num_matches={self.num_matches}; expected at least 1.")

    def check(self, target: Target, tree: TreeSpec) -> None:
        if not isinstance(tree, TreeConfig):
            raise NotImplementedError(
                "the n-gram drafter shapes its own tree; give a TreeConfig, not a StaticTree."
            )
        pool = self.num_matches * tree.num_steps
        if tree.num_nodes - 1 > pool:
            raise ValueError(
                f"num_nodes={tree.num_nodes} needs {tree.num_nodes - 1} drafted nodes, but "
                f"{self.num_matches} matches of num_steps={tree.num_steps} tokens give at most "
                f"{pool}; lower num_nodes or raise num_steps or num_matches."
            )

    def init_state(self, params, batch: int, capacity: int) -> NGramState:
        # Optimistic: a match of m tokens is expected to go on for m/2 tokens until shown otherwise.
        prior = jnp.arange(self.max_match + 1, dtype=jnp.float32) / 2
        return NGramState(
            jnp.tile(prior[None, :], (batch, 1)),
            jnp.zeros((batch,), jnp.int32),
            jnp.zeros((batch,), bool),
        )

    def prefill(self, params, state: NGramState, rows: Rows) -> NGramState:
        return state

    def propose(self, params, state: NGramState, context: DraftContext, tree: TreeSpec):
        assert isinstance(tree, TreeConfig)  # `check` refused anything else
        known = context.lengths + 1
        length, start = self._best_matches(context.tokens, known)
        longest = length[:, 0]
        gain = jnp.take_along_axis(state.gain, longest[:, None], axis=1)[:, 0]
        drafts = (longest > 0) & (gain >= self.min_gain) & context.active
        drafted = self._merge(context, start, jnp.where(drafts[:, None], length, 0), known, tree)
        return Proposal(drafted, NGramState(state.gain, longest, drafts))

    def extend(self, params, state: NGramState, rows: Rows, correct: Int[Array, "B"]):
        lengths = jnp.arange(self.max_match + 1, dtype=jnp.int32)
        here = (lengths[None, :] == state.matched[:, None]) & (state.matched > 0)[:, None]
        here = here & (rows.count > 0)[:, None]
        learned = state.gain + 0.25 * (correct.astype(jnp.float32)[:, None] - state.gain)
        # A length that is not followed recovers slowly, so that it is tried again.
        waited = state.gain + 0.02
        gain = jnp.where(here, jnp.where(state.drafted[:, None], learned, waited), state.gain)
        return NGramState(gain, state.matched, state.drafted)

    def _best_matches(
        self, tokens: Int[Array, "B C"], known: Int[Array, "B"]
    ) -> tuple[Int[Array, "B A"], Int[Array, "B A"]]:
        """Length and continuation start of the best earlier occurrences of the suffix.

        Longest first, then most recent; length 0 where there are fewer than `num_matches`.
        """
        capacity = tokens.shape[1]
        place = jnp.arange(capacity, dtype=jnp.int32)[None, :]
        run = jnp.zeros(tokens.shape, jnp.int32)
        going = place < known[:, None] - 1
        for back in range(self.max_match):
            suffix = jnp.take_along_axis(tokens, jnp.maximum(known - 1 - back, 0)[:, None], axis=1)
            shifted = jnp.roll(tokens, back, axis=1)
            inside = (place >= back) & (known[:, None] - 1 >= back)
            going = going & inside & (shifted == suffix)
            run = run + going.astype(jnp.int32)
        run = jnp.where(run >= self.min_match, run, 0)
        best, at = jax.lax.top_k(
            jnp.where(run > 0, run * capacity + place, 0), min(self.num_matches, capacity)
        )
        return best // capacity, at + 1

    def _merge(
        self,
        context: DraftContext,
        start: Int[Array, "B A"],
        length: Int[Array, "B A"],
        known: Int[Array, "B"],
        tree: TreeConfig,
    ) -> Tree:
        """One tree out of A continuations: shared prefixes once, the best supported nodes kept."""
        batch, num = start.shape
        depth = tree.num_steps
        exists = length > 0
        # A continuation that reaches the end of the text goes on with itself: a loop stays a loop.
        step = jnp.arange(depth, dtype=jnp.int32)[None, None, :]
        period = jnp.maximum(known[:, None] - start, 1)[:, :, None]
        place = start[:, :, None] + step % period
        token = jnp.take_along_axis(context.tokens, place.reshape(batch, -1), axis=1)
        token = token.reshape(batch, num, depth)

        # agree[b, i, j, d]: continuations i and j are equal up to and including depth d.
        equal = token[:, :, None, :] == token[:, None, :, :]
        agree = jnp.cumsum(~equal, axis=3) == 0
        agree = agree & exists[:, :, None, None] & exists[:, None, :, None]
        first = jnp.argmax(agree, axis=2).astype(jnp.int32)  # smallest j that agrees with i
        own = first == jnp.arange(num, dtype=jnp.int32)[None, :, None]

        # Longer matches weigh more, later ones break ties; deeper nodes are worth less.
        order = jnp.arange(num, dtype=jnp.float32)[None, :]
        weight = jnp.where(exists, length.astype(jnp.float32) ** 2 * 0.8**order, 0.0)
        share = jnp.einsum("bijd,bj->bid", agree.astype(jnp.float32), weight)
        share = share / jnp.maximum(weight.sum(axis=1), 1e-9)[:, None, None]
        score = share * 0.9 ** step.astype(jnp.float32)

        node = exists[:, :, None] & own & self._within_topk(agree, own, first, exists, tree.topk)
        flat_parent = (step - 1) * num + jnp.pad(first, ((0, 0), (0, 0), (1, 0)))[:, :, :depth]
        flat_parent = jnp.where(step == 0, -1, flat_parent)

        def level_major(array):
            return array.transpose(0, 2, 1).reshape(batch, depth * num)

        return select_nodes(
            context.root,
            level_major(token),
            level_major(flat_parent),
            level_major(score),
            level_major(node),
            tree.num_nodes,
        )

    @staticmethod
    def _within_topk(
        agree: Bool[Array, "B A A L"],
        own: Bool[Array, "B A L"],
        first: Int[Array, "B A L"],
        exists: Bool[Array, "B A"],
        topk: int,
    ) -> Bool[Array, "B A L"]:
        """Continuations whose every node is among the first topk children of its parent."""
        num = exists.shape[1]
        # Counted from where i's node first occurs: i may stand behind siblings that were cut.
        earlier = jnp.arange(num)[None, None, :, None] < first[:, :, None, :]
        siblings = jnp.concatenate(
            [exists[:, :, None, None] & exists[:, None, :, None], agree[..., :-1]], axis=3
        )
        # Older siblings of i's node at depth d: first occurrences j < i that share i's parent there
        # but not its node.
        older = siblings & ~agree & own[:, None, :, :] & earlier
        allowed = older.sum(axis=2) < topk
        return jnp.cumsum(~allowed, axis=2) == 0
