"""What each stage of a round costs, measured on the state of a real generation.

The engine runs a round as one program. Here its stages are separate programs, run one at a time and
waited for. Calling a program costs something by itself, and a stage may be shorter than that, so a
program that does nothing with the same arguments is timed beside each and subtracted.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.drafters import Proposal
from jspec.engine import Engine
from jspec.engine.state import DecodeState, LastRound
from jspec.engine.step import Round, lone_root
from jspec.trees import Tree, build

STAGES = ("draft", "verify", "accept", "commit", "extend")


@dataclass(frozen=True, eq=False, kw_only=True)
class GivenDraft(Round):
    """A round that drafts as ever and then verifies the given tree instead.

    A pass of each width can be timed so on any state. Whether to is an argument of the program, as
    the compiler would otherwise leave the unused draft out.
    """

    given: Tree
    use: Array

    def draft(self, params, state: DecodeState, *, sampled: bool = False) -> Proposal:
        own = super().draft(params, state, sampled=sampled)
        tree = jax.tree.map(
            lambda given, drawn: jnp.where(self.use, given, drawn), self.given, own.tree
        )
        return dataclasses.replace(own, tree=tree)


class StageTimer:
    """Times the stages of one engine's round on one state.

    The state stays where it is: after each program the cache is taken back (its only change are
    rows past the committed length) and everything else is restored.
    """

    def __init__(self, engine: Engine, state: DecodeState, *, sampled: bool):
        """Take over `state`, from the middle of a generation.

        Args:
            engine: whose stages.
            state: the engine's own, no longer used by anyone else.
            sampled: whether any slot samples.
        """
        self.engine = engine
        self.state = state
        self.widths = engine.round.widths
        self.samples: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.calls: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._kept = {
            field.name: jax.tree.map(jnp.copy, getattr(state, field.name))
            for field in dataclasses.fields(state)
            if field.name != "cache"
        }
        round_ = engine.round
        drafter = engine.drafter

        def draft(state, params):
            proposal = round_.draft(params[1], state, sampled=sampled)
            return proposal, dataclasses.replace(state, drafter=proposal.state)

        def verify(state, params, tree):
            return round_.verify(params[0], state, tree)

        def accept(state, params, proposal, logits):
            return round_.accept(state, proposal, logits, sampled=sampled)

        def commit(state, params, tree, logits, passed, walk):
            moved, rows, correct = round_.commit(state, tree, logits, passed, walk)
            return (rows, correct), moved

        def extend(state, params, rows, correct):
            if drafter is None:
                return None, state
            extended = drafter.extend(params[1], state.drafter, rows, correct)
            return None, dataclasses.replace(state, drafter=extended)

        def whole(state, params, given, use):
            static = {f.name: getattr(round_, f.name) for f in dataclasses.fields(Round)}
            given_draft = GivenDraft(**static, given=given, use=use)
            return None, given_draft.step(params, state, sampled=sampled)

        # These only read the state; the others change it, and get it to write in.
        self._read = {name: jax.jit(f) for name, f in (("verify", verify), ("accept", accept))}
        changing = (("draft", draft), ("commit", commit), ("extend", extend), ("round", whole))
        self._change = {name: jax.jit(f, donate_argnames="state") for name, f in changing}
        self._read_nothing = jax.jit(lambda state, params, *rest: jnp.zeros(()))
        self._change_nothing = jax.jit(
            lambda state, params, *rest: (None, state), donate_argnames="state"
        )

    def run(self, times: int) -> None:
        """Measure every stage and the whole round, at every pass width, `times` times."""
        for _ in range(times):
            for width in self.widths:
                self._once(width)

    def warm_up(self) -> None:
        """Compile, and let the first runs pass."""
        self.run(2)
        self.samples.clear()
        self.calls.clear()

    def seconds(self, stage: str, width: int) -> float:
        """Median time of a stage, or of the whole `round`, at a pass width, without the call."""
        return max(median(self.samples[stage, width]) - median(self.calls[stage, width]), 0.0)

    def _once(self, width: int) -> None:
        tree = stand_in(self.state, self.engine.round, width)
        proposal = dataclasses.replace(self._changing("draft", width), tree=tree, state=None)
        logits, passed = self._reading("verify", width, tree)
        walk = self._reading("accept", width, proposal, logits)
        rows, correct = self._changing("commit", width, tree, logits, passed, walk)
        del passed
        self._changing("extend", width, rows, correct)
        self._changing("round", width, tree, jnp.array(True))

    def _reading(self, stage: str, width: int, *arguments: Any) -> Any:
        self.calls[stage, width].append(self._timed(self._read_nothing, arguments)[0])
        seconds, result = self._timed(self._read[stage], arguments)
        self.samples[stage, width].append(seconds)
        return result

    def _changing(self, stage: str, width: int, *arguments: Any) -> Any:
        """Run a program that changes the state, and restore the state."""
        seconds, (_, self.state) = self._timed(self._change_nothing, arguments)
        self.calls[stage, width].append(seconds)
        seconds, (result, changed) = self._timed(self._change[stage], arguments)
        self.samples[stage, width].append(seconds)
        restored = {name: jax.tree.map(jnp.copy, value) for name, value in self._kept.items()}
        self.state = dataclasses.replace(changed, **restored)
        return result

    def _timed(self, program: Callable, arguments: tuple) -> tuple[float, Any]:
        jax.block_until_ready((self.state, arguments))
        start = time.perf_counter()
        result = jax.block_until_ready(program(self.state, self.engine.params, *arguments))
        return time.perf_counter() - start, result


def at_tree(state: DecodeState, round_: Round) -> DecodeState:
    """The same generation for the stages of a round with another tree; all else must be the same.

    Only what is kept of the last round has the tree's shape.
    """
    slots = state.lengths.shape[0]
    last = LastRound.empty(slots, round_.num_nodes, round_.path_width)
    return dataclasses.replace(state, last=last)


def stand_in(state: DecodeState, round_: Round, width: int) -> Tree:
    """A tree that takes a pass of `width`: the root alone, or T nodes as deep as the tree allows.

    The text's own last tokens stand in for a draft; what a pass costs does not depend on them.
    """
    nodes = round_.num_nodes
    if nodes == 1:
        return lone_root(state.root)
    node = jnp.arange(nodes, dtype=jnp.int32)
    parent = jnp.where(node < round_.path_width, node - 1, 0)
    slots = state.root.shape[0]
    place = jnp.maximum(state.lengths[:, None] - node[None, :], 0)
    token = jnp.take_along_axis(state.tokens, place, axis=1)
    valid = (node < width) if width > 1 else (node < 1)
    return build(
        token, jnp.broadcast_to(parent, (slots, nodes)), jnp.broadcast_to(valid, (slots, nodes))
    )
