"""Everything a generation carries from round to round, on the device."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.sampling import History, LogprobLog, Shaping
from jspec.targets import KVCache
from jspec.trees.tree import AnyArray, Tree, build

RUNNING, STOPPED, LENGTH, FAILED = 0, 1, 2, 3
"""Why a slot is done: still running, a stop token, a limit, no token was possible."""

FINISH_REASONS = {STOPPED: "stop", LENGTH: "length"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Requests:
    """What was asked of each slot; constant over a generation.

    Attributes:
        prompt_lengths: [B] int32.
        limits: tokens a slot may hold, prompt included, [B] int32.
        stop_ids: tokens that end the text, padded with -1, [B, K] int32.
        temperature: [B] float32.
        keys: raw key data of the target's noise, [B, 2].
        shaping: what changes the logits beside the temperature.
        num_steps: levels that may be drafted, [B] int32; None where every slot takes all of the
            tree.
    """

    prompt_lengths: Int[Array, "B"]
    limits: Int[Array, "B"]
    stop_ids: Int[Array, "B K"]
    temperature: Float[Array, "B"]
    keys: UInt32[Array, "B 2"]
    shaping: Shaping = field(default_factory=Shaping)
    num_steps: Int[Array, "B"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundLog:
    """What each round of each slot did; R = rounds there is room for.

    Attributes:
        rounds: rounds done, [B] int32.
        emitted: tokens emitted, bonus included, after any cut, [B, R] int32.
        correct: drafted tokens accepted, before any cut, [B, R] int32.
        drafted: nodes proposed, the root not counted, [B, R] int32.
    """

    rounds: Int[AnyArray, "B"]
    emitted: Int[AnyArray, "B R"]
    correct: Int[AnyArray, "B R"]
    drafted: Int[AnyArray, "B R"]

    @classmethod
    def empty(cls, batch: int, rounds: int) -> "RoundLog":
        """No round yet."""
        first, *rest = (jnp.zeros((batch, rounds), jnp.int32) for _ in range(3))
        return cls(jnp.zeros((batch,), jnp.int32), first, *rest)

    def add(self, active, emitted, correct, drafted) -> "RoundLog":
        """One more round of the active slots; all arguments [B]."""
        batch, room = self.emitted.shape
        place = jnp.where(active, self.rounds, room)

        def put(log, value):
            return log.at[jnp.arange(batch), place].set(value, mode="drop")

        return RoundLog(
            self.rounds + active.astype(jnp.int32),
            put(self.emitted, emitted),
            put(self.correct, correct),
            put(self.drafted, drafted),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LastRound:
    """The round just done, for people who want to see it.

    Attributes:
        tree: as proposed.
        path: accepted nodes, [B, P] int32, the root first.
        path_length: nodes whose tokens stayed in the text, the root included, [B] int32; 0 for
            slots that were done before.
    """

    tree: Tree
    path: Int[AnyArray, "B P"]
    path_length: Int[AnyArray, "B"]

    @classmethod
    def empty(cls, batch: int, nodes: int, path_width: int) -> "LastRound":
        """No round yet, of trees of so many nodes."""
        no_node = jnp.zeros((batch, nodes), jnp.int32)
        tree = build(no_node, no_node, jnp.zeros(no_node.shape, bool))
        return cls(tree, jnp.zeros((batch, path_width), jnp.int32), jnp.zeros((batch,), jnp.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """One generation over B slots.

    Attributes:
        tokens: prompt, then output, [B, C] int32; the root is the last known token.
        lengths: committed tokens, [B] int32; the root stands at this index, not yet committed.
        cache: the target's keys and values of the committed tokens.
        drafter: the drafter's own state.
        reason: RUNNING, STOPPED, LENGTH or FAILED, [B] int32.
        requests: what was asked.
        log: what each round did.
        last: the last round.
        history: of committed tokens, where penalties look back; else None.
        logprobs: of emitted tokens, where a request wants them; else None.
    """

    tokens: Int[Array, "B C"]
    lengths: Int[Array, "B"]
    cache: KVCache
    drafter: Any
    reason: Int[Array, "B"]
    requests: Requests
    log: RoundLog
    last: LastRound
    history: History | None = None
    logprobs: LogprobLog | None = None

    @property
    def active(self) -> Bool[Array, "B"]:
        """Slots that still generate."""
        return self.reason == RUNNING

    @property
    def root(self) -> Int[Array, "B"]:
        """The last known token of each slot."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None], axis=1)[:, 0]
