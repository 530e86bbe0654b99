"""E of chains and trees, in every way it can be told."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jspec.cost import Acceptance, accept_length_by_depth, chain_accept_length, expand
from jspec.trees import TreeConfig, chain
from jspec.trees.search import best_tree, expected_accept_length

unhurried = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

chances = st.one_of(st.just(0.0), st.floats(0.001, 1))
betas = st.lists(chances, min_size=1, max_size=6)


@st.composite
def trees(draw, max_steps: int = 5):
    """Any tree that can exist."""
    steps, topk = draw(st.integers(1, max_steps)), draw(st.integers(1, 4))
    if topk == 1:
        return TreeConfig(num_steps=steps, topk=1)
    pool = topk + (steps - 1) * topk**2
    nodes = draw(st.integers(2, min(pool + 1, 40)))
    return TreeConfig(num_steps=steps, topk=topk, num_nodes=nodes)


@unhurried
@given(chances, st.integers(1, 10))
def test_equal_acceptance_gives_the_closed_form(alpha, steps):
    by_depth = accept_length_by_depth([alpha] * steps)
    assert by_depth == pytest.approx(chain_accept_length(alpha, steps))
    assert 1 <= by_depth <= steps + 1


@unhurried
@given(betas)
def test_a_chain_is_a_tree_of_topk_one(values):
    acceptance = Acceptance(by_depth=tuple(values))
    tree = TreeConfig(num_steps=len(values), topk=1)
    assert acceptance.tree(tree) == chain(len(values))
    assert acceptance.accept_length(tree) == pytest.approx(accept_length_by_depth(values))
    reached = np.cumprod([1.0, *values[:-1]]) > 0
    for known, value, found in zip(reached, values, acceptance.tree_by_depth(tree)):
        assert found == pytest.approx(value if known else 0.0)


@unhurried
@given(trees(), st.lists(chances, min_size=5, max_size=5))
def test_depths_of_a_tree_add_up(tree, values):
    acceptance = Acceptance(by_depth=tuple(values))
    whole = acceptance.accept_length(tree)
    assert accept_length_by_depth(acceptance.tree_by_depth(tree)) == pytest.approx(whole)
    assert 1 <= whole <= tree.num_steps + 1


@unhurried
@given(trees(), st.lists(chances, min_size=5, max_size=5))
def test_no_expansion_beats_the_best_tree(tree, values):
    table = Acceptance(by_depth=tuple(values)).table(tree.num_steps, tree.topk)
    grown = expand(table, tree)
    assert grown.num_nodes == tree.num_nodes
    best = best_tree(table, tree.num_nodes)
    expected, limit = (expected_accept_length(one, table) for one in (grown, best))
    assert expected <= limit + 1e-9
    if tree.num_nodes - 1 <= tree.topk:  # no level is cut to topk nodes before so few are chosen
        assert expected == pytest.approx(limit)


@unhurried
@given(trees(), st.lists(chances, min_size=5, max_size=5))
def test_a_larger_tree_of_the_same_bounds_accepts_no_less(tree, values):
    acceptance = Acceptance(by_depth=tuple(values))
    assume(tree.topk > 1 and tree.num_nodes <= tree.num_candidates)
    larger = TreeConfig(num_steps=tree.num_steps, topk=tree.topk, num_nodes=tree.num_nodes + 1)
    assert acceptance.accept_length(tree) <= acceptance.accept_length(larger) + 1e-12


@unhurried
@given(st.integers(2, 4), st.integers(1, 5), st.lists(chances, min_size=5, max_size=5))
def test_a_chain_never_beats_the_tree_that_holds_it(topk, steps, values):
    acceptance = Acceptance(by_depth=tuple(values))
    tree = TreeConfig(num_steps=steps, topk=topk, num_nodes=1 + topk + (steps - 1) * topk**2)
    one = acceptance.accept_length(TreeConfig(num_steps=steps, topk=1))
    assert one <= acceptance.accept_length(tree) + 1e-12


@unhurried
@given(chances, st.integers(1, 8))
def test_siblings_are_ordered(value, topk):
    row = Acceptance(by_depth=(value,)).table(1, topk)[0]
    assert list(row) == sorted(row, reverse=True)
    assert row.sum() <= 1 + 1e-12
    given_shares = Acceptance(by_depth=(value,), siblings=(0.4, 0.3, 0.1)).table(1, min(topk, 4))
    assert list(given_shares[0]) == sorted(given_shares[0], reverse=True)


@unhurried
@given(trees(), chances)
def test_rounds_without_a_draft(tree, rate):
    always = Acceptance(by_depth=(0.6,) * 5)
    sometimes = Acceptance(by_depth=(0.6,) * 5, draft_rate=rate)
    expected = 1 + rate * (always.accept_length(tree) - 1)
    assert sometimes.accept_length(tree) == pytest.approx(expected)


def test_shares_of_the_siblings():
    acceptance = Acceptance(by_depth=(0.5, 0.8), siblings=(0.5, 0.25))
    table = acceptance.table(2, 3)
    np.testing.assert_allclose(table, [[0.5, 0.25, 0.125], [0.8, 0.1, 0.05]])
    assert acceptance.max_topk == 3
    # A level of two nodes catches the first guess and half of its misses.
    assert acceptance.accept_length(TreeConfig(num_steps=1, topk=2, num_nodes=3)) == 1.75


def test_equal_scores_keep_parents():
    tree = TreeConfig(num_steps=3, topk=2, num_nodes=5)
    for value in (0.0, 1.0):
        assert expand(np.full((3, 2), value), tree).num_nodes == 5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"by_depth": ()}, "no acceptance is given"),
        ({"by_depth": (0.5, 1.5)}, r"acceptance 1\.5 at depth 2"),
        ({"by_depth": (float("nan"),)}, "acceptance nan at depth 1"),
        ({"by_depth": (0.5,), "siblings": (0.7, 0.6)}, "sum to at most 1"),
        ({"by_depth": (0.5,), "siblings": (-0.1,)}, "from 0 to 1"),
        ({"by_depth": (0.5,), "draft_rate": 2.0}, r"draft_rate=2\.0"),
    ],
)
def test_acceptance_that_cannot_be(settings, says):
    with pytest.raises(ValueError, match=says):
        Acceptance(**settings)


def test_beyond_what_is_known():
    acceptance = Acceptance(by_depth=(0.5, 0.5), siblings=(0.2,))
    with pytest.raises(ValueError, match="num_steps=3, but acceptance is known for 2 depths"):
        acceptance.table(3, 1)
    with pytest.raises(ValueError, match="topk=3, but acceptance is known for 2 children"):
        acceptance.table(2, 3)


@pytest.mark.parametrize(("alpha", "steps"), [(-0.1, 1), (1.1, 1), (0.5, 0)])
def test_chains_that_cannot_be(alpha, steps):
    with pytest.raises(ValueError, match="expected"):
        chain_accept_length(alpha, steps)
