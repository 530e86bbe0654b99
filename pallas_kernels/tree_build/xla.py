"""Tree building for the whole batch at once, in log2(T) rounds of pointer doubling."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.tree_build.links import TreeLinks, own_bits


def build_tree_xla(parent: Int32[Array, "B T"], valid: Bool[Array, "B T"]) -> TreeLinks:
    """See `api.build_tree` for the contract."""
    batch, nodes = parent.shape
    node = jnp.arange(nodes, dtype=jnp.int32)
    own = jnp.broadcast_to(own_bits(nodes)[None], (batch, nodes, own_bits(nodes).shape[-1]))

    # The root and every broken node point at themselves, so doubling needs no end test:
    # whoever arrives at node 0 hangs on the tree, everybody else hangs on a broken node.
    linked = valid & (parent >= 0) & (parent < node[None, :])
    jump = jnp.where(linked, parent, node[None, :])
    depth = linked.astype(jnp.int32)
    ancestors = own
    for _ in range(max(nodes - 1, 0).bit_length()):
        depth = depth + jnp.take_along_axis(depth, jump, axis=1)
        ancestors = ancestors | jnp.take_along_axis(ancestors, jump[:, :, None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    alive = (jump == 0) & (linked | (node == 0)[None, :])

    depth = jnp.where(alive, depth, 0)
    ancestors = jnp.where(alive[:, :, None], ancestors, own)
    parent = jnp.where(alive & (node > 0)[None, :], parent, -1)
    child = parent[:, None, :] == node[None, :, None]  # [B, above, below]
    first_child = _lowest(child, node)
    siblings = (parent[:, :, None] == parent[:, None, :]) & (parent >= 0)[:, :, None]
    next_sibling = _lowest(siblings & (node[None, :] > node[:, None])[None], node)
    return TreeLinks(depth, ancestors, first_child, next_sibling)


def _lowest(mask: Bool[Array, "B T T"], node: Int32[Array, " T"]) -> Int32[Array, "B T"]:
    nodes = node.shape[0]
    lowest = jnp.where(mask, node[None, None, :], nodes).min(axis=-1)
    return jnp.where(lowest < nodes, lowest, -1)


def select_links_xla(
    selected: Int32[Array, "B N"], parents: Int32[Array, "B M"], *, topk: int
) -> tuple[Int32[Array, "B T"], Bool[Array, "B T"]]:
    """See `api.select_links` for the contract."""
    batch, count = selected.shape
    candidates = topk * max(parents.shape[1], 1)
    known = (selected >= 0) & (selected < candidates)
    group = jnp.where(known, selected // topk, 0)
    if parents.shape[1]:
        above = jnp.take_along_axis(parents, group, axis=1)
    else:  # a one-step tree has no table: every candidate hangs on the root
        above = jnp.full_like(group, -1)

    at = jnp.arange(count, dtype=jnp.int32)
    earlier = (at[None, :] < at[:, None])[None]  # [1, below, above]
    repeated = (earlier & (selected[:, :, None] == selected[:, None, :])).any(axis=-1)
    known &= ~repeated
    match = earlier & (above[:, :, None] == selected[:, None, :]) & known[:, None, :]
    found = jnp.where(match, at[None, None, :], count).min(axis=-1)  # [B, N]
    parent = jnp.where(group == 0, 0, 1 + found)
    linked = known & (parent <= count)

    # Node numbers from here on; the root leads. A node lives if its chain of parents ends there.
    root = jnp.zeros((batch, 1), jnp.int32)
    node = jnp.arange(count + 1, dtype=jnp.int32)[None, :]
    linked = jnp.concatenate([jnp.zeros((batch, 1), bool), linked], axis=1)
    parent = jnp.concatenate([root, parent], axis=1)
    jump = jnp.where(linked, parent, node)
    for _ in range(count.bit_length()):
        jump = jnp.take_along_axis(jump, jump, axis=1)
    valid = jump == 0
    return jnp.where(valid & linked, parent, -1), valid
