"""Choosing a tree's nodes among scored candidates, against a slow reference in plain Python."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.trees import build, select_nodes

BATCH, POOL = 2, 24
NODES = [2, 9, 25]

# Edges that are certain, that tie, that underflow within a few levels, and that are impossible.
EDGES = [1.0, 1.0, 0.5, 0.5, 0.25, 0.9, 1e-30, 0.0]
# Tokens that name their slot and candidate, so that a mix-up of any kind shows.
TOKENS = (100 * (np.arange(BATCH)[:, None] + 1) + np.arange(POOL)).astype(np.int32)
ROOTS = np.array([7, 8], np.int32)


@functools.cache
def selector(num_nodes):
    def run(*arrays):
        tree = select_nodes(*arrays, num_nodes)
        return tree, tree.width_used

    return jax.jit(run)


def select_on_device(pools, num_nodes):
    parent, score, valid = (np.stack(arrays) for arrays in zip(*pools))
    return selector(num_nodes)(*map(jnp.asarray, (ROOTS, TOKENS, parent, score, valid)))


def select(pools, num_nodes):
    return fetch(*select_on_device(pools, num_nodes))


def fetch(tree, width_used):
    """A tree's arrays on the host, under one roof."""
    names = ("token", "parent", "valid", "score")
    arrays = {name: getattr(tree, name) for name in names} | tree.links._asdict()
    return SimpleNamespace(**jax.device_get(arrays | {"width_used": width_used}))


@st.composite
def shapes(draw):
    """Parents that stand before their children, and a random edge into each candidate."""
    above = draw(st.lists(st.integers(0, 2**16), min_size=POOL, max_size=POOL))
    edges = draw(st.lists(st.sampled_from(EDGES), min_size=POOL, max_size=POOL))
    few = draw(st.sampled_from([0, 0, 0, 5, 9]))
    exist = draw(st.lists(st.integers(0, 9), min_size=POOL, max_size=POOL))
    parent = [a % (i + 1) - 1 for i, a in enumerate(above)]
    return parent, edges, [e >= few for e in exist]


def monotone(shape, *, logarithms=False, broken=()):
    """Scores that fall along every path; `broken` edges are NaN and spoil what hangs from them."""
    parent, edges, exists = shape
    score, valid = [], []
    for i, above in enumerate(parent):
        edge = math.nan if i in broken else edges[i]
        if logarithms:
            edge = math.log(edge) if edge != 0 else -math.inf
            upper = 0.0 if above < 0 else score[above]
            score.append(np.float32(upper) + np.float32(edge))
        else:
            upper = 1.0 if above < 0 else score[above]
            score.append(np.float32(upper) * np.float32(edge))
        valid.append(exists[i] and (above < 0 or valid[above]))
    return np.array(parent, np.int32), np.array(score, np.float32), np.array(valid)


def reference(slot, pool, num_nodes):
    """(token, parent, score) of the selected nodes, the root first."""
    parent, score, valid = pool
    usable = [i for i in range(POOL) if valid[i] and not math.isnan(score[i])]
    best = sorted(usable, key=lambda i: (-score[i], i))[: num_nodes - 1]
    node_of = {flat: node for node, flat in enumerate(sorted(best), start=1)} | {-1: 0}
    rows = [(int(ROOTS[slot]), -1, 1.0)]
    for flat in sorted(best):
        rows.append((int(TOKENS[slot, flat]), node_of[int(parent[flat])], float(score[flat])))
    return rows


def check(tree, slot, expected):
    """The slot's valid nodes are `expected`; everything after them is padding."""
    used, nodes = len(expected), tree.token.shape[1]
    token, parent, score = (np.array(column) for column in zip(*expected))
    np.testing.assert_array_equal(tree.valid[slot], np.arange(nodes) < used)
    np.testing.assert_array_equal(tree.token[slot, :used], token)
    np.testing.assert_array_equal(tree.parent[slot, :used], parent)
    np.testing.assert_array_equal(tree.score[slot, :used], score.astype(np.float32))
    assert np.all(tree.token[slot, used:] == 0)
    assert np.all(tree.parent[slot, used:] == -1)
    assert np.all(tree.score[slot, used:] == 0)
    assert int(tree.width_used[slot]) == used
    check_links(tree, slot)


def check_links(tree, slot):
    """Every valid node's parent is valid and before it; the child lists say what `parent` says."""
    parent, valid = tree.parent[slot], tree.valid[slot]
    first, following = tree.first_child[slot], tree.next_sibling[slot]
    assert valid[0]
    assert parent[0] == -1
    for node in range(1, len(parent)):
        if valid[node]:
            assert 0 <= parent[node] < node
            assert valid[parent[node]]
            assert tree.depth[slot, node] == tree.depth[slot, parent[node]] + 1
        else:
            assert parent[node] == -1
    for node in range(len(parent)):
        children, child = [], first[node]
        while child >= 0:
            children.append(child)
            child = following[child]
        assert children == [i for i in range(1, len(parent)) if valid[i] and parent[i] == node]


@pytest.mark.parametrize("num_nodes", NODES)
class TestMonotoneScores:
    @given(first=shapes(), second=shapes())
    @settings(deadline=None, max_examples=40)
    def test_products(self, num_nodes, first, second):
        """Ties, certain edges, underflow to zero and too few candidates included."""
        pools = [monotone(first), monotone(second)]
        tree = select(pools, num_nodes)
        for slot, pool in enumerate(pools):
            check(tree, slot, reference(slot, pool, num_nodes))

    @given(first=shapes(), second=shapes())
    @settings(deadline=None, max_examples=40)
    def test_logarithms(self, num_nodes, first, second):
        """A score of minus infinity is the worst candidate, but still one."""
        pools = [monotone(first, logarithms=True), monotone(second, logarithms=True)]
        tree = select(pools, num_nodes)
        for slot, pool in enumerate(pools):
            check(tree, slot, reference(slot, pool, num_nodes))

    @given(shape=shapes(), other=shapes(), broken=st.sets(st.integers(0, POOL - 1), min_size=1))
    @settings(deadline=None, max_examples=40)
    def test_nan_is_no_candidate_and_its_neighbour_never_notices(
        self, num_nodes, shape, other, broken
    ):
        healthy = monotone(other)
        pools = [monotone(shape, broken=broken), healthy]
        tree = select(pools, num_nodes)
        check(tree, 0, reference(0, pools[0], num_nodes))
        check(tree, 1, reference(1, healthy, num_nodes))
        everything = (pools[0][0], np.full(POOL, np.nan, np.float32), pools[0][2])
        tree = select([everything, healthy], num_nodes)
        check(tree, 0, reference(0, everything, num_nodes))
        check(tree, 1, reference(1, healthy, num_nodes))
        assert int(tree.width_used[0]) == 1

    def test_a_certain_chain_is_taken_from_the_top(self, num_nodes):
        parent = np.arange(-1, POOL - 1, dtype=np.int32)
        pool = (parent, np.ones(POOL, np.float32), np.ones(POOL, bool))
        tree = select([pool, pool], num_nodes)
        for slot in range(BATCH):
            check(tree, slot, reference(slot, pool, num_nodes))
            np.testing.assert_array_equal(tree.depth[slot], np.arange(num_nodes))

    def test_zeros_of_either_sign_tie(self, num_nodes):
        """A sum of logarithms may be -0.0 at the parent and 0.0 at the child."""
        parent = np.arange(-1, POOL - 1, dtype=np.int32)
        score = np.where(np.arange(POOL) % 2 == 0, -0.0, 0.0).astype(np.float32)
        pool = (parent, score, np.ones(POOL, bool))
        tree = select([pool, pool], num_nodes)
        for slot in range(BATCH):
            check(tree, slot, reference(slot, pool, num_nodes))


@pytest.mark.parametrize("num_nodes", NODES)
class TestBrokenScores:
    @given(
        shape=shapes(),
        other=shapes(),
        scores=st.lists(
            st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, -1.0, math.nan, -math.inf, math.inf]),
            min_size=POOL,
            max_size=POOL,
        ),
    )
    @settings(deadline=None, max_examples=40)
    def test_an_orphan_is_never_a_node(self, num_nodes, shape, other, scores):
        """Children above their parents, and children of NaN."""
        parent, _, valid = monotone(shape)
        rule_breaker = (parent, np.array(scores, np.float32), valid)
        healthy = monotone(other)
        tree = select([rule_breaker, healthy], num_nodes)
        check_links(tree, 0)
        for node in range(1, num_nodes):
            if tree.valid[0, node]:
                flat = int(tree.token[0, node]) - 100
                assert valid[flat]
                assert not math.isnan(scores[flat])
                above = tree.parent[0, node]
                upper = -1 if above == 0 else int(tree.token[0, above]) - 100
                assert upper == parent[flat]
        check(tree, 1, reference(1, healthy, num_nodes))

    def test_what_hangs_from_an_orphan_is_padding_too(self, num_nodes):
        """Candidate 0 is out of reach, so its child and grandchildren are as well."""
        parent = np.array([-1, 0] + [1] * (POOL - 2), np.int32)
        score = np.array([0.1] + [0.9] * (POOL - 1), np.float32)
        valid = np.arange(POOL) != 0
        tree = select([(parent, score, valid)] * BATCH, num_nodes)
        assert np.all(tree.width_used == 1)
        assert np.all(tree.token[:, 1:] == 0)


@functools.partial(jax.jit, static_argnums=1)
def heads(tree, width):
    head = tree.head(width)
    return head, head.width_used


@jax.jit
def chain_of(parent):
    return build(jnp.ones_like(parent), parent, jnp.ones(parent.shape, bool))


class TestTree:
    @given(shape=shapes(), other=shapes())
    @settings(deadline=None, max_examples=25)
    def test_head_is_the_tree_without_its_tail(self, shape, other):
        on_device, width_used = select_on_device([monotone(shape), monotone(other)], 25)
        tree = fetch(on_device, width_used)
        for width in (1, 2, 9, 25):
            head = fetch(*heads(on_device, width))
            assert head.token.shape == (BATCH, width)
            for name in ("token", "parent", "valid", "score", "depth", "ancestors"):
                whole, part = getattr(tree, name), getattr(head, name)
                np.testing.assert_array_equal(part, whole[:, :width], err_msg=name)
            np.testing.assert_array_equal(head.width_used, np.minimum(width_used, width))
            for slot in range(BATCH):
                if width_used[slot] <= width:
                    check_links(head, slot)

    @pytest.mark.parametrize(("width", "words"), [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
    def test_head_keeps_the_mask_words_it_needs(self, width, words):
        parent = jnp.arange(-1, 69, dtype=jnp.int32)[None]
        tree = chain_of(parent)
        head = tree.head(width)
        assert head.ancestors.shape == (1, width, words)
        bits = np.unpackbits(
            np.asarray(head.ancestors).view(np.uint8), axis=-1, bitorder="little", count=width
        )
        np.testing.assert_array_equal(bits[0], np.tri(width))

    def test_width_used(self):
        parent = jnp.array([[-1, 0, 0, 1], [-1, 0, 0, 1], [-1, 0, 1, 2]], jnp.int32)
        valid = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 1, 1]]).astype(bool)
        tree = jax.jit(build)(jnp.full(parent.shape, 5, jnp.int32), parent, valid)
        np.testing.assert_array_equal(tree.width_used, [3, 1, 1])
        np.testing.assert_array_equal(tree.token[2], [5, 0, 0, 0])
        np.testing.assert_array_equal(tree.score, np.zeros((3, 4)))
