"""The walks as one kernel each: one program a slot."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import triton_backend as tb
from pallas_kernels.tree_walk.config import TreeWalkConfig
from pallas_kernels.tree_walk.walk import Walk


def greedy_walk_triton(
    token: Int32[Array, "B T"],
    parent: Int32[Array, "B T"],
    first_child: Int32[Array, "B T"],
    next_sibling: Int32[Array, "B T"],
    predict: Int32[Array, "B T"],
    *,
    max_path: int,
    config: TreeWalkConfig | None = None,
    interpret: bool = False,
) -> Walk:
    """See `api.greedy_walk` for the contract; the parent alone finds all children at once."""
    del first_child, next_sibling
    return _launch(
        functools.partial(_greedy_kernel, max_path=max_path),
        (token, parent, predict),
        "greedy_walk",
        max_path,
        config or TreeWalkConfig(),
        interpret,
    )


def sampling_walk_triton(
    token: Int32[Array, "B T"],
    parent: Int32[Array, "B T"],
    first_child: Int32[Array, "B T"],
    next_sibling: Int32[Array, "B T"],
    target_probs: Float[Array, "B T V"],
    uniform: Float[Array, "B T"],
    uniform_final: Float[Array, " B"],
    *,
    max_path: int,
    threshold_single: float,
    threshold_acc: float,
    config: TreeWalkConfig | None = None,
    interpret: bool = False,
) -> Walk:
    """See `api.sampling_walk` for the contract; children are asked in order, along the links."""
    del parent
    config = config or TreeWalkConfig(num_warps=8)
    kernel = functools.partial(
        _sampling_kernel,
        max_path=max_path,
        threshold_single=threshold_single,
        threshold_acc=threshold_acc,
        block_v=min(config.block_v, tb.next_power_of_two(target_probs.shape[-1])),
    )
    operands = (token, first_child, next_sibling, target_probs, uniform, uniform_final)
    return _launch(kernel, operands, "sampling_walk", max_path, config, interpret)


def _launch(
    kernel: Any,
    operands: tuple[Array, ...],
    name: str,
    max_path: int,
    config: TreeWalkConfig,
    interpret: bool,
) -> Walk:
    batch = operands[0].shape[0]
    if batch == 0:
        raise NotImplementedError(f"{name} kernel: empty batch; use implementation='xla'")

    def whole(shape: tuple[int, ...]) -> Any:
        zeros = (0,) * (len(shape) - 1)
        return tb.Spec((None, *shape[1:]), lambda b: (b, *zeros))

    shapes = [(batch, max_path), (batch,), (batch,)]
    outs = tb.launch(
        kernel,
        *operands,
        name=name,
        grid=(batch,),
        in_specs=[whole(operand.shape) for operand in operands],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return Walk(*outs)


def _greedy_kernel(
    token_ref: Any,
    parent_ref: Any,
    predict_ref: Any,
    path_ref: Any,
    length_ref: Any,
    bonus_ref: Any,
    *,
    max_path: int,
) -> None:
    nodes = token_ref.shape[0]
    lanes = tb.next_power_of_two(nodes)
    node = jnp.arange(lanes, dtype=jnp.int32)
    real = node < nodes
    token = tb.load(token_ref, node, mask=real, other=jnp.int32(0))
    parent = tb.load(parent_ref, node, mask=real, other=jnp.int32(-1))

    def descend(level: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        current, length = state
        match = (parent == current) & (token == predict_ref[current]) & (node > 0)
        child = jnp.min(jnp.where(match, node, lanes))
        # A walk that has stopped finds nothing later either: it asks the same node again.
        found = child < lanes
        current = jnp.where(found, child, current)
        path_ref[level] = current
        return current, length + found.astype(jnp.int32)

    path_ref[0] = jnp.int32(0)
    current, length = lax.fori_loop(1, max_path, descend, (jnp.int32(0), jnp.int32(1)))
    length_ref[()] = length
    bonus_ref[()] = predict_ref[current]


def _sampling_kernel(
    token_ref: Any,
    first_child_ref: Any,
    next_sibling_ref: Any,
    probs_ref: Any,
    uniform_ref: Any,
    uniform_final_ref: Any,
    path_ref: Any,
    length_ref: Any,
    bonus_ref: Any,
    *,
    max_path: int,
    threshold_single: float,
    threshold_acc: float,
    block_v: int,
) -> None:
    vocabulary = probs_ref.shape[-1]

    def ask_children(current: Array) -> Array:
        """The accepted child, or -1. Sums run child after child, as the rule is written."""
        coin = uniform_ref[current]

        def ask(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            child, total, _ = state
            p = probs_ref[current, token_ref[child]]
            total = total + p
            accept = (p > 0) & ((coin < total / threshold_acc) | (p >= threshold_single))
            following = next_sibling_ref[child]
            return (
                jnp.where(accept, -1, following),
                total,
                jnp.where(accept, child, -1),
            )

        start = (first_child_ref[current], jnp.float32(0), jnp.int32(-1))
        return lax.while_loop(lambda s: s[0] >= 0, ask, start)[2]

    def descend(level: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        current, length = state
        child = ask_children(current)
        found = child >= 0
        current = jnp.where(found, child, current)
        path_ref[level] = current
        return current, length + found.astype(jnp.int32)

    path_ref[0] = jnp.int32(0)
    current, length = lax.fori_loop(1, max_path, descend, (jnp.int32(0), jnp.int32(1)))
    length_ref[()] = length

    # Where the path is full the last node's children were never asked and keep their mass.
    first_rejected = jnp.where(length < max_path, first_child_ref[current], -1)

    def residual(block: Array) -> tuple[Array, Array]:
        ids = block * block_v + jnp.arange(block_v, dtype=jnp.int32)
        at = jnp.broadcast_to(current, ids.shape)
        mass = tb.load(probs_ref, at, ids, mask=ids < vocabulary, other=jnp.float32(0))

        def drop(state: tuple[Array, Array]) -> tuple[Array, Array]:
            child, mass = state
            return next_sibling_ref[child], jnp.where(ids == token_ref[child], 0.0, mass)

        _, mass = lax.while_loop(lambda s: s[0] >= 0, drop, (first_rejected, mass))
        return ids, jnp.where(mass > 0, mass, 0.0)

    def weigh(block: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        total, last = state
        ids, mass = residual(block)
        return total + jnp.sum(mass), jnp.maximum(last, jnp.max(jnp.where(mass > 0, ids, -1)))

    blocks = -(-vocabulary // block_v)
    total, last = lax.fori_loop(0, blocks, weigh, (jnp.float32(0), jnp.int32(-1)))
    goal = uniform_final_ref[()] * total

    def seek(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        block, below, _ = state
        ids, mass = residual(block)
        hit = (mass > 0) & (below + jnp.cumsum(mass) > goal)
        found = jnp.min(jnp.where(hit, ids, vocabulary))
        return block + 1, below + jnp.sum(mass), found

    start = (jnp.int32(0), jnp.float32(0), jnp.int32(vocabulary))
    *_, found = lax.while_loop(lambda s: (s[0] < blocks) & (s[2] == vocabulary), seek, start)
    # Rounding can leave the last sliver of mass unreached; it belongs to the last possible id.
    last = jnp.where(last < 0, vocabulary - 1, last)
    bonus_ref[()] = jnp.where(found < vocabulary, found, last)
