"""Losses over a vocabulary, a few rows at a time: no [B, T, V] array exists in either pass.

The gradient is computed in the forward pass, chunk by chunk, and kept only with respect to the
draft states and the parameters, which are small (the idea of Liger's fused linear cross-entropy,
https://arxiv.org/abs/2410.10989). Rows without weight cost nothing: each sequence's used rows are
moved to the front, and the loop ends after the last of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

ChunkLoss = Callable[[Any, Array, PyTree, PyTree], tuple[Array, PyTree]]
"""(params, student [K, B, c, E], teacher [B, c, ...], frozen) -> (summed, metrics [K, B, c])."""


class _Plan(NamedTuple):
    order: Int[Array, "B T"]  # teacher rows, used ones first
    live: Bool[Array, "B T"]  # whether each of them is used
    visits: Int[Array, ""]
    slots: Int[Array, "K B T"]


def sum_chunks(
    loss: ChunkLoss,
    params: PyTree,
    student: Float[Array, "K B R E"],
    teacher: PyTree,
    frozen: PyTree,
    slots: Int[Array, "K B T"],
    used: Bool[Array, "B T"],
    *,
    chunk: int,
) -> tuple[Float[Array, ""], PyTree]:
    """Sum of a loss over teacher rows, differentiable in `params` and `student`.

    Args:
        loss: of one chunk; weights belong into it. It must be 0 where a row is unused.
        params: what `loss` projects with.
        student: states of K draft steps.
        teacher: leaves [B, T, ...], the target's view of each row.
        frozen: whatever else `loss` reads; no gradient.
        slots: which row of `student` meets teacher row t at step k; R for none.
        used: teacher rows to visit.
        chunk: rows a sequence and visit.

    Returns:
        The sum, and the metrics as [K, B, T], 0 for rows that were not visited.
    """
    chunk = min(chunk, used.shape[1])
    tail = ((0, 0), (0, -used.shape[1] % chunk))
    plan = _Plan(
        order=jnp.pad(jnp.argsort(~used, axis=1, stable=True).astype(jnp.int32), tail),
        live=jnp.pad(~jnp.sort(~used, axis=1), tail),
        visits=(used.sum(axis=1, dtype=jnp.int32).max() + chunk - 1) // chunk,
        slots=slots,
    )
    return _sum_chunks(loss, chunk, params, student, teacher, frozen, plan)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_chunks(loss, chunk, params, student, teacher, frozen, plan):
    def value(states, rows):
        return loss(params, states, rows, frozen), None

    return _visit(value, chunk, params, student, teacher, plan)[0]


def _forward(loss, chunk, params, student, teacher, frozen, plan):
    def value_and_grad(states, rows):
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, states, rows, frozen)

    result, grads = _visit(value_and_grad, chunk, params, student, teacher, plan)
    return result, (grads, teacher, frozen, plan)


def _backward(loss, chunk, saved, cotangents):
    grads, *constant = saved
    scaled = jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), grads)
    return *scaled, *jax.tree.map(_no_gradient, tuple(constant))


def _no_gradient(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return jnp.zeros(x.shape, jax.dtypes.float0)


_sum_chunks.defvjp(_forward, _backward)


def _visit(function, chunk, params, student, teacher, plan: _Plan):
    """Run `function` on chunk after chunk; sums its values and gradients, spreads its metrics."""
    steps, batch, width, _ = student.shape
    total = plan.slots.shape[2]
    padded = jnp.pad(student, ((0, 0), (0, 0), (0, 1), (0, 0)))
    slot_index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    step_index = jnp.arange(steps, dtype=jnp.int32)[:, None, None]

    def part(index):
        at = jax.lax.dynamic_slice_in_dim(plan.order, index * chunk, chunk, axis=1)  # [B, c]
        live = jax.lax.dynamic_slice_in_dim(plan.live, index * chunk, chunk, axis=1)
        slot = jnp.where(live[None], plan.slots[:, slot_index, at], width)  # [K, B, c]
        states = jnp.take_along_axis(padded, slot[..., None], axis=2)

        def taken(x):
            """Zeros for what only fills up the last chunk, its weight among them."""
            along = (..., *(None,) * (x.ndim - 2))
            found = jnp.take_along_axis(x, at[along], axis=1)
            return jnp.where(live[along], found, jnp.zeros_like(found))

        rows = jax.tree.map(taken, teacher)
        # What only fills up the last chunk is written nowhere.
        return jnp.where(live, at, total), slot, states, rows

    def visit(index, carry):
        value, metrics, grads = carry
        at, slot, states, rows = part(index)
        (more, seen), new = function(states, rows)
        metrics = jax.tree.map(
            lambda whole, x: whole.at[:, slot_index, at].set(x, mode="drop"), metrics, seen
        )
        if new is not None:
            d_params = jax.tree.map(lambda whole, x: whole + x, grads[0], new[0])
            d_student = grads[1].at[step_index, slot_index[None], slot].add(new[1], mode="drop")
            grads = (d_params, d_student)
        return value + more, metrics, grads

    _, _, states, rows = jax.eval_shape(part, jnp.zeros((), jnp.int32))
    (_, seen), new = jax.eval_shape(function, states, rows)
    metrics = jax.tree.map(lambda x: jnp.zeros((steps, batch, total), x.dtype), seen)
    grads = None if new is None else (jax.tree.map(jnp.zeros_like, params), jnp.zeros_like(student))
    start = (jnp.zeros((), jnp.float32), metrics, grads)
    value, metrics, grads = jax.lax.fori_loop(0, plan.visits, visit, start)
    return (value, metrics), grads
