"""What drafting costs: which passes a round of each method takes, and what they read.

A pass over the accepted path (`extend`) leaves the hidden state that level 1 is read from, and
every further level is a pass over `topk` nodes (`step`), so num_steps levels take num_steps passes:
EAGLE's expansion, https://arxiv.org/abs/2406.16858, section 4.1. Medusa reads all levels from one
hidden state (https://arxiv.org/abs/2401.10774, section 3.1). Prompt lookup reads no weights.
"""

import abc
from dataclasses import dataclass
from typing import Literal

from jspec.cost.hardware import Hardware
from jspec.cost.passes import Network, PassCost, network
from jspec.cost.shapes import ModelShape, find_shape

EAGLE3_DRAFT_VOCAB = 32_000
"""Draft vocabulary of the published EAGLE-3 heads (SafeAILab)."""

KINDS = ("eagle", "eagle3", "medusa", "medusa-shared", "mtp", "ngram")
"""Drafters that `find_drafter` derives from the target's shape."""


class DrafterShape(abc.ABC):
    """The passes of a drafter.

    Attributes:
        name: for tables.
        max_steps: deepest level it can draft, None for no limit.
    """

    name: str
    max_steps: int | None = None

    @abc.abstractmethod
    def passes(
        self,
        *,
        num_steps: int,
        topk: int = 1,
        batch: int = 1,
        context: int = 0,
        dtype: str = "bfloat16",
    ) -> list[PassCost]:
        """Cost of every pass of a round, in order.

        Args:
            num_steps: levels below the root.
            topk: nodes of a level that are continued.
            batch, context, dtype: see `Network.cost`.

        Raises:
            ValueError: more levels than the drafter has.
        """

    def seconds(self, hardware: Hardware, **tree) -> float:
        """Roofline time of all passes of a round, one after the other; `tree` as in `passes`."""
        return sum(one.seconds(hardware) for one in self.passes(**tree))


@dataclass(frozen=True, kw_only=True)
class Recurrent(DrafterShape):
    """A network run once over the path and once for every level after the first.

    Attributes:
        extend: over the path of num_steps + 1 rows; logits of one row.
        step: over topk nodes.
    """

    name: str
    extend: Network
    step: Network

    def passes(self, *, num_steps, topk=1, batch=1, context=0, dtype="bfloat16"):
        common = {"batch": batch, "context": context, "dtype": dtype}
        first = self.extend.cost(nodes=num_steps + 1, logit_nodes=1, **common)
        return [first, *(self.step.cost(nodes=topk, **common) for _ in range(num_steps - 1))]


@dataclass(frozen=True, kw_only=True)
class Heads(DrafterShape):
    """Heads on one hidden state: a single pass, of as many of them as there are levels.

    Attributes:
        block: numbers of one head's residual blocks.
        projection: numbers of one projection to logits.
        shared: one projection for all heads: read once, multiplied once a head.
    """

    name: str
    max_steps: int
    block: float
    projection: float
    shared: bool

    def passes(self, *, num_steps, topk=1, batch=1, context=0, dtype="bfloat16"):
        if num_steps > self.max_steps:
            raise ValueError(
                f"num_steps={num_steps}, but {self.name} has {self.max_steps} heads, one a level."
            )
        own = 1 if self.shared else num_steps
        heads = Network(body=num_steps * self.block, head=own * self.projection)
        logits = num_steps if self.shared else 1
        return [heads.cost(batch=batch, logit_nodes=logits, dtype=dtype)]


@dataclass(frozen=True, kw_only=True)
class Lookup(DrafterShape):
    """No pass at all."""

    name: str

    def passes(self, *, num_steps, topk=1, batch=1, context=0, dtype="bfloat16"):
        return []


def relative_cost(draft: PassCost, target: PassCost, hardware: Hardware) -> float:
    """c = draft / target: time of one draft pass over that of one plain step.

    Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, section 3.4.
    """
    return draft.seconds(hardware) / target.seconds(hardware)


def eagle(shape: ModelShape, *, draft_vocab: int | None = None) -> Recurrent:
    """EAGLE-1 and EAGLE-2: a decoder layer of the target's shape under the target's head.

    A pass reads fc 2E·E, a layer E·(H + 2K)·D + H·D·E + 3·E·F and the head Vd·E. For Llama-3-8B:
    33.6 M + 218.1 M + 525.3 M, c = 0.104. The layer is dense even where the target has experts, as
    published heads are.

    Args:
        shape: of the target.
        draft_vocab: Vd, rows of the head that are read (FR-Spec); default all, V.
    """
    size = shape.config.hidden_size
    layer = shape.shared_layer_params()
    once = _feature_pass(shape, body=2 * size * size + layer, vocab=_vocab(shape, draft_vocab))
    return Recurrent(name="eagle", extend=once, step=once)


def eagle3(
    shape: ModelShape, *, draft_vocab: int | None = None, feature_layers: int = 3
) -> Recurrent:
    """EAGLE-3: a layer that reads 2E, three features fused once a committed token, its own head.

    A step reads a layer 2E·(H + 2K)·D + H·D·E + 3·E·F and the head Vd·E; `extend` also reads fc
    3E·E, 50.3 M for Llama-3-8B instead of EAGLE-1's 33.6 M (33.6 MB more). Published worked figures
    charge every step 229 µs (c = 0.051): EAGLE-1's layer and fc with a head of 32,000 rows, which
    is `eagle(shape, draft_vocab=32000)`. Counted as the layer really is (queries, keys and values
    read 2E, 25.2 M more; fc not read in a step), a step takes 224 µs (c = 0.050).

    Args:
        shape: of the target.
        draft_vocab: Vd; default 32,000, or V where it is smaller.
        feature_layers: features fused.
    """
    size = shape.config.hidden_size
    vocab = _vocab(shape, draft_vocab, default=EAGLE3_DRAFT_VOCAB)
    wider = shape.attention_params(2 * size) - shape.attention_params()
    # Norms of embedding and hidden state, where a plain layer has one; and the final one.
    layer = shape.shared_layer_params() + wider + 2 * size
    step = _feature_pass(shape, body=layer, vocab=vocab)
    extend = _feature_pass(shape, body=layer + feature_layers * size * size, vocab=vocab)
    return Recurrent(name="eagle3", extend=extend, step=step)


def medusa(
    shape: ModelShape,
    *,
    num_heads: int = 4,
    projection: Literal["own", "shared"] = "own",
    draft_vocab: int | None = None,
) -> Heads:
    """Medusa: a residual block E·E a head, then a projection Vd·E of its own or one for all.

    For Llama-3-8B, a block is 16.8 M and a projection 525.3 M: four heads with their own 2.168 B
    (4.34 GB, c = 0.289), with a shared one 592 M, that one cut to 32,000 rows 198 M. Biases of the
    blocks (E each) are not counted.

    Args:
        shape: of the target.
        num_heads: levels it can draft.
        projection: `own`, or `shared`.
        draft_vocab: Vd; default V.
    """
    size = shape.config.hidden_size
    return Heads(
        name="medusa" if projection == "own" else "medusa-shared",
        max_steps=num_heads,
        block=float(size * size),
        projection=float(_vocab(shape, draft_vocab) * size),
        shared=projection == "shared",
    )


def mtp(shape: ModelShape) -> Recurrent:
    """A multi-token-prediction module run recurrently: input projection 2E·E, one more layer of the
    target's last kind (with experts where it has them), three norms, and the target's head.

    DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2.

    Args:
        shape: of the target.
    """
    config, experts = shape.config, shape.config.experts
    size = config.hidden_size
    mixed = experts is not None
    body = 2 * size * size + shape.shared_layer_params(experts=mixed) + 3 * size
    once = Network(
        body=float(body),
        head=float(shape.head_params),
        embedded=float(size),
        experts=experts.num_experts if experts else 0,
        experts_per_token=experts.per_token if experts else 0,
        expert_layers=1 if experts else 0,
        expert_params=float(shape.expert_params),
        pair_operations=float(shape.layer_pair_operations),
        cache_numbers=float(shape.layer_cache_numbers),
    )
    return Recurrent(name="mtp", extend=once, step=once)


def standalone(model: ModelShape) -> Recurrent:
    """A small model of the same vocabulary; every pass reads all of it.

    Leviathan et al. 2023. For Llama-3.2-1B under Llama-3-8B: 2.47 GB, 0.74 ms, c = 0.165.
    """
    once = network(model)
    return Recurrent(name=model.name, extend=once, step=once)


def ngram() -> Lookup:
    """Prompt lookup: no weights, and the search is not counted."""
    return Lookup(name="ngram")


def find_drafter(name: str, target: ModelShape, *, draft_vocab: int | None = None) -> DrafterShape:
    """The drafter called `name` for a target.

    Args:
        name: one of `KINDS`, or a model of `find_shape` that drafts by itself.
        target: whose shape the head follows.
        draft_vocab: Vd, for those that may have fewer rows than V.

    Raises:
        ValueError: no such drafter, a draft vocabulary where there can be none, or a draft model of
            another vocabulary.
    """
    if name in ("eagle", "eagle3"):
        return {"eagle": eagle, "eagle3": eagle3}[name](target, draft_vocab=draft_vocab)
    if name in ("medusa", "medusa-shared"):
        shared = name == "medusa-shared"
        return medusa(target, projection="shared" if shared else "own", draft_vocab=draft_vocab)
    if draft_vocab is not None:
        raise ValueError(
            f"draft_vocab={draft_vocab}, but {name} drafts the whole vocabulary; leave it out."
        )
    if name in ("mtp", "ngram"):
        return mtp(target) if name == "mtp" else ngram()
    try:
        model = find_shape(name)
    except ValueError as error:
        raise ValueError(f"drafter {name!r}: expected {', '.join(KINDS)}, or {error}") from error
    if model.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"the draft model {model.name} has a vocabulary of {model.config.vocab_size} tokens, "
            f"the target {target.name} has {target.config.vocab_size}; take one of its family."
        )
    return standalone(model)


def _feature_pass(shape: ModelShape, *, body: int, vocab: int) -> Network:
    """One layer with a cache of its own, under a head."""
    return Network(
        body=float(body),
        head=float(vocab * shape.config.hidden_size),
        embedded=float(shape.config.hidden_size),
        pair_operations=float(shape.layer_pair_operations),
        cache_numbers=float(shape.layer_cache_numbers),
    )


def _vocab(shape: ModelShape, asked: int | None, *, default: int | None = None) -> int:
    full = shape.config.vocab_size
    if asked is not None and not 1 <= asked <= full:
        raise ValueError(f"draft_vocab={asked}; expected 1 to the target's {full}.")
    return min(full, default or full) if asked is None else asked
