"""Tree building, one node after another."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.tree_build.links import TreeLinks, own_bits


def build_tree_reference(parent: Int32[Array, "B T"], valid: Bool[Array, "B T"]) -> TreeLinks:
    """The definition every implementation is tested against; see `api.build_tree`."""
    return TreeLinks(*jax.vmap(_build_one)(parent, valid))


def _build_one(parent: Int32[Array, " T"], valid: Bool[Array, " T"]) -> tuple[Array, ...]:
    nodes = parent.shape[0]
    own = own_bits(nodes)

    def add(node: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        # A parent precedes its children, so by the time a node is added its parent is final.
        depth, ancestors, first_child, next_sibling, last_child, alive = state
        above = parent[node]
        inside = (above >= 0) & (above < node)
        above = jnp.where(inside, above, 0)
        live = valid[node] & inside & alive[above]
        depth = depth.at[node].set(jnp.where(live, depth[above] + 1, 0))
        ancestors = ancestors.at[node].set(
            jnp.where(live, ancestors[above], jnp.uint32(0)) | own[node]
        )
        elder = last_child[above]
        first_child = first_child.at[above].set(
            jnp.where(live & (elder < 0), node, first_child[above])
        )
        elder_at = jnp.where(live & (elder >= 0), elder, nodes)  # `nodes` is dropped
        next_sibling = next_sibling.at[elder_at].set(node, mode="drop")
        last_child = last_child.at[above].set(jnp.where(live, node, elder))
        return depth, ancestors, first_child, next_sibling, last_child, alive.at[node].set(live)

    none = jnp.full((nodes,), -1, jnp.int32)
    alive = jnp.zeros((nodes,), bool).at[0].set(True)
    state = (jnp.zeros((nodes,), jnp.int32), own, none, none, none, alive)
    return jax.lax.fori_loop(1, nodes, add, state)[:4]


def select_links_reference(
    selected: Int32[Array, "B N"], parents: Int32[Array, "B M"], *, topk: int
) -> tuple[Int32[Array, "B T"], Bool[Array, "B T"]]:
    """The definition of `api.select_links`: one candidate after another."""
    return jax.vmap(lambda s, p: _select_one(s, p, topk))(selected, parents)


def _select_one(selected: Array, parents: Array, topk: int) -> tuple[Array, Array]:
    count = selected.shape[0]
    table = jnp.concatenate([parents, jnp.full((1,), -1, jnp.int32)])  # never empty
    candidates = topk * max(parents.shape[0], 1)

    def add(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        parent, valid = state
        candidate = selected[i]
        group = candidate // topk
        above = table[jnp.clip(group, 0, table.shape[0] - 1)]
        earlier = jnp.arange(count) < i
        fresh = ~(earlier & (selected == candidate)).any()
        found = earlier & (selected == above) & valid[1:]
        node = jnp.where(group == 0, 0, 1 + jnp.argmax(found).astype(jnp.int32))
        known = (candidate >= 0) & (candidate < candidates) & fresh
        live = known & ((group == 0) | found.any())
        return parent.at[i + 1].set(jnp.where(live, node, -1)), valid.at[i + 1].set(live)

    parent = jnp.full((count + 1,), -1, jnp.int32)
    valid = jnp.zeros((count + 1,), bool).at[0].set(True)
    return jax.lax.fori_loop(0, count, add, (parent, valid))
