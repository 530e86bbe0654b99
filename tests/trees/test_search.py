"""The best static tree against trying every tree there is."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.trees import cartesian, chain, from_choices
from jspec.trees.search import best_tree, expected_accept_length


def every_tree(levels, ranks, num_nodes):
    """All sets of num_nodes - 1 paths that hold their own parents."""
    paths = [p for depth in range(1, levels + 1) for p in product(range(ranks), repeat=depth)]
    for chosen in combinations(paths, num_nodes - 1):
        known = set(chosen)
        if all(len(path) == 1 or path[:-1] in known for path in chosen):
            yield from_choices(chosen)


shapes = st.sampled_from([(1, 4), (2, 2), (2, 3), (3, 2), (4, 1)])
chances = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))
tables = shapes.flatmap(
    lambda shape: st.lists(
        st.lists(chances, min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


@settings(max_examples=60, deadline=None)
@given(tables, st.integers(2, 6))
def test_no_tree_is_better(table, num_nodes):
    accuracies = np.array(table)
    levels, ranks = accuracies.shape
    paths = sum(ranks**depth for depth in range(1, levels + 1))
    num_nodes = min(num_nodes, paths + 1)
    found = best_tree(accuracies, num_nodes)
    assert found.num_nodes == num_nodes
    best = max(
        expected_accept_length(tree, accuracies) for tree in every_tree(levels, ranks, num_nodes)
    )
    assert expected_accept_length(found, accuracies) == pytest.approx(best, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(tables)
def test_more_nodes_extend_the_tree(table):
    accuracies = np.array(table)
    levels, ranks = accuracies.shape
    whole = sum(ranks**depth for depth in range(1, levels + 1)) + 1
    trees = [set(best_tree(accuracies, n).choices) for n in range(2, whole + 1)]
    assert all(smaller < larger for smaller, larger in pairwise(trees))


def test_sure_guesses_make_a_chain_and_even_ones_a_wide_tree():
    assert best_tree(np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]), 4) == chain(3)
    assert best_tree(np.array([[0.2, 0.2, 0.2], [0.2, 0.2, 0.2]]), 4) == cartesian([3])
    # A rank that does better than the one before it is taken first.
    assert best_tree(np.array([[0.1, 0.6, 0.3]]), 3) == from_choices([[1], [2]])


def test_expected_accept_length():
    accuracies = np.array([[0.5, 0.25], [0.4, 0.1]])
    tree = from_choices([[0], [1], [0, 0], [1, 1]])
    expected = 1 + 0.5 + 0.25 + 0.5 * 0.4 + 0.25 * 0.1
    assert expected_accept_length(tree, accuracies) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"3 levels of rank 0 or less, .* 2 levels of 2 ranks"):
        expected_accept_length(chain(3), accuracies)


def test_what_is_refused():
    accuracies = np.array([[0.5, 0.25], [0.4, 0.1]])
    assert best_tree(accuracies, 7).num_nodes == 7
    for num_nodes in (1, 8):
        with pytest.raises(ValueError, match=f"num_nodes={num_nodes} with the root; .* 2 to 7"):
            best_tree(accuracies, num_nodes)
    with pytest.raises(ValueError, match="between 0 and 1"):
        best_tree(np.array([[1.5]]), 2)
    with pytest.raises(ValueError, match="between 0 and 1"):
        best_tree(np.array([[np.nan]]), 2)
    with pytest.raises(ValueError, match=r"shape \(2,\); expected \[depths, ranks\]"):
        best_tree(np.array([0.5, 0.5]), 2)
    with pytest.raises(ValueError, match="the widest tree has 128"):
        best_tree(np.full((3, 10), 0.5), 200)
