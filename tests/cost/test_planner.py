"""Speed, break-even and the choice of a tree."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jspec.cost import (
    HARDWARE,
    Acceptance,
    Roofline,
    RoundTime,
    VerifyTimes,
    break_even_batch,
    constant_cost_speedup,
    find_drafter,
    find_shape,
    make_plan,
    mask_bytes,
    paying_batches,
    plan_paying_batches,
    tree_grid,
)
from jspec.trees import TreeConfig
from pallas_kernels.masks import from_qlen_only, to_full, to_packed, to_qlen_only

unhurried = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

TARGET = find_shape("llama-3-8b")
SEVEN = Acceptance(by_depth=(0.7,) * 8)
GRID = list(tree_grid(steps=(1, 3, 5, 7), topks=(1, 4), nodes=(6, 8, 16, 32)))


def roofline(drafter: str = "eagle3", **changes) -> Roofline:
    settings = {"hardware": HARDWARE["h100"], "context": 0} | changes
    return Roofline(target=TARGET, drafter=find_drafter(drafter, TARGET), **settings)


@unhurried
@given(st.floats(1, 8), st.floats(0.001, 1), st.integers(1, 8))
def test_the_constant_formula_is_a_round_whose_verify_pass_is_free(expected, cost, steps):
    time = RoundTime(plain=1.0, draft=steps * cost, verify=1.0)
    assert time.speedup(expected) == pytest.approx(constant_cost_speedup(expected, cost, steps))
    assert time.tokens_per_second(expected, 4) == pytest.approx(4 * time.speedup(expected))


def test_measured_times_are_linear_between_points():
    times = VerifyTimes({1: 10.0, 8: 24.0, 16: 24.0})
    assert [times(nodes) for nodes in (1, 2, 8, 12, 16)] == pytest.approx([10, 12, 24, 24, 24])
    with pytest.raises(ValueError, match="17 nodes; t_V was measured from 1 to 16"):
        times(17)
    with pytest.raises(ValueError, match=r"t_V\(1\) is missing"):
        VerifyTimes({2: 1.0})


@pytest.mark.parametrize(
    ("paying", "runs", "even"),
    [
        ({1, 2, 3}, [(1, 3)], 4),
        ({1, 4, 5}, [(1, 1), (4, 5)], 6),
        (set(range(1, 9)), [(1, 8)], None),
        ({3, 8}, [(3, 3), (8, 8)], None),
        (set(), [], 1),
    ],
    ids=str,
)
def test_where_speculation_pays(paying, runs, even):
    found = paying_batches(lambda batch: batch in paying, limit=8)
    assert found == runs
    assert break_even_batch(found, 8) == even


@unhurried
@given(st.integers(1, 900), st.integers(1, 900))
def test_edges_are_found_among_many(one, other):
    first, last = sorted((one, other))
    found = paying_batches(lambda batch: not first <= batch <= last, limit=900)
    wide = last - first > first / 2  # a narrower gap may lie between two batches that are tried
    expected = [(1, first - 1)] * (first > 1) + [(last + 1, 900)] * (last < 900)
    assert found == expected or (not wide and found == [(1, 900)])


def test_every_tree_of_the_grid_exists_once_and_uses_its_levels():
    grid = list(tree_grid())
    assert len(set(grid)) == len(grid) > 50
    for tree in grid:
        assert tree.num_nodes > tree.num_steps
    assert {tree.topk for tree in tree_grid(max_topk=2)} == {1, 2}
    assert max(tree.num_steps for tree in tree_grid(max_steps=3)) == 3


def test_the_best_is_the_fastest_of_all():
    plan = make_plan(GRID, roofline(), SEVEN, batch=4)
    assert plan.best.speedup == max(one.speedup for one in plan.options)
    assert len(plan.options) == len(GRID)
    best = plan.best
    assert best.tokens_per_second == pytest.approx(best.speedup * plan.plain_tokens_per_second)
    assert best.accept_length == SEVEN.accept_length(best.tree)


def test_the_worked_round_with_the_real_layer():
    """κ = 5 as published, but for the layer: 4.48 ms + 223.5 · 4 + 253.5 µs + 10 µs."""
    time = roofline().round_time(TreeConfig(num_steps=5, topk=1), 1)
    assert time.draft == pytest.approx(4 * 223.5e-6 + 253.5e-6, rel=1e-3)
    assert time.seconds == pytest.approx(4.48e-3 + 1.148e-3 + 10e-6, rel=1e-3)


def test_large_batches_want_smaller_trees_and_in_the_end_none():
    times = roofline()
    sizes = [make_plan(GRID, times, SEVEN, batch=b).best.tree.num_nodes for b in (1, 32, 256)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    assert "memory-bound" in times.reason(TreeConfig(), 1)
    assert "compute-bound" in times.reason(TreeConfig(), 256)
    ((first, last),) = plan_paying_batches(GRID, times, SEVEN)
    assert first == 1
    assert make_plan(GRID, times, SEVEN, batch=last).best.speedup > 1
    assert make_plan(GRID, times, SEVEN, batch=last + 1).best.speedup <= 1


def test_long_contexts_put_break_even_off():
    """Beyond the ridge a verify pass pays for its operations, unless the cache is what is read."""
    few = list(tree_grid(topks=(1,)))
    ((_, short),) = plan_paying_batches(few, roofline(), SEVEN, limit=512)
    ((_, long),) = plan_paying_batches(few, roofline(context=2048), SEVEN, limit=512)
    assert short < long


def test_a_useless_drafter_does_not_pay():
    never = Acceptance(by_depth=(0.0,) * 8)
    plan = make_plan(GRID, roofline(), never)
    assert plan.best.speedup < 1
    assert plan.best.tree == TreeConfig(num_steps=1, topk=1)
    assert plan_paying_batches(GRID, roofline(), never, limit=16) == []


def test_routed_experts_leave_a_gap():
    """A few trees read many more experts than a few tokens; many read all of them either way."""
    target = find_shape("deepseek-v3")
    times = Roofline(
        target=target,
        drafter=find_drafter("mtp", target),
        hardware=HARDWARE["h200"].times(16),
        context=1024,
        dtype="float8",
    )
    runs = plan_paying_batches(list(tree_grid(topks=(1,))), times, SEVEN, limit=64)
    assert runs[-1][0] > 1
    assert runs[-1][1] == 64


def test_what_does_not_fit():
    times = roofline(context=1024)
    most = times.largest_batch
    times.check_memory(most)
    with pytest.raises(ValueError, match="take more devices, or lower batch"):
        times.check_memory(most + 1)
    with pytest.raises(ValueError, match=r"needs 16\.1 GB .* tpu-v5e has 16 GB"):
        roofline(hardware=HARDWARE["tpu-v5e"]).check_memory(1)


def test_plans_that_cannot_be():
    with pytest.raises(ValueError, match="batch=0"):
        make_plan(GRID, roofline(), SEVEN, batch=0)
    with pytest.raises(ValueError, match="no tree is left"):
        make_plan([], roofline(), SEVEN)
    with pytest.raises(ValueError, match="known for 2 depths"):
        make_plan(GRID, roofline(), Acceptance(by_depth=(0.7, 0.7)))


@pytest.mark.parametrize(("nodes", "context", "batch"), [(8, 50, 1), (17, 3, 2), (33, 0, 2)])
def test_mask_bytes_are_those_of_the_masks(nodes, context, batch):
    square = np.tril(np.ones((nodes, nodes), bool))
    words = from_qlen_only(jnp.asarray(np.broadcast_to(square, (batch, nodes, nodes))))
    found = mask_bytes(nodes=nodes, context=context, batch=batch)
    assert found.words == words.nbytes
    assert found.qlen_only == to_qlen_only(words).nbytes
    assert found.full == to_full(words, jnp.full((batch,), context, jnp.int32)).nbytes
    assert found.packed == (to_packed(words).nbytes if nodes <= 32 else None)
