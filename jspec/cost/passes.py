"""What one pass reads and multiplies, and how long a roofline takes for it.

Assumptions, for every figure here: each weight and each cached number crosses the memory bus once
a pass, whatever the number of nodes; activations stay on the chip; a multiply-add is two
operations; reading and multiplying overlap perfectly; launching costs nothing. Softmax, norms and
rotations are not counted.
"""

from dataclasses import dataclass

from jspec.cost.hardware import Hardware, number_bytes
from jspec.cost.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Bytes and operations of one or more passes.

    Attributes:
        weight_bytes: weights read.
        cache_bytes: keys and values read.
        operations: multiplications and additions.
        dtype: that weights are stored and multiplied in.
    """

    weight_bytes: float
    cache_bytes: float
    operations: float
    dtype: str = "bfloat16"

    @property
    def bytes(self) -> float:
        """All that is read."""
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        """I = operations a byte; to be compared with `Hardware.ridge`."""
        return self.operations / self.bytes

    def seconds(self, hardware: Hardware) -> float:
        """max(bytes / W, operations / peak): the roofline of Williams et al. 2009."""
        return max(self.bytes / hardware.bandwidth, self.operations / hardware.peak(self.dtype))

    def bound(self, hardware: Hardware) -> str:
        """`memory` or `compute`: which of the two a pass waits for."""
        return "memory" if self.intensity < hardware.ridge(self.dtype) else "compute"


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a pass runs through; a whole model or a draft head.

    Attributes:
        body: numbers that every token is multiplied with, the head not among them.
        head: numbers of the projection to logits, 0 for none.
        embedded: numbers looked up a token.
        experts: routed experts of a layer, X; 0 for none.
        experts_per_token: k.
        expert_layers: layers that have them.
        expert_params: numbers of one.
        pair_operations: of all layers, for one query token over one key.
        cache_numbers: that all layers hold a token.
    """

    body: float
    head: float = 0.0
    embedded: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    expert_layers: int = 0
    expert_params: float = 0.0
    pair_operations: float = 0.0
    cache_numbers: float = 0.0

    def weights_read(self, tokens: int) -> float:
        """Numbers that a pass over so many tokens reads.

        body + head + tokens · embedded + layers · expert · distinct(tokens).
        """
        distinct = distinct_experts(self.experts, self.experts_per_token, tokens)
        routed = self.expert_layers * self.expert_params * distinct
        return self.body + self.head + tokens * self.embedded + routed

    def cost(
        self,
        *,
        batch: int = 1,
        nodes: int = 1,
        context: int = 0,
        logit_nodes: int | None = None,
        dtype: str = "bfloat16",
    ) -> PassCost:
        """One pass over `nodes` tokens of each of `batch` slots.

        With n = batch · nodes tokens, w and c bytes a stored and a cached number:
        weights w · `weights_read`(n); cache c · batch · (context + nodes) · cache_numbers;
        operations 2 · n · (body + k · experts) + 2 · batch · logit_nodes · head
        + n · (context + nodes) · pair_operations (a node sees the prefix and at most the tree).

        Args:
            batch: B.
            nodes: T.
            context: S, committed tokens of each slot.
            logit_nodes: nodes of a slot whose logits are wanted; default all.
            dtype: of weights and products. The cache is bfloat16 under float8 weights.

        Raises:
            ValueError: a dtype that is not known.
        """
        each = number_bytes(dtype)
        tokens, seen = batch * nodes, context + nodes
        used = self.expert_layers * self.experts_per_token * self.expert_params
        logits = batch * (nodes if logit_nodes is None else logit_nodes)
        return PassCost(
            weight_bytes=float(each * self.weights_read(tokens)),
            cache_bytes=float(max(each, 2) * batch * seen * self.cache_numbers),
            operations=float(
                2 * tokens * (self.body + used)
                + 2 * logits * self.head
                + tokens * seen * self.pair_operations
            ),
            dtype=dtype,
        )


def distinct_experts(experts: int, per_token: int, tokens: int) -> float:
    """Experts of a layer that so many tokens use between them: X·(1 - (1 - k/X)^n) expected.

    Assumes that every token chooses k of X evenly and independently of the others; real routers are
    less even, so they read less.
    """
    if not experts:
        return 0.0
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens)


def network(shape: ModelShape) -> Network:
    """A whole model: its layers, final norm and head."""
    config, experts = shape.config, shape.config.experts
    return Network(
        body=float(shape.shared_params - shape.head_params),
        head=float(shape.head_params),
        embedded=float(config.hidden_size),
        experts=experts.num_experts if experts else 0,
        experts_per_token=experts.per_token if experts else 0,
        expert_layers=shape.expert_layers,
        expert_params=float(shape.expert_params),
        pair_operations=float(config.num_layers * shape.layer_pair_operations),
        cache_numbers=float(config.num_layers * shape.layer_cache_numbers),
    )


def target_pass(
    shape: ModelShape,
    *,
    batch: int = 1,
    nodes: int = 1,
    context: int = 0,
    dtype: str = "bfloat16",
) -> PassCost:
    """A pass of the target over T nodes of each of B slots; T = 1 is a step of plain decoding.

    Example: Llama-3-8B in bfloat16 reads 2 · (32 · 218.1 M + 525.3 M) = 15.01 GB a step, on an H100
    4.48 ms.

    Args:
        shape: of the target.
        batch, nodes, context, dtype: see `Network.cost`.
    """
    return network(shape).cost(batch=batch, nodes=nodes, context=context, dtype=dtype)


def memory_needed(
    shape: ModelShape, *, batch: int = 1, context: int = 0, dtype: str = "bfloat16"
) -> float:
    """Bytes of the weights and of B slots' caches of S tokens; nothing else."""
    cached = batch * context * shape.config.num_layers * shape.layer_cache_numbers
    each = number_bytes(dtype)
    return float(each * shape.num_params + max(each, 2) * cached)
