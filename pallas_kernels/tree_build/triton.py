"""Tree building as one kernel: one program a tree, one lane a node.

Every lane walks up its own chain of parents, setting the bit of each node it passes; the loop
ends when the deepest lane has arrived. Child links are minima over a lane-by-lane comparison.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels import triton_backend as tb
from pallas_kernels.tree_build.config import TreeBuildConfig
from pallas_kernels.tree_build.links import TreeLinks

# The comparison of all pairs of nodes lives in registers.
MOST_NODES = 256


def build_tree_triton(
    parent: Int32[Array, "B T"],
    valid: Bool[Array, "B T"],
    *,
    config: TreeBuildConfig | None = None,
    interpret: bool = False,
) -> TreeLinks:
    """See `api.build_tree` for the contract.

    Raises:
        NotImplementedError: more than 256 nodes.
    """
    batch, nodes = parent.shape
    outs = _launch(
        _build_kernel,
        (parent, valid),
        "build_tree",
        batch,
        nodes,
        with_parent=False,
        config=config,
        interpret=interpret,
    )
    return _links(*outs)


def build_tree_from_selection_triton(
    selected: Int32[Array, "B N"],
    parents: Int32[Array, "B M"],
    *,
    topk: int,
    config: TreeBuildConfig | None = None,
    interpret: bool = False,
) -> tuple[Int32[Array, "B T"], Bool[Array, "B T"], TreeLinks]:
    """See `api.build_tree_from_selection` for the contract.

    Raises:
        NotImplementedError: more than 256 nodes, or a tree of the root alone.
    """
    batch, count = selected.shape
    if count == 0:
        raise NotImplementedError("nothing selected: no kernel needed; use implementation='xla'")
    if parents.shape[1] == 0:  # a one-step tree: every candidate hangs on the root
        parents = jnp.full((batch, 1), -1, jnp.int32)
    kernel = functools.partial(_selection_kernel, topk=topk)
    *outs, parent, valid = _launch(
        kernel,
        (selected, parents),
        "build_tree_from_selection",
        batch,
        count + 1,
        with_parent=True,
        config=config,
        interpret=interpret,
    )
    return parent, valid != 0, _links(*outs)


def _links(depth: Array, ancestors: Array, first_child: Array, next_sibling: Array) -> TreeLinks:
    return TreeLinks(depth, ancestors, first_child, next_sibling)


def _launch(
    kernel: Any,
    operands: tuple[Array, ...],
    name: str,
    batch: int,
    nodes: int,
    *,
    with_parent: bool,
    config: TreeBuildConfig | None,
    interpret: bool,
) -> list[Array]:
    if nodes > MOST_NODES:
        raise NotImplementedError(
            f"{name} kernel: {nodes} nodes, at most {MOST_NODES}; use implementation='xla'"
        )
    if batch == 0:
        raise NotImplementedError(f"{name} kernel: empty batch; use implementation='xla'")
    config = config or TreeBuildConfig(num_warps=1 if nodes <= 32 else 4)
    words = -(-nodes // 32)
    lane = jax.ShapeDtypeStruct((batch, nodes), jnp.int32)
    shapes = [lane, jax.ShapeDtypeStruct((batch, nodes, words), jnp.uint32), lane, lane]
    shapes += [lane, lane] if with_parent else []

    def whole(shape: tuple[int, ...]) -> Any:
        zeros = (0,) * (len(shape) - 1)
        return tb.Spec((None, *shape[1:]), lambda b: (b, *zeros))

    return tb.launch(
        kernel,
        *operands,
        name=name,
        grid=(batch,),
        in_specs=[whole(operand.shape) for operand in operands],
        out_specs=[whole(shape.shape) for shape in shapes],
        out_shape=shapes,
        num_warps=config.num_warps,
        interpret=interpret,
    )


def _build_kernel(
    parent_ref: Any,
    valid_ref: Any,
    depth_ref: Any,
    ancestors_ref: Any,
    first_child_ref: Any,
    next_sibling_ref: Any,
) -> None:
    nodes = parent_ref.shape[0]

    def parent_of(node: Array) -> Array:
        """The parent, or -1 where there is none to trust."""
        inside = (node > 0) & (node < nodes)
        above = tb.load(parent_ref, node, mask=inside, other=jnp.int32(-1))
        usable = tb.load(valid_ref, node, mask=inside, other=False)
        return jnp.where(usable & (above >= 0) & (above < node), above, -1)

    everyone = jnp.arange(tb.next_power_of_two(nodes)) >= 0
    refs = (depth_ref, ancestors_ref, first_child_ref, next_sibling_ref)
    _emit(parent_of, nodes, everyone, *refs)


def _selection_kernel(
    selected_ref: Any,
    parents_ref: Any,
    depth_ref: Any,
    ancestors_ref: Any,
    first_child_ref: Any,
    next_sibling_ref: Any,
    parent_ref: Any,
    valid_ref: Any,
    *,
    topk: int,
) -> None:
    nodes = selected_ref.shape[0] + 1
    width = parents_ref.shape[0]
    lanes = tb.next_power_of_two(nodes)
    other = jnp.arange(lanes, dtype=jnp.int32)

    def candidate_of(node: Array) -> Array:
        """The candidate a node stands for, or -1 for the root and for padding."""
        inside = (node > 0) & (node < nodes)
        candidate = tb.load(selected_ref, node - 1, mask=inside, other=jnp.int32(-1))
        return jnp.where(candidate < topk * width, candidate, -1)

    candidates = candidate_of(other)

    def position(wanted: Array, before: Array) -> Array:
        """The first node that stands for a wanted candidate, or -1; it must come `before`."""
        same = (candidates[None, :] == wanted[:, None]) & (candidates[None, :] >= 0)
        same &= other[None, :] < before[:, None]
        lowest = jnp.min(jnp.where(same, other[None, :], lanes), axis=1)
        return jnp.where(lowest < lanes, lowest, -1)

    # A repeated candidate is refused; it is never found as a parent, since the first one is.
    fresh = position(candidates, other) < 0

    def parent_of(node: Array) -> Array:
        candidate = candidate_of(node)
        group = jnp.maximum(candidate, 0) // topk
        wanted = tb.load(parents_ref, group, mask=candidate >= 0, other=jnp.int32(-1))
        above = jnp.where(group == 0, 0, position(wanted, node))
        return jnp.where(candidate >= 0, above, -1)

    refs = (depth_ref, ancestors_ref, first_child_ref, next_sibling_ref)
    above, alive = _emit(parent_of, nodes, fresh, *refs)
    real = other < nodes
    tb.store(parent_ref, other, value=above, mask=real)
    tb.store(valid_ref, other, value=alive.astype(jnp.int32), mask=real)


def _emit(
    parent_of: Any,
    nodes: int,
    allowed: Array,
    depth_ref: Any,
    ancestors_ref: Any,
    first_child_ref: Any,
    next_sibling_ref: Any,
) -> tuple[Array, Array]:
    """Walks up from every allowed node and writes the links.

    Returns each node's parent, -1 for the root and for padding, and which nodes hang on the root.
    """
    lanes = tb.next_power_of_two(nodes)
    words = -(-nodes // 32)
    node = jnp.arange(lanes, dtype=jnp.int32)
    real = node < nodes

    def bits_of(at: Array, word: int, where: Array) -> Array:
        one = jnp.uint32(1) << (at & 31).astype(jnp.uint32)
        return jnp.where(where & ((at >> 5) == word), one, jnp.uint32(0))

    def climb(state: tuple[Array, ...]) -> tuple[Array, ...]:
        current, depth, alive, *bits = state
        above = parent_of(current)
        moved = above >= 0
        at = jnp.maximum(above, 0)
        bits = [b | bits_of(at, w, moved) for w, b in enumerate(bits)]
        # Arriving at node 0 is arriving at the root; stopping anywhere else is hanging loose.
        return (
            jnp.where(moved, above, -1),
            depth + moved.astype(jnp.int32),
            jnp.maximum(alive, (moved & (at == 0)).astype(jnp.int32)),
            *bits,
        )

    start = (
        jnp.where(real & allowed, node, -1),
        jnp.zeros((lanes,), jnp.int32),
        (node == 0).astype(jnp.int32),
        *(jnp.zeros((lanes,), jnp.uint32) for _ in range(words)),
    )
    _, depth, arrived, *bits = lax.while_loop(lambda s: jnp.max(s[0]) > 0, climb, start)
    alive = arrived > 0

    tb.store(depth_ref, node, value=jnp.where(alive, depth, 0), mask=real)
    for w, word in enumerate(bits):
        word = jnp.where(alive, word, jnp.uint32(0)) | bits_of(node, w, real)
        at = jnp.full((lanes,), w, jnp.int32)
        tb.store(ancestors_ref, node, at, value=word, mask=real)

    above = jnp.where(alive, parent_of(node), -1)
    child = above[None, :] == node[:, None]  # [above, below]
    lowest = jnp.min(jnp.where(child, node[None, :], lanes), axis=1)
    tb.store(first_child_ref, node, value=jnp.where(lowest < lanes, lowest, -1), mask=real)
    younger = (above[None, :] == above[:, None]) & (node[None, :] > node[:, None])
    younger &= (above >= 0)[:, None]
    lowest = jnp.min(jnp.where(younger, node[None, :], lanes), axis=1)
    tb.store(next_sibling_ref, node, value=jnp.where(lowest < lanes, lowest, -1), mask=real)
    return above, alive
