"""What each stage of a round costs, measured on the state of a real generation.

The engine runs a round as one program. Here its stages are separate programs, run one at a time and
waited for, so their times add up to a little more than the round.
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

from jspec.engine import Engine
from jspec.engine.state import DecodeState
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

    def draft(self, params, state: DecodeState) -> tuple[Tree, object]:
        own, drafter = super().draft(params, state)
        tree = jax.tree.map(lambda given, drawn: jnp.where(self.use, given, drawn), self.given, own)
        return tree, drafter


class StageTimer:
    """Times the stages of one engine's round on one state.

    The state stays where it is: after each program the cache is taken back (its only change are
    rows past the committed length) and everything else is restored.
    """

    def __init__(self, engine: Engine, state: DecodeState):
        """Take over `state`, from the middle of a generation."""
        self.engine = engine
        self.state = state
        self.widths = engine.round.widths
        self.samples: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._kept = {
            field.name: jax.tree.map(jnp.copy, getattr(state, field.name))
            for field in dataclasses.fields(state)
            if field.name != "cache"
        }
        round_ = engine.round
        drafter = engine.drafter

        def draft(state, params):
            tree, drafted = round_.draft(params[1], state)
            return tree, dataclasses.replace(state, drafter=drafted)

        def verify(state, params, tree):
            return round_.verify(params[0], state, tree)

        def accept(state, params, tree, predict):
            return round_.accept(state, tree, predict)

        def commit(state, params, tree, predict, passed, walk):
            moved, rows, correct = round_.commit(state, tree, predict, passed, walk)
            return (rows, correct), moved

        def extend(state, params, rows, correct):
            if drafter is None:
                return None, state
            extended = drafter.extend(params[1], state.drafter, rows, correct)
            return None, dataclasses.replace(state, drafter=extended)

        def whole(state, params, given, use):
            static = {f.name: getattr(round_, f.name) for f in dataclasses.fields(Round)}
            return None, GivenDraft(**static, given=given, use=use).step(params, state)

        self._read = {name: jax.jit(f) for name, f in (("verify", verify), ("accept", accept))}
        self._change = {
            name: jax.jit(f, donate_argnames="state")
            for name, f in (
                ("draft", draft),
                ("commit", commit),
                ("extend", extend),
                ("round", whole),
            )
        }

    def run(self, times: int) -> None:
        """Measure every stage and the whole round, at every pass width, `times` times."""
        for _ in range(times):
            for width in self.widths:
                self._once(width)

    def warm_up(self) -> None:
        """Compile, and let the first runs pass."""
        self.run(2)
        self.samples.clear()

    def seconds(self, stage: str, width: int) -> float:
        """Median time of a stage, or of the whole `round`, at a pass width."""
        return median(self.samples[stage, width])

    def _once(self, width: int) -> None:
        tree = stand_in(self.state, self.engine.round, width)
        self._changing("draft", width)
        predict, passed = self._timed("verify", width, self._read["verify"], tree)
        walk = self._timed("accept", width, self._read["accept"], tree, predict)
        rows, correct = self._changing("commit", width, tree, predict, passed, walk)
        del passed
        self._changing("extend", width, rows, correct)
        self._changing("round", width, tree, jnp.array(True))

    def _changing(self, stage: str, width: int, *arguments: Any) -> Any:
        """Run a program that changes the state, and restore the state."""
        result, changed = self._timed(stage, width, self._change[stage], *arguments)
        restored = {name: jax.tree.map(jnp.copy, value) for name, value in self._kept.items()}
        self.state = dataclasses.replace(changed, **restored)
        return result

    def _timed(self, stage: str, width: int, program: Callable, *arguments: Any) -> Any:
        jax.block_until_ready((self.state, arguments))
        start = time.perf_counter()
        result = jax.block_until_ready(program(self.state, self.engine.params, *arguments))
        self.samples[stage, width].append(time.perf_counter() - start)
        return result


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
