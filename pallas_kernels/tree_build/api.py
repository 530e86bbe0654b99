"""The public tree-building functions: from parents, or from a drafter's selected candidates."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels import checks, dispatch
from pallas_kernels.tree_build.config import TreeBuildConfig
from pallas_kernels.tree_build.links import TreeLinks
from pallas_kernels.tree_build.xla import build_tree_xla, select_links_xla


def build_tree(
    parent: Int32[Array, "B T"],
    valid: Bool[Array, "B T"],
    *,
    implementation: str | None = None,
    config: TreeBuildConfig | None = None,
) -> TreeLinks:
    """Depth, ancestor bits and child links of every tree in the batch.

    Node 0 is the root, whatever its entries say. A valid node's parent is valid and precedes it;
    a node that breaks this, and everything below it, is treated as padding: depth 0, its own
    ancestor bit only, links -1, nobody's child. No parent value can lead outside the tree.

    Args:
        parent: index of each node's parent; the root's entry and padding's are ignored.
        valid: False marks padding.
        implementation: None, "xla", "triton" or "interpret"; see `pallas_kernels.dispatch`.
        config: launch shape of the kernel; None takes the heuristic's.

    Returns:
        `TreeLinks`; a node's position is `lengths[:, None] + depth`.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
        NotImplementedError: a named kernel that does not cover the call.

    Source: the same arrays as SGLang's `build_tree_kernel_efficient` (ancestor mask, positions,
    retrieve_next_token, retrieve_next_sibling).
    """
    op = "build_tree"
    checks.shape(op, "parent", parent, ("B", "T"))
    checks.shape(op, "valid", valid, parent.shape)
    checks.dtype(op, "parent", parent, jnp.int32)
    checks.dtype(op, "valid", valid, jnp.bool_)
    if parent.shape[1] == 0:
        raise ValueError(f"{op}: parent has shape {parent.shape}, expected at least the root")
    table = {
        "xla": build_tree_xla,
        "triton": functools.partial(_build_kernel, config=config, interpret=False),
        "interpret": functools.partial(_build_kernel, config=config, interpret=True),
    }
    with jax.named_scope(op):
        return dispatch.call(op, implementation, table, parent, valid)


def select_links(
    selected: Int32[Array, "B N"], parents: Int32[Array, "B M"], topk: int
) -> tuple[Int32[Array, "B T"], Bool[Array, "B T"]]:
    """Parents of a tree selected from a drafter's candidates.

    Candidates are numbered flat: `topk` below the root, then `topk**2` per later step. Candidate
    c belongs to group `c // topk`; group 0 hangs on the root, and group g on the candidate
    `parents[:, g]`. Node t of the tree is `selected[:, t - 1]`; node 0 is the root.

    A selection that is not closed under parents is refused node by node: an orphan (its parent
    is not selected before it), a repeated or an out-of-range candidate, and every descendant of
    one become invalid padding with parent -1. All other nodes keep their places.

    Args:
        selected: T - 1 candidate numbers per slot, ascending; negative ones are padding.
        parents: the drafter's table, `topk * (num_steps - 1) + 1` wide (empty for one step).
        topk: children kept per frontier node.

    Returns:
        parent: [B, T] int32, -1 for the root and for padding.
        valid: [B, T] bool.

    Raises:
        ValueError: shapes, dtypes or topk that do not fit together.

    Source: SGLang's `organize_draft_results` and `build_tree_kernel_efficient`, which walk past
    the end of the selection where this refuses the node.
    """
    _check_selection("select_links", selected, parents, topk)
    with jax.named_scope("select_links"):
        return select_links_xla(selected, parents, topk=topk)


def build_tree_from_selection(
    selected: Int32[Array, "B N"],
    parents: Int32[Array, "B M"],
    topk: int,
    *,
    implementation: str | None = None,
    config: TreeBuildConfig | None = None,
) -> tuple[Int32[Array, "B T"], Bool[Array, "B T"], TreeLinks]:
    """`select_links` and `build_tree` together; one launch where the kernel runs.

    Returns:
        parent [B, T] int32, valid [B, T] bool and the tree's links; arguments, rules and errors
        are those of the two functions.
    """
    op = "build_tree_from_selection"
    _check_selection(op, selected, parents, topk)
    table = {
        "xla": _select_and_build_xla,
        "triton": functools.partial(_select_kernel, config=config, interpret=False),
        "interpret": functools.partial(_select_kernel, config=config, interpret=True),
    }
    with jax.named_scope(op):
        return dispatch.call(op, implementation, table, selected, parents, topk=topk)


def _select_and_build_xla(
    selected: Array, parents: Array, *, topk: int
) -> tuple[Array, Array, TreeLinks]:
    parent, valid = select_links_xla(selected, parents, topk=topk)
    return parent, valid, build_tree_xla(parent, valid)


def _build_kernel(parent: Array, valid: Array, **options: Any) -> TreeLinks:
    # Imported on use: the Pallas modules take a second to load and CPU users never need them.
    from pallas_kernels.tree_build.triton import build_tree_triton

    return build_tree_triton(parent, valid, **options)


def _select_kernel(
    selected: Array, parents: Array, **options: Any
) -> tuple[Array, Array, TreeLinks]:
    from pallas_kernels.tree_build.triton import build_tree_from_selection_triton

    return build_tree_from_selection_triton(selected, parents, **options)


def _check_selection(op: str, selected: Array, parents: Array, topk: int) -> None:
    checks.shape(op, "selected", selected, ("B", "T-1"))
    checks.shape(op, "parents", parents, (selected.shape[0], "topk*(num_steps-1)+1"))
    checks.dtype(op, "selected", selected, jnp.int32)
    checks.dtype(op, "parents", parents, jnp.int32)
    width = parents.shape[1]
    if topk < 1 or (width and (width - 1) % topk):
        raise ValueError(
            f"{op}: got topk={topk} and a parents table {width} wide, expected topk >= 1 and "
            f"topk * (num_steps - 1) + 1 columns"
        )
