"""Every implementation of tree building against a walk in plain Python."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import each_implementation, oracle_build, pack_bits, random_parents, run

import pallas_kernels as pk

NODES = [1, 8, 33, 128]


def check(implementation, parent, valid):
    links = run(pk.build_tree, implementation, jnp.asarray(parent), jnp.asarray(valid))
    depth, above, first, following, alive = oracle_build(parent, valid)
    np.testing.assert_array_equal(links.depth, depth)
    np.testing.assert_array_equal(links.ancestors, pack_bits(above))
    np.testing.assert_array_equal(links.first_child, first)
    np.testing.assert_array_equal(links.next_sibling, following)
    expected = np.where(alive & (np.arange(parent.shape[1]) > 0), parent, -1)
    np.testing.assert_array_equal(links.parent, expected)
    for array in links:
        assert array.dtype == (jnp.uint32 if array is links.ancestors else jnp.int32)


@each_implementation
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("reach", [None, 1, 3])
def test_random_trees(implementation, nodes, reach):
    rng = np.random.default_rng(nodes)
    parent = random_parents(rng, 4, nodes, reach=reach)
    check(implementation, parent, np.ones(parent.shape, bool))


@each_implementation
@pytest.mark.parametrize("nodes", NODES)
def test_padding_orphans_and_wild_parents_never_join_the_tree(implementation, nodes):
    rng = np.random.default_rng(nodes + 1)
    parent = random_parents(rng, 4, nodes)
    valid = rng.random(parent.shape) > 0.2
    wild = rng.random(parent.shape) < 0.2
    # Out of range, pointing forward (a cycle, if followed), and at themselves.
    parent = np.where(wild, rng.integers(-3, nodes + 3, parent.shape), parent).astype(np.int32)
    valid[:, 0] = True
    check(implementation, parent, valid)


@each_implementation
def test_star_and_root_only(implementation):
    parent = np.zeros((2, 33), np.int32)
    parent[:, 0] = -1
    valid = np.ones(parent.shape, bool)
    valid[1, 1:] = False
    check(implementation, parent, valid)


def oracle_select(selected, parents, topk):
    """The rule of `select_links`, one candidate at a time."""
    candidates = topk * max(parents.shape[1], 1)
    parent = np.full((selected.shape[0], selected.shape[1] + 1), -1)
    valid = np.zeros(parent.shape, bool)
    valid[:, 0] = True
    for b, row in enumerate(selected):
        seen = {}
        for i, candidate in enumerate(row):
            if not 0 <= candidate < candidates or candidate in seen:
                continue
            group = candidate // topk
            up = 0 if group == 0 else seen.get(int(parents[b, group]))
            # An orphan keeps its number, so that a repetition of it stays refused.
            seen[int(candidate)] = i + 1 if up is not None else None
            if up is not None:
                parent[b, i + 1], valid[b, i + 1] = up, True
    return parent, valid


def check_selection(implementation, selected, parents, topk):
    selected, parents = selected.astype(np.int32), parents.astype(np.int32)
    expected_parent, expected_valid = oracle_select(selected, parents, topk)
    parent, valid, links = run(
        pk.build_tree_from_selection,
        implementation,
        jnp.asarray(selected),
        jnp.asarray(parents),
        topk=topk,
    )
    np.testing.assert_array_equal(valid, expected_valid)
    np.testing.assert_array_equal(parent, expected_parent)
    depth, above, first, following, alive = oracle_build(expected_parent, expected_valid)
    np.testing.assert_array_equal(alive, expected_valid)
    np.testing.assert_array_equal(links.depth, depth)
    np.testing.assert_array_equal(links.ancestors, pack_bits(above))
    np.testing.assert_array_equal(links.first_child, first)
    np.testing.assert_array_equal(links.next_sibling, following)


def draft_candidates(rng, batch, topk, steps, probabilities):
    """A drafter's candidates with SGLang's parent table; `probabilities(shape)` per edge."""
    scores = probabilities((batch, topk))
    every, table = [scores], [np.tile(np.arange(-1, topk), (batch, 1))]
    beam_scores = scores
    for step in range(1, steps):
        edge = beam_scores[:, :, None] * probabilities((batch, topk, topk))
        flat = edge.reshape(batch, topk * topk)
        every.append(flat)
        order = np.argsort(-np.nan_to_num(flat, nan=-1.0), axis=1, kind="stable")[:, :topk]
        beam_scores = np.take_along_axis(flat, order, axis=1)
        if step < steps - 1:
            table.append(order + topk + topk * topk * (step - 1))
    width = topk * (steps - 1) + 1
    return np.concatenate(every, axis=1), np.concatenate(table, axis=1)[:, :width]


def select_best(scores, count):
    """(score descending, index ascending), then in index order."""
    order = np.argsort(-np.nan_to_num(scores, nan=-1.0), axis=1, kind="stable")[:, :count]
    return np.sort(order, axis=1)


EDGE_PROBABILITIES = {
    "spread": lambda rng: lambda shape: rng.random(shape),
    "ties at one": lambda rng: lambda shape: np.ones(shape),
    "zeros": lambda rng: lambda shape: rng.integers(0, 2, shape).astype(float),
    "underflow": lambda rng: lambda shape: np.full(shape, 1e-200) * rng.random(shape),
    "NaN": lambda rng: lambda shape: np.where(rng.random(shape) < 0.3, np.nan, rng.random(shape)),
}


@each_implementation
@pytest.mark.parametrize("edges", EDGE_PROBABILITIES)
def test_selection(implementation, edges):
    rng = np.random.default_rng(7)
    topk, steps = 4, 4
    scores, table = draft_candidates(rng, 6, topk, steps, EDGE_PROBABILITIES[edges](rng))
    selected = select_best(scores, 19)
    check_selection(implementation, selected, table, topk)
    if edges != "NaN":  # with this order ties, zeros and underflow still leave a closed tree
        assert oracle_select(selected, table, topk)[1].all()


@each_implementation
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_selection_at_all(implementation, seed):
    rng = np.random.default_rng(seed)
    topk, steps, count = 4, 4, 19
    table = rng.integers(-2, 60, (6, topk * (steps - 1) + 1))
    selected = np.sort(rng.integers(-2, 60, (6, count)), axis=1)
    check_selection(implementation, selected, table, topk)


@each_implementation
@pytest.mark.parametrize("table_width", [0, 1])
def test_one_step_trees(implementation, table_width):
    selected = np.array([[0, 1, 2], [0, 2, 3], [-1, 1, 4]])
    check_selection(implementation, selected, np.full((3, table_width), -1), 4)


@each_implementation
def test_chain_selection(implementation):
    table = np.array([[-1, 0, 1, 2]])
    check_selection(implementation, np.array([[0, 1, 2, 3]]), table, 1)
    check_selection(implementation, np.array([[0, 2, 3, 3]]), table, 1)


def test_select_links_alone_equals_the_fused_op():
    rng = np.random.default_rng(3)
    scores, table = draft_candidates(rng, 3, 4, 3, lambda shape: rng.random(shape))
    selected = jnp.asarray(select_best(scores, 9), jnp.int32)
    table = jnp.asarray(table, jnp.int32)
    parent, valid = jax.jit(pk.select_links, static_argnums=2)(selected, table, 4)
    fused_parent, fused_valid, links = run(
        pk.build_tree_from_selection, "xla", selected, table, topk=4
    )
    np.testing.assert_array_equal(parent, fused_parent)
    np.testing.assert_array_equal(valid, fused_valid)
    np.testing.assert_array_equal(links.parent, parent)


def test_errors_say_what_is_wrong():
    parent = jnp.zeros((2, 4), jnp.int32)
    build, select = inspect.unwrap(pk.build_tree), inspect.unwrap(pk.select_links)
    with pytest.raises(ValueError, match=r"valid has shape \(2, 3\), expected \[2, 4\]"):
        build(parent, jnp.ones((2, 3), bool))
    with pytest.raises(ValueError, match="parent has dtype uint32, expected int32"):
        build(parent.astype(jnp.uint32), jnp.ones((2, 4), bool))
    with pytest.raises(ValueError, match="expected at least the root"):
        build(parent[:, :0], jnp.ones((2, 0), bool))
    with pytest.raises(ValueError, match="topk=4 and a parents table 4 wide"):
        select(parent, parent, 4)
    big = jnp.zeros((1, 300), jnp.int32)
    with pytest.raises(NotImplementedError, match="300 nodes, at most 256"):
        pk.build_tree(big, jnp.ones((1, 300), bool), implementation="interpret")
