"""Tree bounds and fixed shapes: what is refused, and that their links are the kernels'."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from jspec.trees import (
    MAX_NODES,
    StaticTree,
    TreeConfig,
    cartesian,
    chain,
    fill_static,
    from_choices,
)

build_links = jax.jit(pallas_kernels.build_tree)


def grow(picks):
    """A prefix-closed set of paths: each pick hangs a rank from one of the paths before it."""
    paths = [()]
    for above, rank in picks:
        path = (*paths[above % len(paths)], rank)
        if path not in paths:
            paths.append(path)
    return paths[1:]


choice_sets = st.lists(
    st.tuples(st.integers(0, 2**16), st.integers(0, 9)), min_size=1, max_size=127
).map(grow)


def check_links(shape):
    """The host's links are the kernels', padded to one width so that one program serves all."""
    nodes, words = shape.num_nodes, -(-shape.num_nodes // 32)
    parent = np.full((1, MAX_NODES), -1, np.int32)
    parent[0, :nodes] = shape.parents
    valid = np.arange(MAX_NODES)[None] < nodes
    expected = jax.device_get(build_links(jnp.asarray(parent), jnp.asarray(valid)))
    links = jax.device_get(shape.links())
    np.testing.assert_array_equal(links.ancestors, expected.ancestors[:, :nodes, :words])
    for name in ("depth", "first_child", "next_sibling"):
        mine, theirs = getattr(links, name), getattr(expected, name)
        np.testing.assert_array_equal(mine, theirs[:, :nodes], err_msg=name)
        assert mine.dtype == theirs.dtype


class TestTreeConfig:
    @pytest.mark.parametrize(
        ("given_settings", "expected"),
        [
            ({}, 8),
            ({"num_steps": 3, "topk": 1}, 4),
            ({"num_steps": 1, "topk": 2}, 3),
            ({"num_steps": 1, "topk": 40}, 8),
            ({"num_steps": 5, "topk": 8, "num_nodes": 128}, 128),
        ],
    )
    def test_nodes_by_default(self, given_settings, expected):
        assert TreeConfig(**given_settings).num_nodes == expected

    @given(num_steps=st.integers(1, 20), topk=st.integers(1, 12))
    @settings(deadline=None, max_examples=50)
    def test_every_number_of_nodes_up_to_the_candidates_is_accepted(self, num_steps, topk):
        candidates = sum(topk if step == 0 else topk * topk for step in range(num_steps))
        config = TreeConfig(num_steps=num_steps, topk=topk)
        assert config.num_candidates == candidates
        assert config.path_width == num_steps + 1
        if topk > 1:
            most = min(candidates + 1, MAX_NODES)
            assert TreeConfig(num_steps=num_steps, topk=topk, num_nodes=most).num_nodes == most
            assert TreeConfig(num_steps=num_steps, topk=topk, num_nodes=2).num_nodes == 2

    @pytest.mark.parametrize(
        ("given_settings", "value", "fix"),
        [
            ({"num_steps": 0}, "num_steps=0", "at least 1"),
            ({"topk": -2}, "topk=-2", "at least 1"),
            ({"num_steps": 4, "topk": 1, "num_nodes": 8}, "num_nodes=8", "set num_steps=7"),
            ({"num_nodes": 1}, "num_nodes=1", "use no drafter"),
            ({"num_nodes": 0}, "num_nodes=0", "at least 2"),
            (
                {"num_steps": 2, "topk": 2, "num_nodes": 8},
                "num_steps=2 with topk=2 gives only 6",
                "lower num_nodes or raise num_steps or topk",
            ),
            ({"num_steps": 9, "topk": 8, "num_nodes": 129}, "129 nodes", "128"),
            ({"num_steps": 128, "topk": 1}, "129 nodes", "128"),
        ],
    )
    def test_refusals_name_the_value_and_the_fix(self, given_settings, value, fix):
        with pytest.raises(ValueError, match=value) as refusal:
            TreeConfig(**given_settings)
        assert fix in str(refusal.value)

    def test_a_chain_of_one_node_is_not_told_to_take_no_steps(self):
        with pytest.raises(ValueError, match="num_nodes=1") as refusal:
            TreeConfig(num_steps=5, topk=1, num_nodes=1)
        assert "num_steps=0" not in str(refusal.value)


class TestStaticTree:
    @given(choices=choice_sets, seed=st.integers(0, 99))
    @settings(deadline=None, max_examples=50)
    def test_the_order_of_the_choices_does_not_matter(self, choices, seed):
        shape = from_choices(choices)
        order = np.random.default_rng(seed).permutation(len(choices))
        assert from_choices([list(choices[i]) for i in order]) == shape
        assert set(shape.choices) == set(choices)
        keys = [(len(path), path) for path in shape.choices]
        assert keys == sorted(keys)
        assert shape.num_nodes == len(choices) + 1
        assert shape.num_steps == max(map(len, choices))
        assert shape.path_width == shape.num_steps + 1
        assert shape.topk == 1 + max(map(max, choices))

    @given(choices=choice_sets)
    @settings(deadline=None, max_examples=50)
    def test_parents_depths_and_ranks_spell_the_choices(self, choices):
        shape = from_choices(choices)
        for node, path in enumerate(shape.choices, start=1):
            spelled, above = [], node
            while above:
                assert shape.parents[above] < above
                assert shape.depths[above] == shape.depths[shape.parents[above]] + 1
                spelled.append(shape.ranks[above])
                above = shape.parents[above]
            assert tuple(reversed(spelled)) == path
        assert (shape.parents[0], shape.depths[0], shape.ranks[0]) == (-1, 0, 0)

    @given(choices=choice_sets)
    @settings(deadline=None, max_examples=50)
    def test_links_are_those_of_the_kernels(self, choices):
        check_links(from_choices(choices))

    @pytest.mark.parametrize(
        "shape", [chain(1), chain(31), chain(32), chain(127), cartesian([127]), cartesian([2] * 6)]
    )
    def test_links_of_the_widest_and_the_narrowest(self, shape):
        check_links(shape)

    @pytest.mark.parametrize(
        ("choices", "value", "fix"),
        [
            ([(0,), (1,), (0,)], r"\[0\] is listed twice", "distinct"),
            ([(0,), (1, 0)], r"\[1, 0\] hangs from \[1\]", "add it"),
            ([(0, 0, 0), (0,)], r"\[0, 0, 0\] hangs from \[0, 0\]", "add it"),
            ([(0,), (0, -1)], r"\[0, -1\]", "at least 0"),
            ([()], r"\[\]", "one or more ranks"),
            ([], "at least one choice", "use no drafter"),
            ([(rank,) for rank in range(128)], "129 nodes", "128"),
        ],
    )
    def test_refusals_name_the_choice_and_the_fix(self, choices, value, fix):
        with pytest.raises(ValueError, match=value) as refusal:
            from_choices(choices)
        assert fix in str(refusal.value)

    @given(choices=choice_sets, victim=st.integers(0, 2**16))
    @settings(deadline=None, max_examples=50)
    def test_a_missing_parent_is_always_noticed(self, choices, victim):
        inner = [path for path in choices if any(other[:-1] == path for other in choices)]
        if not inner:
            return
        gone = inner[victim % len(inner)]
        with pytest.raises(ValueError, match="not listed"):
            StaticTree(tuple(path for path in choices if path != gone))


class TestChainAndCartesian:
    @pytest.mark.parametrize("steps", [1, 2, 5, 127])
    def test_a_chain_is_a_product_of_ones(self, steps):
        assert chain(steps) == cartesian([1] * steps)
        assert chain(steps).parents == tuple(range(-1, steps))
        assert chain(steps).topk == 1

    @given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
    @settings(deadline=None, max_examples=50)
    def test_sizes_of_a_product(self, sizes):
        below = np.cumprod(sizes)
        if below.sum() + 1 > MAX_NODES:
            with pytest.raises(ValueError, match=f"{below.sum() + 1} nodes"):
                cartesian(sizes)
            return
        shape = cartesian(sizes)
        assert shape.num_nodes == below.sum() + 1
        assert [shape.depths.count(d + 1) for d in range(len(sizes))] == below.tolist()
        children = [shape.parents.count(node) for node in range(shape.num_nodes)]
        assert children == [[*sizes, 0][depth] for depth in shape.depths]

    @pytest.mark.parametrize("sizes", [[], [0], [2, 0], [3, -1]])
    def test_empty_levels_are_refused(self, sizes):
        with pytest.raises(ValueError, match="at least one level, each of 1 or more") as refusal:
            cartesian(sizes)
        assert f"sizes={sizes}" in str(refusal.value)

    @pytest.mark.parametrize("steps", [0, -3])
    def test_a_chain_needs_a_step(self, steps):
        with pytest.raises(ValueError, match=f"num_steps={steps}; expected at least 1"):
            chain(steps)


class TestFillStatic:
    @pytest.mark.parametrize(
        "shape",
        [
            chain(6),
            cartesian([3, 2, 2]),
            from_choices([(9,), (0,), (9, 3), (0, 7), (0, 0), (9, 3, 1), (4,), (9, 3, 9)]),
        ],
        ids=["chain", "product", "sparse"],
    )
    def test_every_node_holds_the_candidate_of_its_depth_and_rank(self, shape):
        batch, levels, width = 2, 10, 10
        candidates = np.arange(batch * levels * width, dtype=np.int32).reshape(batch, levels, width)
        scores = (candidates / candidates.size).astype(np.float32)
        root = np.array([1000, 2000], np.int32)
        fill = jax.jit(functools.partial(fill_static, shape))
        tree = fill(*map(jnp.asarray, (root, candidates, scores)))
        token, score = np.asarray(tree.token), np.asarray(tree.score)
        for slot in range(batch):
            assert token[slot, 0] == root[slot]
            assert score[slot, 0] == 1.0
            for node, path in enumerate(shape.choices, start=1):
                assert token[slot, node] == candidates[slot, len(path) - 1, path[-1]]
                assert score[slot, node] == scores[slot, len(path) - 1, path[-1]]
            np.testing.assert_array_equal(tree.parent[slot], shape.parents)
            np.testing.assert_array_equal(tree.depth[slot], shape.depths)
        assert np.all(tree.valid)

    def test_without_scores_only_the_root_has_one(self):
        tree = fill_static(chain(2), jnp.array([7], jnp.int32), jnp.ones((1, 2, 1), jnp.int32))
        np.testing.assert_array_equal(tree.score, [[1.0, 0.0, 0.0]])

    @pytest.mark.parametrize(("levels", "width"), [(1, 3), (2, 2)])
    def test_too_few_candidates_are_refused(self, levels, width):
        with pytest.raises(ValueError, match="needs 2 levels of 3 candidates") as refusal:
            fill_static(
                cartesian([3, 2]),
                jnp.zeros((1,), jnp.int32),
                jnp.zeros((1, levels, width), jnp.int32),
            )
        assert f"got {levels} of {width}; use a smaller tree" in str(refusal.value)
