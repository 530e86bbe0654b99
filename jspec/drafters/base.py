"""The contract between a drafter and the engine.

Every method is pure and is traced into the engine's single jitted step; a drafter object holds
static choices and its parameters only. The state is any pytree with a leading slot axis.
"""

import abc
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.targets.target import Target
from jspec.trees import Tree, TreeConfig, TreeSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftContext:
    """What a drafter may look at when it proposes.

    Attributes:
        tokens: every known token, [B, C] int32: prompt and output, the root last, at `lengths`.
        lengths: committed tokens, [B] int32.
        root: [B] int32, node 0 of the tree to come.
        active: [B]; finished slots need no draft.
        keys: [B, 2] raw key data, a stream apart from the one the target samples with.
        temperature: at which children are drawn, [B] float32, 0 for slots that take the best ones;
            None where no slot draws, and the draft is the same every time.
    """

    tokens: Int[Array, "B C"]
    lengths: Int[Array, "B"]
    root: Int[Array, "B"]
    active: Bool[Array, "B"]
    keys: UInt32[Array, "B 2"]
    temperature: Float[Array, "B"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Consecutive committed tokens with the target's view of them: a prompt chunk or a path.

    Attributes:
        tokens: [B, R] int32.
        next_tokens: the true token after each, [B, R] int32, across chunk ends too.
        start: committed length before these rows, [B] int32 (the position of row 0).
        count: rows that are real, [B] int32; what follows them is padding.
        hidden: the target's post-norm hidden states, [B, R, E].
        features: outputs of the drafter's `feature_layers`, [B, R, E] each.
    """

    tokens: Int[Array, "B R"]
    next_tokens: Int[Array, "B R"]
    start: Int[Array, "B"]
    count: Int[Array, "B"]
    hidden: Float[Array, "B R E"]
    features: tuple[Float[Array, "B R E"], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposal:
    """A round's draft.

    Attributes:
        tree: the nodes to verify.
        state: the drafter's state after drafting.
        probabilities: where the draft was sampled, what each node's children were drawn from
            (without replacement, in sibling order); rows of childless nodes are unused. None for
            a draft that is the same every time.
        token_map: target ids of the draft vocabulary, None where both vocabularies are one.
    """

    tree: Tree
    state: Any
    probabilities: Float[Array, "B T Vd"] | None = None
    token_map: Int[Array, "Vd"] | None = None

    def head(self, width: int) -> "Proposal":
        """The draft of the first `width` nodes."""
        drawn_from = None if self.probabilities is None else self.probabilities[:, :width]
        return replace(self, tree=self.tree.head(width), probabilities=drawn_from)


class Drafter(abc.ABC):
    """Proposes a tree of tokens a round.

    Attributes:
        name: for statistics and messages.
        description: what it is and where it came from, in a line.
        feature_layers: target layers whose output it reads, by layer id.
        may_abstain: it often proposes nothing; the engine then compiles a one-token pass beside
            the tree pass, and a round without a draft costs a plain decoding step.
        can_sample: `propose` draws children where the context has a temperature, and then returns
            the probabilities. A drawn tree must have a fixed shape: pruning by what was drawn
            would bias it.
        params: arrays; those shared with the target are the same arrays, held once.
    """

    name: str
    description: str = ""
    feature_layers: tuple[int, ...] = ()
    may_abstain: bool = False
    can_sample: bool = False
    params: Any = ()

    @abc.abstractmethod
    def check(self, target: Target, tree: TreeSpec) -> None:
        """Raise ValueError or NotImplementedError where target or tree do not fit."""

    def default_tree(self) -> TreeSpec:
        """What is drafted where nobody asks for a tree."""
        return TreeConfig()

    @abc.abstractmethod
    def init_state(self, params, batch: int, capacity: int) -> Any:
        """State of `batch` empty slots that may hold `capacity` tokens each."""

    @abc.abstractmethod
    def prefill(self, params, state, rows: Rows) -> Any:
        """Take in a chunk of the prompt."""

    @abc.abstractmethod
    def propose(self, params, state, context: DraftContext, tree: TreeSpec) -> Proposal:
        """Draft a tree of exactly `tree.num_nodes` nodes, padded where there is less to say."""

    @abc.abstractmethod
    def extend(self, params, state, rows: Rows, correct: Int[Array, "B"]) -> Any:
        """Take in the committed path with its true features.

        Args:
            rows: the path's nodes (root first), count 0 for finished slots.
            correct: drafted tokens that were accepted, [B] int32, before any cut by a stop.
        """
