"""Chunked losses and blocked attention equal the plain ones, and hold no array they should not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from train.objectives import attention
from train.objectives.attention import unrolled_attention
from train.objectives.chunks import sum_chunks
from train.objectives.teacher import align, supervised_rows

K, B, T, E, V = 2, 2, 11, 6, 17


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def largest_array(function, *args):
    """Elements of the largest intermediate array."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            yield from (var.aval.size for var in equation.outvars if hasattr(var.aval, "size"))
            for value in equation.params.values():
                for inner in value if isinstance(value, tuple | list) else [value]:
                    if isinstance(inner, core.ClosedJaxpr):
                        yield from walk(inner.jaxpr)
                    elif isinstance(inner, core.Jaxpr):
                        yield from walk(inner)

    return max(walk(jax.make_jaxpr(function)(*args).jaxpr))


def loss(head, states, rows, frozen):
    far = jax.nn.logsumexp(jnp.einsum("kbce,ve->kbcv", states, head), axis=-1)
    far = far * rows["weight"].transpose(2, 0, 1) * frozen
    return far.sum(), {"far": far}


@pytest.mark.parametrize("chunk", [1, 4, 50])
def test_a_sum_over_chunks_is_the_sum(chunk):
    head, student = draw(V, E), draw(K, B, T, E, seed=1)
    supervised = jnp.asarray(np.random.default_rng(2).random((B, T)) < 0.5)
    documents = jnp.zeros((B, T), jnp.int32)
    rows = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    slots, active = align(supervised, documents, rows, K)
    weight = jnp.where(active.transpose(1, 2, 0), draw(B, T, K, seed=3), 0.0)
    two = jnp.asarray(2.0)

    def chunked(head, student):
        value, seen = sum_chunks(
            loss, head, student, {"weight": weight}, two, slots, active.any(axis=0), chunk=chunk
        )
        return 3.0 * value, seen["far"]

    def plain(head, student):
        placed = jnp.stack([jnp.roll(student[k], 1 + k, axis=1) for k in range(K)])
        value, seen = loss(head, placed, {"weight": weight}, two)
        return 3.0 * value, seen["far"]

    (a, far), da = jax.value_and_grad(chunked, argnums=(0, 1), has_aux=True)(head, student)
    (b, all_far), db = jax.value_and_grad(plain, argnums=(0, 1), has_aux=True)(head, student)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_allclose(jnp.where(active, far, 0.0), all_far, atol=1e-5)
    for x, y in zip(da, db):
        np.testing.assert_allclose(x, y, atol=1e-5)
    if chunk == 1:
        # Neither pass holds logits of more than a chunk.
        grad = jax.grad(lambda *x: chunked(*x)[0], argnums=(0, 1))
        assert largest_array(grad, head, student) < B * T * V


def dense(q, keys, values, own_keys, own_values, rows, documents):
    """Every score in one array, as the references have it."""
    groups = q.shape[2] // keys.shape[2]
    every = jnp.concatenate([keys, *own_keys], axis=1).repeat(groups, axis=2)
    mixed = jnp.concatenate([values, *own_values], axis=1).repeat(groups, axis=2)
    scores = jnp.einsum("brhd,bjhd->bhrj", q, every) * q.shape[-1] ** -0.5
    place = jnp.arange(keys.shape[1])
    here = jnp.take_along_axis(documents, rows, axis=1)
    seen = (place[None, None] <= rows[:, :, None]) & (documents[:, None] == here[:, :, None])
    diagonal = jnp.broadcast_to(jnp.eye(rows.shape[1], dtype=bool), (B, *[rows.shape[1]] * 2))
    seen = jnp.concatenate([seen, *[diagonal] * len(own_keys)], axis=2)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    return jnp.einsum("bhrj,bjhd->brhd", jax.nn.softmax(scores, axis=-1), mixed)


@pytest.mark.parametrize("later", [0, 2])
def test_attention_of_an_unrolled_step(monkeypatch, later):
    monkeypatch.setattr(attention, "BLOCK", 4)
    count = 9
    rows = jnp.asarray([[0, 1, 2, 4, 5, 6, 7, 9, 10], [1, 2, 3, 4, 5, 7, 8, 9, 10]], jnp.int32)
    documents = jnp.asarray([[0] * 6 + [1] * 5, [0] * 9 + [-1] * 2], jnp.int32)
    q, keys, values = draw(B, count, 4, 8), draw(B, T, 2, 8, seed=1), draw(B, T, 2, 8, seed=2)
    own_k = [draw(B, count, 2, 8, seed=10 + i) for i in range(later)]
    own_v = [draw(B, count, 2, 8, seed=20 + i) for i in range(later)]
    args = (q, keys, values, own_k, own_v)
    fast = unrolled_attention(*args, rows, documents)
    np.testing.assert_allclose(fast, dense(*args, rows, documents), atol=1e-5)

    def total(function):
        return lambda *x: (function(*x, rows, documents) ** 2).sum()

    which = (0, 1, 2, 3, 4)
    fast_grads = jax.grad(total(unrolled_attention), which)(*args)
    for a, b in zip(
        jax.tree.leaves(fast_grads), jax.tree.leaves(jax.grad(total(dense), which)(*args))
    ):
        np.testing.assert_allclose(a, b, atol=1e-4)
    grad = jax.grad(total(unrolled_attention), which)
    assert largest_array(grad, *args) < B * 4 * count * T


def test_draft_rows_meet_teacher_rows_of_their_own_text():
    mask = jnp.asarray([[0, 0, 0, 1, 1, 0, 0, 1, 1, 0]], bool)
    documents = jnp.asarray([[0] * 5 + [1] * 4 + [-1]], jnp.int32)
    supervised = supervised_rows(mask, documents)
    assert np.flatnonzero(supervised[0]).tolist() == [1, 2, 5, 6]  # each predicts t + 2
    rows = jnp.asarray([[1, 2, 5, 6, 10]], jnp.int32)
    slots, active = align(supervised, documents, rows, 2)
    # Teacher rows 2, 3, 6, 7 predict the supervised tokens 3, 4, 7, 8.
    assert np.flatnonzero(active[0, 0]).tolist() == [2, 3, 6, 7]
    assert slots[0, 0, jnp.asarray([2, 3, 6, 7])].tolist() == [0, 1, 2, 3]
    # At step 1 row s - 2: rows 0 and 4 do not exist, rows 1 and 5 do.
    assert np.flatnonzero(active[1, 0]).tolist() == [3, 7]
    assert slots[1, 0, jnp.asarray([3, 7])].tolist() == [0, 2]
