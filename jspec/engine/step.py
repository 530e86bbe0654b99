"""One round: draft, verify, accept, commit, extend. A pure function of parameters and state."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.base import DraftContext, Drafter, Proposal, Rows
from jspec.engine.finish import cut_run
from jspec.engine.state import DecodeState, LastRound
from jspec.sampling import NodeLogits, branch_tokens, draft_keys
from jspec.targets import Pass, Prefix, Target
from jspec.trees import Tree, TreeSpec, build
from jspec.verify import Greedy, Rule, Slots, TargetSampling
from pallas_kernels import Walk


@dataclass(frozen=True, eq=False)
class Round:
    """The static choices of a generation; its methods are the stages of a round.

    Attributes:
        target: the model that decides.
        drafter: what proposes; None for plain decoding.
        tree: shape of the draft; None for plain decoding.
        implementation: of the kernels; see `pallas_kernels`.
        rule: of verification, where a slot samples.
        draft_temperature: children are drawn at it in slots that sample; None takes each slot's
            own where the rule reads what children were drawn from, and draws nothing elsewhere.
        simulate_accept_length: emit this many tokens a round on average whatever the target says
            (for timing the machinery; the text is not real). None is the real thing.
    """

    target: Target
    drafter: Drafter | None
    tree: TreeSpec | None
    implementation: str | None = None
    simulate_accept_length: float | None = None
    rule: Rule = field(default_factory=TargetSampling)
    draft_temperature: float | None = None

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
            sampled: whether any slot samples; a greedy batch compiles without the draws.
        """
        target_params, drafter_params = params
        with jax.named_scope("draft"):
            proposal = self.draft(drafter_params, state, sampled=sampled)
        with jax.named_scope("verify"):
            logits, passed = self.verify(target_params, state, proposal.tree)
        with jax.named_scope("accept"):
            walk = self.accept(state, proposal, logits, sampled=sampled)
        with jax.named_scope("commit"):
            moved, rows, correct = self.commit(state, proposal.tree, logits, passed, walk)
        with jax.named_scope("extend"):
            drafter_state = proposal.state
            if self.drafter is not None:
                drafter_state = self.drafter.extend(drafter_params, drafter_state, rows, correct)
        return dataclasses.replace(moved, drafter=drafter_state)

    def draft(self, params, state: DecodeState, *, sampled: bool = False) -> Proposal:
        """The tree to verify; a lone root where there is no drafter."""
        if self.drafter is None or self.tree is None:
            return Proposal(lone_root(state.root), state.drafter)
        context = DraftContext(
            state.tokens,
            state.lengths,
            state.root,
            state.active,
            draft_keys(state.requests.keys),
            self._draft_temperature(state) if sampled else None,
        )
        proposal = self.drafter.propose(params, state.drafter, context, self.tree)
        if state.requests.num_steps is None:
            return proposal
        return dataclasses.replace(
            proposal, tree=_cut_below(proposal.tree, state.requests.num_steps)
        )

    def verify(self, params, state: DecodeState, tree: Tree) -> tuple[Float[Array, "B T V"], Pass]:
        """The target's logits after every node, and the pass that gave them.

        Both are zeros past the nodes of a narrow pass.
        """

        def at(width: int) -> tuple[Array, Pass]:
            head = tree.head(width)
            passed = self.target.forward(
                params,
                head.token,
                state.lengths[:, None] + head.depth,
                Prefix(state.cache, state.lengths),
                head.ancestors,
                feature_layers=() if self.drafter is None else self.drafter.feature_layers,
                implementation=self.implementation,
            )
            logits = self.target.logits(params, passed.hidden)
            return jax.tree.map(partial(_pad_nodes, num_nodes=tree.num_nodes), (logits, passed))

        return self._at_width(state, tree, at)

    def accept(
        self,
        state: DecodeState,
        proposal: Proposal,
        logits: Float[Array, "B T V"],
        *,
        sampled: bool = False,
    ) -> Walk:
        """The path that the rule accepts, and the token after it."""
        requests = state.requests

        def at(width: int) -> Walk:
            head = proposal.head(width)
            places = state.lengths[:, None] + head.tree.depth + 1 - requests.prompt_lengths[:, None]
            looks_back = requests.shaping.looks_back
            processed = NodeLogits(
                logits[:, :width],
                requests.temperature,
                places,
                requests.shaping,
                state.history,
                branch_tokens(head.tree, self.path_width - 1) if looks_back else None,
                sampled,
            )
            slots = Slots(requests.temperature, requests.keys, state.lengths)
            return self.rule_for(sampled).walk(
                processed,
                head,
                slots,
                max_path=self.path_width,
                implementation=self.implementation,
            )

        walk = self._at_width(state, proposal.tree, at)
        return walk if self.simulate_accept_length is None else self._simulated(state, walk)

    def _at_width(self, state: DecodeState, tree: Tree, stage: Callable[[int], Any]) -> Any:
        """The stage at the narrowest width that holds the draft of every active slot."""
        if len(self.widths) == 1:
            return stage(self.widths[0])
        needed = jnp.max(jnp.where(state.active, tree.width_used, 1))
        narrow, wide = self.widths
        return jax.lax.cond(needed > narrow, lambda: stage(wide), lambda: stage(narrow))

    def rule_for(self, sampled: bool) -> Rule:
        """Every rule is greedy verification where nothing is drawn."""
        return self.rule if sampled else Greedy()

    def commit(
        self,
        state: DecodeState,
        tree: Tree,
        logits: Float[Array, "B T V"],
        passed: Pass,
        walk: Walk,
    ) -> tuple[DecodeState, Rows, Int[Array, "B"]]:
        """Emit the run, cut it where the text ends, and write the path's keys and values."""
        active, requests = state.active, state.requests
        tokens = jnp.take_along_axis(tree.token, walk.path, axis=1)
        place = jnp.arange(self.path_width, dtype=jnp.int32)[None, :]
        is_bonus = place == walk.length[:, None] - 1
        emitted = jnp.where(is_bonus, walk.bonus[:, None], jnp.roll(tokens, -1, axis=1))
        kept, reason = cut_run(
            emitted,
            jnp.where(active, walk.length, 0),
            requests.stop_ids,
            requests.limits - state.lengths - 1,
        )
        kept = jnp.where(active, kept, 0)
        emitted = jnp.maximum(emitted, 0)  # where no token was possible, the text ended before
        cache = state.cache.commit(passed.new, walk.path, kept, state.lengths, self.implementation)
        rows = Rows(
            tokens=tokens,
            next_tokens=emitted,
            start=state.lengths,
            count=kept,
            hidden=_take_nodes(passed.hidden, walk.path),
            features=tuple(_take_nodes(feature, walk.path) for feature in passed.features),
        )
        correct = jnp.where(active, walk.length - 1, 0)
        drafted = tree.valid.sum(axis=1).astype(jnp.int32) - 1
        history, logprobs = state.history, state.logprobs
        if history is not None:
            history = history.add(tokens, kept)
        if logprobs is not None:
            chosen_from = _take_nodes(logits, walk.path)
            logprobs = logprobs.add(chosen_from, emitted, state.lengths + 1, kept)
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
            history=history,
            logprobs=logprobs,
        )
        return moved, rows, correct

    def _simulated(self, state: DecodeState, walk: Walk) -> Walk:
        """Accept what makes the mean accept_length the one asked for, the same in every slot."""
        assert self.simulate_accept_length is not None
        mean_correct = self.simulate_accept_length - 1.0
        done = state.log.rounds.astype(jnp.float32)
        correct = jnp.floor((done + 1) * mean_correct) - jnp.floor(done * mean_correct)
        length = correct.astype(jnp.int32) + 1
        step = jnp.arange(self.path_width, dtype=jnp.int32)[None, :]
        path = jnp.minimum(jnp.minimum(step, length[:, None] - 1), self.num_nodes - 1)
        return Walk(path, length, jnp.maximum(walk.bonus, 0))

    def _draft_temperature(self, state: DecodeState) -> Float[Array, "B"] | None:
        asked = state.requests.temperature
        if self.draft_temperature is not None:
            return jnp.where(asked > 0, self.draft_temperature, 0.0)
        return asked if self.rule.reads_probabilities else None


def lone_root(root: Int[Array, "B"]) -> Tree:
    """The tree of plain decoding: one node."""
    token = root[:, None]
    return build(token, jnp.full_like(token, -1), jnp.ones(token.shape, bool))


def _cut_below(tree: Tree, levels: Int[Array, "B"]) -> Tree:
    """The tree without what is deeper than `levels`. Which nodes go does not depend on tokens."""
    kept = tree.valid & (tree.depth <= levels[:, None])
    return build(tree.token, tree.parent, kept, tree.score)


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
