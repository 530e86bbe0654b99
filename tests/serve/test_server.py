"""Continuous batching gives every request what the engine's own `generate` gives it."""

import threading
from concurrent.futures import CancelledError

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_target

import jspec
import serve
from jspec import SamplingParams
from jspec.engine.prefill import MAX_CHUNK

REQUESTS = [
    ([5, 9, 2], SamplingParams(max_new_tokens=30)),
    ([7] * 21, SamplingParams(max_new_tokens=9)),
    ([1, 2, 3, 4] * 3, SamplingParams(max_new_tokens=24, num_steps=1)),
    ([8], SamplingParams(max_new_tokens=1)),
    ([3, 1] * 12, SamplingParams(max_new_tokens=30, num_steps=0)),
    ([11, 4, 11], SamplingParams(max_new_tokens=20, temperature=0.9, seed=5)),
    ([1, 2, 3, 4] * 3, SamplingParams(max_new_tokens=17, temperature=1.3, seed=2**40 + 1)),
    ([30, 30], SamplingParams(max_new_tokens=30, stop_token_ids=list(range(10)))),
    ([1, 2, 3, 4] * 3, SamplingParams(max_new_tokens=24)),
    ([1, 2, 3, 4] * 3, SamplingParams(max_new_tokens=24, num_steps=0)),
]
EVERY = list(range(40))
WARM = ([2, 2], SamplingParams(max_new_tokens=4, temperature=1.0, seed=1, num_steps=1))


@pytest.fixture(scope="module")
def engine():
    target = tiny_target(num_layers=1, max_context=1024)
    tree = jspec.TreeConfig(num_steps=2, topk=1, num_nodes=3)
    return jspec.Engine(target, "ngram", tree=tree, batch_size=len(REQUESTS))


@pytest.fixture(scope="module")
def expected(engine):
    prompts, sampling = zip(*REQUESTS)
    return engine.generate(list(prompts), list(sampling))


def check(got, want):
    assert got.token_ids == want.token_ids
    assert got.finish_reason == want.finish_reason
    assert got.stats == want.stats


def start(engine, slots=2, **changes):
    server = serve.Server(engine, slots=slots, capacity=128, rounds=3, **changes)
    # The first request's form is everybody's, whatever the order after it.
    server.submit(*WARM).result(300)
    return server


@pytest.mark.once
@settings(
    max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    order=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=8),
    slots=st.sampled_from([1, 2]),
    pause=st.integers(0, 3),
)
def test_equals_generate(engine, expected, order, slots, pause):
    with start(engine, slots) as server:
        handles = []
        for place, index in enumerate(order):
            handles.append(server.submit(*REQUESTS[index]))
            if pause and place % pause == 0:
                handles[place // 2].result(300)
        for handle, index in zip(handles, order):
            check(handle.result(300), expected[index])
    assert server.idle


def test_less_draft_is_the_same_text_in_more_rounds(expected):
    whole, one, none = expected[8], expected[2], expected[9]
    assert whole.token_ids == one.token_ids == none.token_ids
    assert none.stats.drafted == 0
    assert none.stats.accept_lengths == [1] * 23
    assert max(one.stats.corrects) <= 1


def test_streams_and_withdraws(engine, expected):
    with start(engine) as server:
        first = server.submit(*REQUESTS[0])
        endless = server.submit([1], SamplingParams(max_new_tokens=120))
        updates = list(first)
        assert [t for u in updates for t in u.token_ids] == expected[0].token_ids
        assert len(updates) > 1
        check(updates[-1].output, expected[0])
        endless.cancel()
        with pytest.raises(CancelledError):
            endless.result(300)
        with pytest.raises(CancelledError):
            list(endless)
        check(server.submit(*REQUESTS[1]).result(300), expected[1])
    with pytest.raises(RuntimeError, match="closed"):
        server.submit(*REQUESTS[3])


def test_closing_without_finishing_withdraws(engine):
    server = start(engine)
    handles = [server.submit([1], SamplingParams(max_new_tokens=120)) for _ in range(5)]
    server.close(finish=False)
    for handle in handles:
        with pytest.raises(CancelledError):
            handle.result(0)


def test_long_prompts_in_chunks_beside_running_slots(engine, expected):
    long = [(7 * i) % 39 for i in range(MAX_CHUNK + 50)]
    asked = SamplingParams(max_new_tokens=12)
    [want] = engine.generate([long], asked)
    with serve.Server(engine, slots=2, capacity=700, rounds=3) as server:
        handles = [
            server.submit(*REQUESTS[0]),
            server.submit(long, asked),
            server.submit([4], asked),
        ]
        check(handles[1].result(300), want)
        check(handles[0].result(300), expected[0])
        assert len(handles[2].result(300).token_ids) == 12


def test_tables_grow_beside_running_slots(engine, expected):
    """Penalties, biases, forced tokens and log-probabilities join slots that run without them."""
    rich = SamplingParams(
        max_new_tokens=10,
        repetition_penalty=1.5,
        logit_bias={3: 5.0},
        forced_token_ids={2: 9},
        logprobs=2,
    )
    [want] = engine.generate([[5, 9, 2]], rich)
    with start(engine) as server:
        before = server.submit(*REQUESTS[0])
        next(iter(before))
        handle = server.submit([5, 9, 2], rich)
        bad = server.submit([1], SamplingParams(max_new_tokens=5, banned_token_ids=EVERY))
        got = handle.result(300)
        with pytest.raises(ValueError, match="no token is possible at place 0"):
            bad.result(300)
        check(before.result(300), expected[0])
    check(got, want)
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    assert [list(top) for top in got.top_logprobs] == [list(top) for top in want.top_logprobs]


def test_nothing_recompiles_and_nothing_is_left(engine):
    with start(engine) as server:
        for count in (1, 2, 3, 9):
            for handle in [server.submit([count], WARM[1]) for _ in range(count)]:
                handle.result(300)
        traced = dict(engine.traces)
        threads = threading.active_count()
        handles = [server.submit([i % 40], WARM[1], incremental=False) for i in range(300)]
        assert {len(handle.result(300).token_ids) for handle in handles} == {4}
        assert dict(engine.traces) == traced
        assert threading.active_count() == threads
    assert server.idle
    assert not server._live


def test_refuses_what_does_not_fit(engine):
    with pytest.raises(
        ValueError, match=r"needs .* MiB \(weights .*cache .*memory_limit is 1\.0 MiB"
    ):
        serve.Server(engine, slots=2, capacity=128, memory_limit=2**20)
    with start(engine) as server:
        with pytest.raises(ValueError, match=r"needs 140 tokens .*slot holds 128.*capacity"):
            server.submit([1] * 100, SamplingParams(max_new_tokens=40))
        with pytest.raises(ValueError, match="logprobs=21"):
            server.submit([1], SamplingParams(logprobs=21))
        with pytest.raises(ValueError, match="outside the vocabulary"):
            server.submit([1], SamplingParams(logit_bias={40: 1.0}))
    with pytest.raises(ValueError, match="slots=0"):
        serve.Server(engine, slots=0)
