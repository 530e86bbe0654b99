"""Every implementation of the path commit against plain Python, and that it is in place."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import each_implementation, run

import pallas_kernels as pk


def make(rng, batch, nodes, capacity, trails, dtype=np.float32):
    caches = [rng.normal(size=(batch, capacity, *trail)).astype(dtype) for trail in trails]
    trees = [rng.normal(size=(batch, nodes, *trail)).astype(dtype) for trail in trails]
    return caches, trees


def oracle(caches, trees, path, path_length, lengths):
    out = [cache.copy() for cache in caches]
    for cache, tree in zip(out, trees, strict=True):
        for b in range(len(path)):
            for j in range(min(path_length[b], path.shape[1])):
                row, node = lengths[b] + j, path[b, j]
                if 0 <= row < cache.shape[1] and 0 <= node < tree.shape[1]:
                    cache[b, row] = tree[b, node]
    return out


def check(implementation, caches, trees, path, path_length, lengths, **options):
    arrays = [jnp.asarray(x, jnp.int32) for x in (path, path_length, lengths)]
    out = run(
        pk.commit_path,
        implementation,
        tuple(map(jnp.asarray, caches)),
        tuple(map(jnp.asarray, trees)),
        *arrays,
        **options,
    )
    for got, want in zip(out, oracle(caches, trees, path, path_length, lengths), strict=True):
        np.testing.assert_array_equal(got, want)


SHAPE = {"batch": 4, "nodes": 9, "capacity": 12, "trails": [(2, 16), (2, 16), (3, 5), (7,)]}


@each_implementation
def test_ragged_lengths_empty_paths_and_the_end_of_the_capacity(implementation):
    rng = np.random.default_rng(0)
    caches, trees = make(rng, **SHAPE)
    path = rng.integers(0, 9, (4, 5))
    for path_length, lengths in (
        ([0, 1, 3, 5], [0, 4, 7, 2]),
        ([5, 5, 5, 5], [7, 8, 11, 12]),  # rows 12 and on do not exist
        ([0, 0, 0, 0], [3, 12, 0, 5]),
        ([5, 2, 1, 4], [0, 10, 30, 9]),
    ):
        check(implementation, caches, trees, path, np.array(path_length), np.array(lengths))


@each_implementation
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random(implementation, seed):
    rng = np.random.default_rng(seed)
    caches, trees = make(rng, **SHAPE)
    path = rng.integers(-1, 10, (4, 5))  # entries that name no node are dropped
    check(implementation, caches, trees, path, rng.integers(0, 6, 4), rng.integers(-2, 14, 4))


def test_layers_spread_over_programs_and_rows_over_chunks():
    rng = np.random.default_rng(1)
    caches, trees = make(rng, 2, 4, 6, [(3000,)] * 3)
    config = pk.CommitPathConfig(arrays_per_program=2)
    path, length, lengths = np.array([[0, 3], [2, 1]]), np.array([2, 1]), np.array([1, 4])
    check("interpret", caches, trees, path, length, lengths, config=config)


@each_implementation
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8])
def test_other_dtypes_are_moved_untouched(implementation, dtype):
    rng = np.random.default_rng(2)
    caches, trees = make(rng, 2, 4, 6, [(2, 16)], dtype=dtype)
    path, length, lengths = np.array([[0, 3], [2, 1]]), np.array([2, 1]), np.array([1, 5])
    check(implementation, caches, trees, path, length, lengths)


@pytest.mark.parametrize("in_loop", [False, True])
def test_caches_are_not_copied(in_loop):
    rng = np.random.default_rng(3)
    caches, trees = make(rng, 2, 4, 640, [(2, 16), (2, 16)])
    caches, trees = tuple(map(jnp.asarray, caches)), tuple(map(jnp.asarray, trees))
    path = jnp.asarray([[0, 3], [2, 1]], jnp.int32)
    count = jnp.asarray([2, 1], jnp.int32)

    def commit(caches, lengths):
        return pk.commit_path(caches, trees, path, count, lengths, implementation="xla")

    def loop(caches, lengths):
        def body(state):
            step, caches, lengths = state
            return step + 1, commit(caches, lengths), lengths + count

        return jax.lax.while_loop(lambda s: s[0] < 5, body, (jnp.int32(0), caches, lengths))[1]

    step = jax.jit(loop if in_loop else commit, donate_argnums=0)
    text = step.lower(caches, jnp.zeros((2,), jnp.int32)).compile().as_text()
    assert text.count("may-alias") == 2, "the donated caches are not reused"
    copies = re.findall(r"f32\[2,640,2,16\]\S* (?:copy|select|convert)\(", text)
    assert not copies, copies


def test_kernel_updates_in_place():
    rng = np.random.default_rng(4)
    caches, trees = make(rng, 2, 4, 6, [(2, 16), (2, 16)])
    jaxpr = jax.make_jaxpr(lambda *a: pk.commit_path(*a, implementation="interpret"))(
        tuple(map(jnp.asarray, caches)),
        tuple(map(jnp.asarray, trees)),
        *(jnp.zeros(shape, jnp.int32) for shape in ((2, 3), (2,), (2,))),
    )
    assert "input_output_aliases=((5, 0), (6, 1))" in str(jaxpr)


def test_nothing_to_do():
    assert pk.commit_path((), (), *(jnp.zeros(s, jnp.int32) for s in ((2, 3), (2,), (2,)))) == ()


def test_errors_say_what_is_wrong():
    commit = inspect.unwrap(pk.commit_path)
    cache, tree = jnp.zeros((2, 6, 3)), jnp.zeros((2, 4, 3))
    ints = [jnp.zeros(s, jnp.int32) for s in ((2, 3), (2,), (2,))]
    with pytest.raises(ValueError, match="got 1 caches and 2 trees"):
        commit((cache,), (tree, tree), *ints)
    with pytest.raises(ValueError, match=r"trees\[0\] has shape \(2, 4, 2\), expected \[2, T, 3\]"):
        commit((cache,), (tree[..., :2],), *ints)
    with pytest.raises(ValueError, match=r"trees\[0\] has dtype bfloat16, expected float32"):
        commit((cache,), (tree.astype(jnp.bfloat16),), *ints)
    with pytest.raises(NotImplementedError, match="161 caches, at most 160"):
        commit((cache,) * 161, (tree,) * 161, *ints, implementation="interpret")
