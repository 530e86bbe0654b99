"""From logits to the end of a text: the draw, the cut, the counters and the stop strings."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.engine.finish import cut_run
from jspec.engine.state import FAILED, LENGTH, RUNNING, STOPPED, RoundLog
from jspec.engine.stats import Stats, acceptance_by_depth, read_stats
from jspec.engine.text import TextBuilder
from jspec.sampling import Shaping, choose_tokens, draft_keys, process_logits
from jspec.tokenizer import StreamDecoder, Tokenizer

FALSE_ALARM = 1e-5


def read_run(run, count, stop_ids, room):
    """The definition: token by token, as plain decoding would."""
    kept = 0
    for token in run[:count]:
        if token < 0:
            return kept, FAILED
        kept += 1
        if token in stop_ids:
            return kept, STOPPED
        if kept == room:
            return kept, LENGTH
    return kept, RUNNING


class TestCutRun:
    cut = staticmethod(jax.jit(cut_run))
    width = 4

    def check(self, runs, counts, stop_ids, rooms):
        columns = (runs, counts, stop_ids, rooms)
        arrays = [jnp.asarray(np.array(column, np.int32)) for column in columns]
        kept, reason = jax.device_get(self.cut(*arrays))
        expected = [
            read_run(run, count, {s for s in stops if s >= 0}, room)
            for run, count, stops, room in zip(*columns)
        ]
        np.testing.assert_array_equal(kept, [k for k, _ in expected])
        np.testing.assert_array_equal(reason, [r for _, r in expected])

    @pytest.mark.parametrize(
        "stop_ids", [(-1, -1, -1), (-1, 2, -1), (3, 1, -1), (0, 1, 2), (2, 2, 2)], ids=str
    )
    def test_every_run_length_and_room(self, stop_ids):
        """All runs of four tokens over four, so every stop position; what is uncounted is noise."""
        cases = list(
            itertools.product(
                itertools.product(range(4), repeat=self.width),
                range(self.width + 1),
                range(1, self.width + 2),
            )
        )
        runs, counts, rooms = zip(*cases)
        self.check(runs, counts, [stop_ids] * len(cases), rooms)

    def test_a_missing_token_is_a_failure_and_not_padding_of_the_stops(self):
        runs, stops = [[3, 4, -1, 5]] * 4, [(5, -1, -1), (-1, -1, -1), (4, -1, -1), (9, 9, 9)]
        self.check(runs, [4, 2, 3, 3], stops, [9, 9, 9, 2])
        self.check([[-1, -1, 5, -1]] * 2, [4, 2], [(5, -1, -1), (-1, -1, -1)], [9, 9])

    def test_slots_have_their_own_stops_and_rooms(self):
        runs = [[1, 2, 3, 4]] * 4
        stops = [(3, -1, -1), (4, 9, -1), (-1, -1, 1), (9, 9, 9)]
        self.check(runs, [4, 4, 3, 2], stops, [9, 3, 1, 2])

    def test_a_stop_in_the_last_place_is_a_stop(self):
        kept, reason = self.cut(
            jnp.array([[1, 7, 7, 7]], jnp.int32),
            *(jnp.array(x, jnp.int32) for x in ([4], [[7]], [2])),
        )
        assert (int(kept[0]), int(reason[0])) == (2, STOPPED)

    def test_finished_slots_keep_nothing(self):
        zeros = jnp.zeros((2,), jnp.int32)
        room = jnp.array([0, 5], jnp.int32)
        runs, stops = jnp.full((2, 4), 7, jnp.int32), jnp.full((2, 1), 7, jnp.int32)
        kept, reason = self.cut(runs, zeros, stops, room)
        assert kept.tolist() == [0, 0]
        assert int(reason[1]) == RUNNING


def stats(accept_lengths, corrects, drafts, num_steps=3):
    return Stats(
        accept_lengths=accept_lengths,
        corrects=corrects,
        drafts=drafts,
        num_steps=num_steps,
        drafter="test",
        rule="target-sampling",
    )


class TestStats:
    def test_counters(self):
        one = stats([3, 1, 2], [2, 0, 1], [5, 0, 4])
        assert (one.rounds, one.drafted, one.correct) == (3, 9, 3)
        assert one.accept_length == 2.0
        assert math.isnan(stats([], [], []).accept_length)

    def test_acceptance_counts_rounds_that_got_that_far(self):
        one = stats([4, 3, 2, 1, 1], [3, 2, 1, 0, 0], [7, 7, 7, 7, 0])
        assert one.acceptance_by_depth == [3 / 4, 2 / 3, 1 / 2]

    def test_acceptance_over_requests(self):
        deep, shallow = stats([4], [3], [3]), stats([1, 2], [0, 1], [2, 2], num_steps=1)
        assert acceptance_by_depth([deep, shallow]) == [2 / 3, 1 / 2, 1.0]

    def test_acceptance_where_nothing_got_there_is_not_a_number(self):
        rates = stats([1, 1], [0, 0], [3, 0]).acceptance_by_depth
        assert rates[0] == 0.0
        assert all(math.isnan(rate) for rate in rates[1:])
        assert len(rates) == 3
        assert math.isnan(stats([1], [0], [0], num_steps=1).acceptance_by_depth[0])
        assert stats([1], [0], [0], num_steps=0).acceptance_by_depth == []
        assert acceptance_by_depth([]) == []

    def test_a_cut_hides_neither_a_correct_draft_nor_a_rate(self):
        """The last round drafted three right tokens and a stop kept one."""
        one = stats([2, 1], [1, 3], [4, 4])
        assert one.from_draft() == [False, True, False, True]
        assert one.acceptance_by_depth == [1.0, 1 / 2, 1.0]

    def test_who_wrote_each_token(self):
        marks = stats([3, 1, 2], [2, 0, 1], [4, 4, 4]).from_draft()
        assert marks == [False, True, True, False, False, True, False]
        assert stats([], [], []).from_draft() == [False]

    @pytest.mark.parametrize("max_tokens", range(1, 12))
    def test_reading_stops_at_the_end_of_the_text(self, max_tokens):
        log = RoundLog(
            rounds=np.array([1, 4], np.int32),
            emitted=np.array([[9, 0, 0, 0, 0], [3, 1, 4, 2, 7]], np.int32),
            correct=np.array([[8, 0, 0, 0, 0], [2, 0, 3, 1, 7]], np.int32),
            drafted=np.array([[9, 0, 0, 0, 0], [5, 4, 5, 4, 7]], np.int32),
        )
        one = read_stats(
            log, 1, num_steps=3, drafter="test", rule="target-sampling", max_tokens=max_tokens
        )
        # One entry a token after the first: the round that wrote it.
        rounds = [0, 0, 0, 1, 2, 2, 2, 2, 3, 3][: max_tokens - 1]
        seen = sorted(set(rounds))
        assert one.accept_lengths == [rounds.count(r) for r in seen]
        assert one.corrects == [[2, 0, 3, 1][r] for r in seen]
        assert one.drafts == [[5, 4, 5, 4][r] for r in seen]
        assert len(one.from_draft()) == len(rounds) + 1
        assert (one.num_steps, one.drafter, one.rule) == (3, "test", "target-sampling")


class Lagging(StreamDecoder):
    """Keeps the last `lag` characters to itself, as a decoder does with half a code point."""

    def __init__(self, vocabulary, lag):
        self.vocabulary, self.lag, self.waiting = vocabulary, lag, ""

    def push(self, ids):
        text = self.waiting + "".join(self.vocabulary[token] for token in ids)
        sure = max(len(text) - self.lag, 0)
        self.waiting = text[sure:]
        return text[:sure]

    def flush(self):
        return self.waiting


class Words(Tokenizer):
    def __init__(self, vocabulary, lag=0):
        self.vocabulary, self.lag = vocabulary, lag

    def stream_decoder(self):
        return Lagging(self.vocabulary, self.lag)


def undecided(text, stops):
    """How much of the end of `text` may yet become a stop string."""
    begins = (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))
    return max(begins, default=0)


letters = st.text("ab", min_size=0, max_size=3)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


class TestTextBuilder:
    @given(
        vocabulary=st.lists(letters, min_size=3, max_size=3),
        tokens=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=14),
        stops=stop_strings,
        lag=st.integers(0, 2),
    )
    @settings(deadline=None, max_examples=200)
    def test_the_text_is_cut_at_the_first_stop_string(self, vocabulary, tokens, stops, lag):
        hidden = len(vocabulary)
        builder = TextBuilder(Words(vocabulary, lag), stops, frozenset([hidden]))
        decoder = Lagging(vocabulary, lag)
        whole, marks, shown = "", [], []  # all text so far, who wrote it, what came out
        ended = None
        for step in [*tokens, None]:
            if step is None:
                new, drafted, pieces = decoder.flush(), False, builder.flush()
            else:
                new = decoder.push([step[0]]) if step[0] != hidden else ""
                drafted, pieces = step[1], builder.push(*step)
            if ended is None:
                whole += new
                marks += [drafted] * len(new)
                found = [whole.find(stop) for stop in stops if stop in whole]
                ended = min(found, default=None)
            else:
                assert pieces == []
            assert all(piece.text for piece in pieces)
            shown += [(letter, piece.drafted) for piece in pieces for letter in piece.text]
            # Everything that is certain is out, and nothing else.
            if ended is not None:
                sure = ended
            else:
                sure = len(whole) - (0 if step is None else undecided(whole, stops))
            assert shown == list(zip(whole, marks))[:sure]
            assert builder.text == whole[:sure]
            assert builder.stopped == (ended is not None)

    def test_a_false_start_is_released_with_its_authors(self):
        builder = TextBuilder(Words(["ab", "c", "d"]), ["bcx"], frozenset())
        first = builder.push(0, True)
        assert [(p.text, p.drafted) for p in first] == [("a", True)]
        assert builder.push(1, False) == []
        rest = builder.push(2, True)
        assert [(p.text, p.drafted) for p in rest] == [("b", True), ("c", False), ("d", True)]

    def test_without_stops_nothing_waits(self):
        builder = TextBuilder(Words(["ab", "", "c"]), [], frozenset([2]))
        assert [p.text for token in (0, 1, 2, 0) for p in builder.push(token, False)] == ["ab"] * 2
        assert builder.flush() == []
        assert builder.text == "abab"


@jax.jit
def draw(logits, temperature, keys, positions):
    logits = process_logits(
        logits, Shaping(), temperature, jnp.zeros_like(positions), None, None, sampled=True
    )
    return choose_tokens(logits, temperature, keys, positions, sampled=True)


def keys_of(seeds):
    return jax.random.key_data(jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32)))


def chi_square_tail(observed, expected):
    """Chance of a deviation at least this large."""
    statistic = np.sum((observed - expected) ** 2 / expected)
    freedom = observed.size - 1
    return float(jax.scipy.special.gammaincc(jnp.float32(freedom / 2), jnp.float32(statistic / 2)))


class TestChooseTokens:
    @pytest.mark.parametrize("sampled", [False, True])
    def test_greedy_ties_take_the_lowest_id(self, sampled):
        rows = np.array([[0, 3, 1, 3, 3], [2, 2, 2, 2, 2], [-9, -9, -8, -9, -8]], np.float32)
        logits = jnp.asarray(rows)[None]
        positions = jnp.arange(3, dtype=jnp.int32)[None]
        chosen = choose_tokens(logits, jnp.zeros((1,)), keys_of([3]), positions, sampled=sampled)
        assert chosen.tolist() == [[1, 0, 2]]
        assert chosen.dtype == jnp.int32

    @pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
    def test_the_draw_follows_the_softmax(self, temperature):
        """Alone, and together with the draw at the next position."""
        row = np.array([1.0, 0.0, -1.0, 0.5, 0.9], np.float32)
        batch, nodes, vocabulary = 40, 500, row.size
        positions = np.tile(np.arange(1, nodes + 1, dtype=np.int32), (batch, 1))
        tokens = draw(
            jnp.broadcast_to(jnp.asarray(row), (batch, nodes, vocabulary)),
            jnp.full((batch,), temperature),
            keys_of(np.arange(batch)),
            jnp.asarray(positions),
        )
        tokens = np.asarray(tokens)
        chance = np.exp(row.astype(np.float64) / temperature)
        chance /= chance.sum()
        observed = np.bincount(tokens.ravel(), minlength=vocabulary)
        assert chi_square_tail(observed, chance * tokens.size) > FALSE_ALARM

        pairs = (tokens[:, ::2] * vocabulary + tokens[:, 1::2]).ravel()
        neighbours = (tokens[::2] * vocabulary + tokens[1::2]).ravel()
        joint = np.outer(chance, chance).ravel()
        for both in (pairs, neighbours):
            observed = np.bincount(both, minlength=joint.size)
            # Cells too rare for the chi-square are counted as one.
            rare = joint * both.size < 10
            merge = [np.append(x[~rare], x[rare].sum()) for x in (observed, joint * both.size)]
            keep = merge[1] > 0
            assert chi_square_tail(merge[0][keep], merge[1][keep]) > FALSE_ALARM

    @given(
        order=st.permutations(range(4)),
        seeds=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4),
        start=st.integers(0, 2**20),
    )
    @settings(deadline=None, max_examples=30)
    def test_row_and_neighbours_do_not_matter(self, order, seeds, start):
        rng = np.random.default_rng(start)
        logits = rng.normal(size=(4, 3, 17)).astype(np.float32)
        temperature = np.array([0.0, 0.5, 1.0, 2.0], np.float32)
        positions = (start + rng.integers(0, 9, (4, 3))).astype(np.int32)
        keys = np.asarray(keys_of(seeds))
        columns, order = (logits, temperature, keys, positions), np.array(order)
        straight = draw(*map(jnp.asarray, columns))
        turned = draw(*(jnp.asarray(column[order]) for column in columns))
        np.testing.assert_array_equal(turned, np.asarray(straight)[order])
        repeated = draw(*(jnp.asarray(np.repeat(column[:1], 4, axis=0)) for column in columns))
        np.testing.assert_array_equal(repeated, np.tile(np.asarray(straight)[:1], (4, 1)))
        assert straight[0].tolist() == logits[0].argmax(axis=-1).tolist()

    def test_noise_differs_by_position_and_by_seed(self):
        flat = jnp.zeros((2, 64, 50))
        positions = jnp.tile(jnp.arange(64, dtype=jnp.int32), (2, 1))
        tokens = np.asarray(draw(flat, jnp.ones((2,)), keys_of([1, 2]), positions))
        assert len(set(tokens[0].tolist())) > 20
        assert np.mean(tokens[0] == tokens[1]) < 0.3


def test_a_drafter_never_gets_the_target_noise():
    keys = jnp.asarray([[0, 0], [0, 7], [2**31, 5]], jnp.uint32)
    own = np.asarray(draft_keys(keys))
    assert len({tuple(key) for key in own} | {tuple(key) for key in np.asarray(keys)}) == 6
    for slot, key in enumerate(keys):
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        positions = jnp.arange(4096, dtype=jnp.uint32)
        folded = jax.vmap(lambda p, key=typed: jax.random.key_data(jax.random.fold_in(key, p)))
        assert not (np.asarray(folded(positions)) == own[slot]).all(axis=1).any()
