"""One round: draft, verify, accept, commit, extend. A pure function of parameters and state."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.base import DraftContext, Drafter, Rows
from jspec.engine.finish import cut_run
from jspec.engine.state import DecodeState, LastRound
from jspec.sampling import choose_tokens, draft_keys
from jspec.targets import Pass, Prefix, Target
from jspec.trees import Tree, TreeSpec, build
from pallas_kernels import Walk, greedy_walk


@dataclass(frozen=True, eq=False)
class Round:
    """The static choices of a generation; its methods are the stages of a round.

    Attributes:
        target: the model that decides.
        drafter: what proposes; None for plain decoding.
        tree: shape of the draft; None for plain decoding.
        implementation: of the kernels; see `pallas_kernels`.
        simulate_accept_length: emit this many tokens a round on average whatever the target says
            (for timing the machinery; the text is not real). None is the real thing.
    """

    target: Target
    drafter: Drafter | None
    tree: TreeSpec | None
    implementation: str | None = None
    simulate_accept_length: float | None = None

    @property
    def num_nodes(self) -> int:
        """T; 1 for plain decoding."""
        return 1 if self.tree is None else self.tree.num_nodes

    @property
    def path_width(self) -> int:
        """P; 1 for plain decoding."""
        return 1 if self.tree is None else self.tree.path_width

    @property
    def widths(self) -> tuple[int, ...]:
        """Pass widths compiled into the step; a round takes the narrowest that holds its draft."""
        abstains = self.drafter is not None and self.drafter.may_abstain
        if abstains and self.simulate_accept_length is None:
            return (1, self.num_nodes)
        return (self.num_nodes,)

    def step(self, params, state: DecodeState, *, sampled: bool) -> DecodeState:
        """One round of every slot. Finished slots are carried along unchanged.

        Args:
            params: of the target and of the drafter.
            state: before the round.
            sampled: whether any slot samples (see `choose_tokens`).
        """
        target_params, drafter_params = params
        with jax.named_scope("draft"):
            tree, drafter_state = self.draft(drafter_params, state)
        with jax.named_scope("verify"):
            predict, passed = self.verify(target_params, state, tree, sampled=sampled)
        with jax.named_scope("accept"):
            walk = self.accept(state, tree, predict)
        with jax.named_scope("commit"):
            moved, rows, correct = self.commit(state, tree, predict, passed, walk)
        with jax.named_scope("extend"):
            if self.drafter is not None:
                drafter_state = self.drafter.extend(drafter_params, drafter_state, rows, correct)
        return dataclasses.replace(moved, drafter=drafter_state)

    def draft(self, params, state: DecodeState) -> tuple[Tree, object]:
        """The tree to verify; a lone root where there is no drafter."""
        if self.drafter is None or self.tree is None:
            return lone_root(state.root), state.drafter
        context = DraftContext(
            state.tokens,
            state.lengths,
            state.root,
            state.active,
            draft_keys(state.requests.keys),
        )
        proposal = self.drafter.propose(params, state.drafter, context, self.tree)
        return proposal.tree, proposal.state

    def verify(
        self, params, state: DecodeState, tree: Tree, *, sampled: bool = False
    ) -> tuple[Int[Array, "B T"], Pass]:
        """The target's token after every node, and the pass that gave it."""

        def at(width: int):
            def run():
                head = tree.head(width)
                positions = state.lengths[:, None] + head.depth
                passed = self.target.forward(
                    params,
                    head.token,
                    positions,
                    Prefix(state.cache, state.lengths),
                    head.ancestors,
                    feature_layers=() if self.drafter is None else self.drafter.feature_layers,
                    implementation=self.implementation,
                )
                predict = choose_tokens(
                    self.target.logits(params, passed.hidden),
                    state.requests.temperature,
                    state.requests.keys,
                    positions + 1,
                    sampled=sampled,
                )
                return jax.tree.map(
                    lambda leaf: _pad_nodes(leaf, tree.num_nodes), (predict, passed)
                )

            return run

        if len(self.widths) == 1:
            return at(self.widths[0])()
        needed = jnp.max(jnp.where(state.active, tree.width_used, 1))
        return jax.lax.cond(needed > 1, at(self.widths[1]), at(self.widths[0]))

    def accept(self, state: DecodeState, tree: Tree, predict: Int[Array, "B T"]) -> Walk:
        """The path on which every drafted token is the target's own."""
        if self.simulate_accept_length is not None:
            return self._simulated_walk(state, predict)
        return greedy_walk(
            tree.token,
            (tree.parent, tree.links.first_child, tree.links.next_sibling),
            predict,
            max_path=self.path_width,
            implementation=self.implementation,
        )

    def commit(
        self,
        state: DecodeState,
        tree: Tree,
        predict: Int[Array, "B T"],
        passed: Pass,
        walk: Walk,
    ) -> tuple[DecodeState, Rows, Int[Array, "B"]]:
        """Emit the run, cut it where the text ends, and write the path's keys and values."""
        active, requests = state.active, state.requests
        emitted = jnp.take_along_axis(predict, walk.path, axis=1)
        kept, reason = cut_run(
            emitted,
            jnp.where(active, walk.length, 0),
            requests.stop_ids,
            requests.limits - state.lengths - 1,
        )
        kept = jnp.where(active, kept, 0)
        cache = state.cache.commit(passed.new, walk.path, kept, state.lengths, self.implementation)
        rows = Rows(
            tokens=jnp.take_along_axis(tree.token, walk.path, axis=1),
            next_tokens=emitted,
            start=state.lengths,
            count=kept,
            hidden=_take_nodes(passed.hidden, walk.path),
            features=tuple(_take_nodes(feature, walk.path) for feature in passed.features),
        )
        correct = jnp.where(active, walk.length - 1, 0)
        drafted = tree.valid.sum(axis=1).astype(jnp.int32) - 1
        moved = dataclasses.replace(
            state,
            tokens=append_tokens(state.tokens, state.lengths + 1, emitted, kept),
            lengths=state.lengths + kept,
            cache=cache,
            reason=jnp.where(active, reason, state.reason),
            log=state.log.add(active, kept, correct, drafted),
            last=LastRound(
                tree, walk.path, jnp.where(active, jnp.minimum(walk.length, kept + 1), 0)
            ),
        )
        return moved, rows, correct

    def _simulated_walk(self, state: DecodeState, predict: Int[Array, "B T"]) -> Walk:
        """Accept what makes the mean accept_length the one asked for, the same in every slot."""
        assert self.simulate_accept_length is not None
        mean_correct = self.simulate_accept_length - 1.0
        done = state.log.rounds.astype(jnp.float32)
        correct = jnp.floor((done + 1) * mean_correct) - jnp.floor(done * mean_correct)
        length = correct.astype(jnp.int32) + 1
        step = jnp.arange(self.path_width, dtype=jnp.int32)[None, :]
        path = jnp.minimum(jnp.minimum(step, length[:, None] - 1), self.num_nodes - 1)
        bonus = jnp.take_along_axis(predict, path[:, -1:], axis=1)[:, 0]
        return Walk(path, length, bonus)


def lone_root(root: Int[Array, "B"]) -> Tree:
    """The tree of plain decoding: one node."""
    token = root[:, None]
    return build(token, jnp.full_like(token, -1), jnp.ones(token.shape, bool))


def append_tokens(
    tokens: Int[Array, "B C"],
    at: Int[Array, "B"],
    new: Int[Array, "B P"],
    count: Int[Array, "B"],
) -> Int[Array, "B C"]:
    """Write new[:, :count] at `at`; what does not fit or is not counted is dropped."""
    batch, width = new.shape
    step = jnp.arange(width, dtype=jnp.int32)[None, :]
    place = jnp.where(step < count[:, None], at[:, None] + step, tokens.shape[1])
    return tokens.at[jnp.arange(batch)[:, None], place].set(new, mode="drop")


def _take_nodes(rows: Float[Array, "B T E"], path: Int[Array, "B P"]) -> Float[Array, "B P E"]:
    return jnp.take_along_axis(rows, path[:, :, None], axis=1)


def _pad_nodes(leaf: Array, num_nodes: int) -> Array:
    """Zeros after the node axis (always axis 1), so that every pass width returns one shape."""
    pad = [(0, 0)] * leaf.ndim
    pad[1] = (0, num_nodes - leaf.shape[1])
    return jnp.pad(leaf, pad)
