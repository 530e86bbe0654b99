"""Prompt lookup: its matches and its tree against slow references, and when it drafts at all."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_target

from jspec.drafters.base import DraftContext, Rows
from jspec.drafters.ngram import NGram
from jspec.trees import TreeConfig, chain

BATCH, CAPACITY = 3, 24

SMALL = NGram(min_match=1, max_match=3, num_matches=6, min_gain=0.0)
DEEP = NGram(min_match=2, max_match=8, num_matches=8, min_gain=0.0)
TREES = {
    "chain": TreeConfig(num_steps=5, topk=1),
    "narrow": TreeConfig(num_steps=4, topk=2, num_nodes=7),
    "wide": TreeConfig(num_steps=3, topk=6, num_nodes=19),  # room for everything SMALL finds
}
each_tree = pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
each_drafter = pytest.mark.parametrize("drafter", [SMALL, DEEP], ids=["small", "deep"])

texts = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=CAPACITY)
)
batches = st.lists(texts, min_size=BATCH, max_size=BATCH)


def table(rows, noise=0):
    """Texts, with other tokens of the same alphabet where nothing is known yet."""
    tokens = np.random.default_rng(noise).integers(0, 3, (len(rows), CAPACITY)).astype(np.int32)
    for slot, row in enumerate(rows):
        tokens[slot, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


@functools.cache
def compiled_matches(drafter):
    return jax.jit(drafter._best_matches)


@functools.cache
def compiled_propose(drafter, tree):
    def run(state, tokens, known, active):
        lengths = known - 1
        root = jnp.take_along_axis(tokens, lengths[:, None], axis=1)[:, 0]
        keys = jnp.zeros((tokens.shape[0], 2), jnp.uint32)
        context = DraftContext(tokens, lengths, root, active, keys)
        proposal = drafter.propose((), state, context, tree)
        return proposal.tree, proposal.state

    return jax.jit(run)


@functools.cache
def compiled_extend(drafter):
    def run(state, count, correct):
        tokens = jnp.zeros((count.shape[0], 2), jnp.int32)
        rows = Rows(tokens, tokens, count, count, jnp.zeros((*tokens.shape, 1)), ())
        return drafter.extend((), state, rows, correct)

    return jax.jit(run)


def propose(drafter, tree, rows, *, state=None, active=None, noise=0):
    """(tree on the host, state) of a batch of texts."""
    tokens, known = table(rows, noise)
    if state is None:
        state = drafter.init_state((), len(rows), CAPACITY)
    active = np.ones(len(rows), bool) if active is None else np.array(active)
    drafted, state = compiled_propose(drafter, tree)(
        state, *map(jnp.asarray, (tokens, known, active))
    )
    names = ("token", "parent", "valid", "score")
    return SimpleNamespace(**jax.device_get({n: getattr(drafted, n) for n in names})), state


def extend(drafter, state, correct, count=None):
    count = np.ones(len(correct), np.int32) if count is None else np.array(count, np.int32)
    return compiled_extend(drafter)(state, jnp.asarray(count), jnp.asarray(correct, jnp.int32))


def suffix_length(text, at, most):
    """How many tokens up to `at` equal the tokens up to the end."""
    length = 0
    while length < most and at - length >= 0 and text[at - length] == text[len(text) - 1 - length]:
        length += 1
    return length


def all_matches(drafter, text):
    """(length, start of the continuation), longest first, then most recent."""
    runs = [(suffix_length(text, at, drafter.max_match), at + 1) for at in range(len(text) - 1)]
    return sorted((run for run in runs if run[0] >= drafter.min_match), reverse=True)


def continuation(text, start, steps):
    """What followed; where the text ends it goes round."""
    return [text[start + step % (len(text) - start)] for step in range(steps)]


def merged(drafter, tree, text):
    """The whole trie: {path: (score, depth, first continuation)}."""
    matches = all_matches(drafter, text)[: drafter.num_matches]
    weights = [length**2 * 0.8**place for place, (length, _) in enumerate(matches)]
    nodes, children, support = {(): 0}, {}, {}
    for place, (_, start) in enumerate(matches):
        follow = continuation(text, start, tree.num_steps)
        for depth in range(1, tree.num_steps + 1):
            path = tuple(follow[:depth])
            support[path] = support.get(path, 0.0) + weights[place]
            if path not in nodes:
                siblings = children.setdefault(path[:-1], [])
                if path[:-1] not in nodes or len(siblings) == tree.topk:
                    continue
                siblings.append(path)
                nodes[path] = place
    del nodes[()]
    return {
        path: (support[path] / sum(weights) * 0.9 ** (len(path) - 1), len(path), place)
        for path, place in nodes.items()
    }


def paths_of(drafted, slot):
    """The path of tokens to every valid node, in node order, without the root's."""
    paths = {0: ()}
    for node in range(1, drafted.token.shape[1]):
        if drafted.valid[slot, node]:
            above = paths[int(drafted.parent[slot, node])]
            paths[node] = (*above, int(drafted.token[slot, node]))
    return [paths[node] for node in paths if node]


class TestMatches:
    @each_drafter
    @given(rows=batches, noise=st.integers(0, 9))
    @settings(deadline=None, max_examples=60)
    def test_longest_first_then_most_recent(self, drafter, rows, noise):
        tokens, known = table(rows, noise)
        length, start = compiled_matches(drafter)(jnp.asarray(tokens), jnp.asarray(known))
        for slot, text in enumerate(rows):
            expected = all_matches(drafter, text)[: drafter.num_matches]
            padded = [run for run, _ in expected] + [0] * (drafter.num_matches - len(expected))
            np.testing.assert_array_equal(length[slot], padded)
            np.testing.assert_array_equal(start[slot, : len(expected)], [s for _, s in expected])

    def test_lengths_are_capped_and_short_ones_do_not_count(self):
        drafter = NGram(min_match=3, max_match=4, num_matches=8)
        alike = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7]  # seven tokens recur
        short = [1, 2, 0, 1, 2]
        tokens, known = table([alike, short, [0] * 9])
        length, start = compiled_matches(drafter)(jnp.asarray(tokens), jnp.asarray(known))
        assert length[0].tolist() == [4, 0, 0, 0, 0, 0, 0, 0]
        assert int(start[0, 0]) == 7
        assert length[1].tolist() == [0] * 8
        assert length[2].tolist() == [4, 4, 4, 4, 4, 3, 0, 0]
        assert start[2, :6].tolist() == [8, 7, 6, 5, 4, 3]


class TestTree:
    @each_tree
    @each_drafter
    @given(rows=batches, noise=st.integers(0, 9))
    @settings(deadline=None, max_examples=50)
    def test_paths_are_continuations(self, drafter, tree, rows, noise):
        drafted, _ = propose(drafter, tree, rows, noise=noise)
        for slot, text in enumerate(rows):
            assert drafted.token[slot, 0] == text[-1]
            paths = paths_of(drafted, slot)
            assert len(set(paths)) == len(paths), "siblings are distinct"
            matches = all_matches(drafter, text)
            known = [continuation(text, start, tree.num_steps) for _, start in matches]
            for path in paths:
                assert any(path == tuple(follow[: len(path)]) for follow in known)
                children = [p for p in paths if p[:-1] == path[:-1]]
                assert len(children) <= tree.topk
            assert bool(paths) == bool(matches)
            # Padding comes last, and is blank.
            used = len(paths) + 1
            assert drafted.valid[slot].tolist() == [n < used for n in range(tree.num_nodes)]
            assert np.all(drafted.parent[slot, used:] == -1)
            assert np.all(drafted.token[slot, used:] == 0)

    @each_tree
    @each_drafter
    @given(rows=batches)
    @settings(deadline=None, max_examples=50)
    def test_it_is_the_best_part_of_the_merged_continuations(self, drafter, tree, rows):
        drafted, _ = propose(drafter, tree, rows)
        for slot, text in enumerate(rows):
            trie = merged(drafter, tree, text)
            paths = paths_of(drafted, slot)
            assert set(paths) <= set(trie)
            assert len(paths) == min(tree.num_nodes - 1, len(trie))
            order = [trie[path][1:] for path in paths]
            assert order == sorted(order), "by level, then by the match that came first"
            scores = [trie[path][0] for path in paths]
            np.testing.assert_allclose(drafted.score[slot, 1 : len(paths) + 1], scores, rtol=1e-5)
            left = [trie[path][0] for path in set(trie) - set(paths)]
            if left:
                assert min(scores) >= max(left) - 1e-6

    @given(rows=batches)
    @settings(deadline=None, max_examples=50)
    def test_the_likeliest_continuation_comes_first(self, rows):
        line, _ = propose(DEEP, TREES["chain"], rows)
        wide, _ = propose(SMALL, TREES["wide"], rows)
        for slot, text in enumerate(rows):
            for drafter, tree, drafted in ((DEEP, "chain", line), (SMALL, "wide", wide)):
                matches = all_matches(drafter, text)
                if not matches:
                    continue
                expected = continuation(text, matches[0][1], TREES[tree].num_steps)
                node, followed = 0, []
                while True:
                    children = np.flatnonzero(drafted.valid[slot] & (drafted.parent[slot] == node))
                    if not children.size:
                        break
                    node = children[0]
                    followed.append(int(drafted.token[slot, node]))
                assert followed == expected

    def test_a_loop_goes_round(self):
        drafted, _ = propose(DEEP, TREES["chain"], [[0, 1, 2, 0, 1, 2, 0], [3] * 4, [1, 2, 1, 2]])
        assert drafted.token.tolist() == [[0, 1, 2, 0, 1, 2], [3] * 6, [2, 1, 2, 1, 2, 1]]

    def test_a_child_survives_when_a_sibling_of_its_parent_is_cut(self):
        """Of the first tokens 1, 2 and 3 two are kept; both ways on from 1 are among them."""
        tree = TreeConfig(num_steps=2, topk=2, num_nodes=7)
        text = [0, 1, 5, 0, 3, 5, 0, 2, 5, 0, 1, 4, 0]
        drafted, _ = propose(SMALL, tree, [text])
        assert set(paths_of(drafted, 0)) == {(1,), (2,), (1, 4), (1, 5), (2, 5)}

    @each_tree
    def test_without_a_match_there_is_only_the_root(self, tree):
        drafted, state = propose(DEEP, tree, [[0, 1, 2, 3, 4], [5], [1, 2, 3, 1]])
        assert drafted.valid.sum(axis=1).tolist() == [1, 1, 1]
        assert not np.any(state.drafted)
        assert not np.any(state.matched)

    @each_tree
    @given(rows=batches, noise=st.integers(0, 9))
    @settings(deadline=None, max_examples=25)
    def test_a_slot_is_alone(self, tree, rows, noise):
        together, _ = propose(SMALL, tree, rows)
        turned, _ = propose(SMALL, tree, rows[::-1], noise=noise)
        for slot in range(BATCH):
            alone, _ = propose(SMALL, tree, [rows[slot]], noise=noise)
            for name in ("token", "parent", "valid", "score"):
                expected = getattr(alone, name)[0]
                np.testing.assert_array_equal(getattr(together, name)[slot], expected)
                np.testing.assert_array_equal(getattr(turned, name)[BATCH - 1 - slot], expected)


class TestGain:
    text = (1, 2, 3, 1, 2, 3, 1, 2)  # the last five tokens recur
    tree = TREES["chain"]

    def rounds(self, drafter, corrects, state=None):
        """Whether each round drafted, when a draft of round i gets corrects[i] tokens right."""
        drafts = []
        for correct in corrects:
            drafted, state = propose(drafter, self.tree, [self.text], state=state)
            drafts.append(bool(drafted.valid[0, 1]))
            assert drafts[-1] == bool(state.drafted[0])
            state = extend(drafter, state, [correct if drafts[-1] else 0])
        return drafts, state

    def test_without_a_threshold_every_match_is_followed(self):
        drafts, _ = self.rounds(DEEP, [0] * 60)
        assert all(drafts)

    def test_failing_drafts_stop_and_are_tried_again(self):
        drafter = NGram(min_match=2, max_match=8, min_gain=0.5)
        drafts, state = self.rounds(drafter, [0] * 40)
        gain, expected = np.float32(5 / 2), []  # the optimistic start: half of the match
        for _ in range(40):
            expected.append(bool(gain >= 0.5))
            gain = gain * np.float32(0.75) if expected[-1] else gain + np.float32(0.02)
        assert drafts == expected
        assert drafts[0]
        pause = drafts.index(False)
        assert any(drafts[pause:]), "it tries again"
        assert sum(drafts[pause:]) < 8, "only now and then"
        np.testing.assert_allclose(state.gain[0, 5], gain, rtol=1e-5)

    def test_success_brings_it_back(self):
        drafter = NGram(min_match=2, max_match=8, min_gain=0.5)
        drafts, state = self.rounds(drafter, [0] * 8)
        assert not drafts[-1]
        drafts, _ = self.rounds(drafter, [4] * 40, state=state)
        back = drafts.index(True)
        assert all(drafts[back:])

    def test_only_the_length_that_matched_learns(self):
        drafter = NGram(min_match=2, max_match=8, min_gain=0.5)
        start = drafter.init_state((), 1, CAPACITY)
        _, state = propose(drafter, self.tree, [self.text], state=start)
        after = extend(drafter, state, [5])
        changed = np.flatnonzero(np.asarray(after.gain != start.gain))
        assert changed.tolist() == [5]
        np.testing.assert_allclose(after.gain[0, 5], 2.5 + 0.25 * (5 - 2.5))
        _, state = propose(drafter, self.tree, [[0, 1, 2]], state=after)
        unmatched = extend(drafter, state, [0])
        np.testing.assert_array_equal(unmatched.gain, after.gain)

    def test_slots_learn_apart_and_finished_ones_not_at_all(self):
        drafter = NGram(min_match=2, max_match=8, min_gain=0.5)
        start = drafter.init_state((), 3, CAPACITY)
        active = [True, True, False]
        drafted, state = propose(drafter, self.tree, [self.text] * 3, state=start, active=active)
        assert drafted.valid[:, 1].tolist() == active
        after = extend(drafter, state, [0, 5, 0], count=[1, 6, 0])
        assert float(after.gain[0, 5]) < 2.5 < float(after.gain[1, 5])
        np.testing.assert_array_equal(after.gain[2], start.gain[2])


class TestRefusals:
    @pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (-1, -1)])
    def test_match_lengths(self, low, high):
        with pytest.raises(ValueError, match="1 <= min_match <= max_match") as refusal:
            NGram(min_match=low, max_match=high)
        assert f"min_match={low}, max_match={high}" in str(refusal.value)

    def test_number_of_matches(self):
        with pytest.raises(ValueError, match="num_matches=0; expected at least 1"):
            NGram(num_matches=0)

    def test_a_fixed_shape(self):
        with pytest.raises(NotImplementedError, match="give a TreeConfig, not a StaticTree"):
            NGram().check(tiny_target(), chain(3))

    def test_more_nodes_than_matches_can_fill(self):
        target, tree = tiny_target(), TreeConfig(num_steps=3, topk=4, num_nodes=8)
        NGram(num_matches=3).check(target, tree)
        with pytest.raises(ValueError, match="give at most 6") as refusal:
            NGram(num_matches=2).check(target, tree)
        assert "num_nodes=8" in str(refusal.value)
        assert "raise num_steps or num_matches" in str(refusal.value)
