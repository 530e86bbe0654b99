"""What `jspec plan --measure` makes of a few measured points; nothing is timed here."""

import pytest

from jspec.commands.plan_measure import MeasuredTimes, corner_trees, deepest_chain
from jspec.cost import Acceptance, VerifyTimes, tree_grid
from jspec.cost.acceptance import fit_siblings, geometric_siblings
from jspec.trees import TreeConfig


def times(**changes) -> MeasuredTimes:
    settings = {
        "batch": 1,
        "plain": 10.0,
        "verify": VerifyTimes({1: 9.0, 9: 17.0}),
        "drafts": {1: {1: 1.0, 5: 5.0}, 4: {1: 2.0, 5: 10.0}},
        "rests": {1: 1.0, 9: 2.0},
    }
    return MeasuredTimes(**settings | changes)


def test_between_the_points():
    time = times().round_time(TreeConfig(num_steps=3, topk=2, num_nodes=5), 1)
    assert (time.plain, time.verify, time.rest) == pytest.approx((10.0, 13.0, 1.5))
    # Three levels cost 3 in a chain and 6 with four children; two children lie a third of the way.
    assert time.draft == pytest.approx(4.0)


def test_at_the_points():
    time = times().round_time(TreeConfig(num_steps=5, topk=4, num_nodes=9), 1)
    assert (time.draft, time.verify, time.rest) == (10.0, 17.0, 2.0)


@pytest.mark.parametrize(("batch", "wide"), [(1, 0.25), (2, 1 - 0.75**2)])
def test_rounds_in_which_nothing_is_drafted_take_a_narrow_pass(batch, wide):
    time = times(draft_rate=0.25, batch=batch).round_time(TreeConfig(num_nodes=9), batch)
    assert time.verify == pytest.approx(wide * 17.0 + (1 - wide) * 9.0)
    assert time.rest == pytest.approx(wide * 2.0 + (1 - wide) * 1.0)
    assert time.draft == 10.0  # looking costs the same


@pytest.mark.parametrize(
    ("tree", "batch", "says"),
    [
        (TreeConfig(num_nodes=8), 2, "batch=2; times were measured for 1"),
        (TreeConfig(num_nodes=10), 1, "10 nodes; t_V was measured from 1 to 9"),
        (TreeConfig(num_steps=6, topk=1), 1, "6 levels; the draft was measured from 1 to 5"),
        (TreeConfig(num_steps=2, topk=5, num_nodes=8), 1, "5 children; the draft was measured"),
    ],
)
def test_outside_the_points(tree, batch, says):
    with pytest.raises(ValueError, match=says):
        times().round_time(tree, batch)


@pytest.mark.parametrize(
    "grid",
    [
        {},
        {"steps": (3,), "topks": (1,)},
        {"steps": (1, 4), "topks": (2, 4), "nodes": (3, 6, 40)},
        {"steps": (2,), "topks": (1, 8), "nodes": (64,)},
        {"topks": (1, 2), "nodes": (4,)},
    ],
    ids=str,
)
def test_every_tree_lies_between_the_corners(grid):
    trees = list(tree_grid(**grid))
    corners = corner_trees(trees)
    assert len(corners) <= 5
    drafts: dict[int, dict[int, float]] = {}
    for tree in corners:
        drafts.setdefault(tree.topk, {})[tree.num_steps] = 1.0
    points = {1: 1.0} | {tree.num_nodes: 1.0 for tree in corners}
    found = times(verify=VerifyTimes(points), rests=points, drafts=drafts)
    for tree in trees:
        assert found.round_time(tree, 1).seconds == pytest.approx(3.0)
    assert deepest_chain(trees).num_steps == max(tree.num_steps for tree in trees)


@pytest.mark.parametrize("rate", [1.0, 0.4])
@pytest.mark.parametrize("catch", [0.0, 0.2, 0.5])
def test_shares_of_siblings_are_found_again(catch, rate):
    tree = TreeConfig(num_steps=4, topk=4, num_nodes=16)
    betas = (0.8, 0.75, 0.7, 0.7)
    siblings = geometric_siblings(catch, 3)
    known = Acceptance(by_depth=betas, siblings=siblings, draft_rate=rate)
    found = fit_siblings(betas, rate, tree, known.accept_length(tree))
    assert found == pytest.approx(siblings)


def test_more_than_any_siblings_could_give():
    tree = TreeConfig(num_steps=2, topk=2, num_nodes=4)
    betas = (0.5, 0.5)
    found = Acceptance(by_depth=betas, siblings=fit_siblings(betas, 1.0, tree, 9.0))
    best = Acceptance(by_depth=betas, siblings=geometric_siblings(1.0, 1))
    assert found.accept_length(tree) == pytest.approx(best.accept_length(tree))
