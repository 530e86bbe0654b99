"""The public walks: checks, then one of the implementations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks, dispatch
from pallas_kernels.tree_build.links import TreeLinks
from pallas_kernels.tree_walk.config import TreeWalkConfig
from pallas_kernels.tree_walk.walk import Walk
from pallas_kernels.tree_walk.xla import greedy_walk_xla, sampling_walk_xla

__all__ = ["Links", "Walk", "greedy_walk", "sampling_walk"]

# Either `TreeLinks`, or (parent, first_child, next_sibling), each [B, T] int32 with -1 for none.
Links = TreeLinks | tuple[Array, Array, Array]


def greedy_walk(
    token: Int32[Array, "B T"],
    links: Links,
    predict: Int32[Array, "B T"],
    *,
    max_path: int,
    implementation: str | None = None,
    config: TreeWalkConfig | None = None,
) -> Walk:
    """Accepts the drafted tokens that the target would have chosen.

    From the root, descends to the lowest child whose token equals `predict` at the node reached,
    at most `max_path - 1` times. Padding is nobody's child and is never reached.

    Args:
        token: the token at every node.
        links: `TreeLinks`, or (parent, first_child, next_sibling) of the same tree; padding and
            the root have parent -1.
        predict: the target's token after every node.
        max_path: P, the most nodes on a path, the root included.
        implementation: None, "xla", "triton" or "interpret"; see `pallas_kernels.dispatch`.
        config: launch shape of the kernel; None takes the heuristic's.

    Returns:
        `Walk` with path [B, P], length [B] and bonus [B].

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
        NotImplementedError: a named kernel that does not cover the call.

    Source: SGLang's `verify_tree_greedy`; its accept count is `length - 1`.
    """
    op = "greedy_walk"
    arrays = _check_tree(op, token, links, max_path)
    checks.shape(op, "predict", predict, token.shape)
    checks.dtype(op, "predict", predict, jnp.int32)
    table = {
        "xla": greedy_walk_xla,
        "triton": functools.partial(_greedy_kernel, config=config, interpret=False),
        "interpret": functools.partial(_greedy_kernel, config=config, interpret=True),
    }
    with jax.named_scope(op):
        return dispatch.call(op, implementation, table, *arrays, predict, max_path=max_path)


def sampling_walk(
    token: Int32[Array, "B T"],
    links: Links,
    target_probs: Float[Array, "B T V"],
    uniform: Float[Array, "B T"],
    uniform_final: Float[Array, " B"],
    *,
    max_path: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    implementation: str | None = None,
    config: TreeWalkConfig | None = None,
) -> Walk:
    """Accepts drafted tokens so that the emitted ones follow the target's distribution.

    At node c, `uniform[:, c]` decides among its children in order: a child of probability
    `p > 0` is accepted if `uniform < (sum over it and its elder siblings) / threshold_acc`, or if
    `p >= threshold_single`. Where none is accepted the bonus is drawn with `uniform_final` from
    what the target gives to other tokens than the children's; where the path is full, or ends
    at a leaf, from the whole of it. With both thresholds at 1 and distinct siblings this is
    exact, and a drafted token's acceptance probability is the target's probability of it. Lower
    thresholds accept more and change the distribution.

    The sums are float32 in an order of the implementation's own, so implementations may differ
    where a uniform falls within rounding of a boundary.

    Args:
        token: the token at every node; siblings must be distinct.
        links: `TreeLinks`, or (parent, first_child, next_sibling); see `greedy_walk`.
        target_probs: float32, the target's distribution after every node.
        uniform: float32 in [0, 1), one per node.
        uniform_final: float32 in [0, 1), one per slot.
        max_path: P, the most nodes on a path, the root included.
        threshold_single: accept any child at least this probable; 1 keeps the rule exact.
        threshold_acc: divides the running sum; clamped to 1e-9; 1 keeps the rule exact.
        implementation: None, "xla", "triton" or "interpret"; see `pallas_kernels.dispatch`.
        config: launch shape of the kernel; None takes the heuristic's.

    Returns:
        `Walk` with path [B, P], length [B] and bonus [B].

    Raises:
        ValueError: shapes, dtypes or thresholds that do not fit, or an unknown implementation.
        NotImplementedError: a named kernel that does not cover the call.

    Source: SGLang's `tree_speculative_sampling_target_only`.
    """
    op = "sampling_walk"
    arrays = _check_tree(op, token, links, max_path)
    checks.shape(op, "target_probs", target_probs, (*token.shape, "V"))
    checks.shape(op, "uniform", uniform, token.shape)
    checks.shape(op, "uniform_final", uniform_final, token.shape[:1])
    for name, array in (
        ("target_probs", target_probs),
        ("uniform", uniform),
        ("uniform_final", uniform_final),
    ):
        checks.dtype(op, name, array, jnp.float32)
    for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{op}: {name} is {value}, expected a number from 0 to 1")
    table = {
        "xla": sampling_walk_xla,
        "triton": functools.partial(_sampling_kernel, config=config, interpret=False),
        "interpret": functools.partial(_sampling_kernel, config=config, interpret=True),
    }
    with jax.named_scope(op):
        return dispatch.call(
            op,
            implementation,
            table,
            *arrays,
            target_probs,
            uniform,
            uniform_final,
            max_path=max_path,
            threshold_single=float(threshold_single),
            threshold_acc=max(float(threshold_acc), 1e-9),
        )


def _greedy_kernel(*args: Array, **options: Any) -> Walk:
    # Imported on use: the Pallas modules take a second to load and CPU users never need them.
    from pallas_kernels.tree_walk.triton import greedy_walk_triton

    return greedy_walk_triton(*args, **options)


def _sampling_kernel(*args: Array, **options: Any) -> Walk:
    from pallas_kernels.tree_walk.triton import sampling_walk_triton

    return sampling_walk_triton(*args, **options)


def _check_tree(
    op: str, token: Array, links: tuple[Array, ...], max_path: int
) -> tuple[Array, ...]:
    checks.shape(op, "token", token, ("B", "T"))
    checks.dtype(op, "token", token, jnp.int32)
    if max_path < 1:
        raise ValueError(f"{op}: max_path is {max_path}, expected at least 1 (the root)")
    if isinstance(links, TreeLinks):
        parts = (links.parent, links.first_child, links.next_sibling)
    else:
        parts = tuple(links)
    if len(parts) != 3:
        raise ValueError(
            f"{op}: links has {len(parts)} parts, expected TreeLinks or "
            "(parent, first_child, next_sibling)"
        )
    for name, array in zip(("parent", "first_child", "next_sibling"), parts, strict=True):
        checks.shape(op, name, array, token.shape)
        checks.dtype(op, name, array, jnp.int32)
    return token, *parts
