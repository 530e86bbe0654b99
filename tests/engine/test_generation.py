"""Limits, stops, streaming, statistics, recompilation, transfers, and what the cache may hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted_drafters import Scripted, answers_from
from tiny_models import tiny_target
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

import jspec
from jspec.engine.batch import Batch
from jspec.engine.prefill import MAX_CHUNK, capacity_bucket, chunk_plan
from jspec.targets.masks import causal_bits
from jspec.tokenizer import StreamDecoder, Tokenizer
from jspec.trees import chain

PROMPTS = [[5, 9, 2], [7] * 21, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]
SAMPLING = jspec.SamplingParams(max_new_tokens=24)


class LetterStream(StreamDecoder):
    def __init__(self):
        pass

    def push(self, ids):
        return "".join(chr(65 + int(token)) for token in ids)

    def flush(self):
        return ""


class Letters(Tokenizer):
    """Token i is one character; enough of a tokenizer for stop strings."""

    def __init__(self):
        pass

    def decode(self, ids):
        return LetterStream().push(ids)

    def stream_decoder(self):
        return LetterStream()


def with_letters(target):
    target.__dict__["tokenizer"] = Letters()
    return target


@pytest.fixture(scope="module")
def target():
    return with_letters(tiny_target())


@pytest.fixture(scope="module")
def plain_engine(target):
    return jspec.Engine(target)


@pytest.fixture(scope="module")
def plain(plain_engine):
    return plain_engine.generate(PROMPTS, SAMPLING)


@pytest.fixture(scope="module")
def engine(target, plain):
    """Always right, four tokens a round."""
    drafter = Scripted(kind="right", answers=answers_from(plain, 96), vocab_size=40)
    return jspec.Engine(target, drafter, tree=chain(3))


@pytest.mark.parametrize("cap", range(1, 12))
def test_max_new_tokens_cuts_inside_a_run(engine, plain, cap):
    outputs = engine.generate(PROMPTS, jspec.SamplingParams(max_new_tokens=cap))
    for got, want in zip(outputs, plain):
        assert got.token_ids == want.token_ids[:cap]
        assert got.finish_reason == "length"
        assert sum(got.stats.accept_lengths) == cap - 1


@pytest.mark.parametrize("place", range(12))
def test_stop_token_cuts_inside_a_run(engine, plain, place):
    stop = plain[0].token_ids[place]
    first = plain[0].token_ids.index(stop)
    sampling = jspec.SamplingParams(max_new_tokens=24, stop_token_ids=[stop])
    [got] = engine.generate([PROMPTS[0]], sampling)
    assert got.token_ids == plain[0].token_ids[: first + 1]
    assert got.finish_reason == "stop"
    assert got.text == Letters().decode(got.token_ids[:-1])
    assert len(got.stats.from_draft()) == len(got.token_ids)


@pytest.mark.parametrize("start", range(0, 12))
@pytest.mark.parametrize("size", [1, 3])
def test_stop_string_is_cut_exactly(engine, plain, start, size):
    text = plain[0].text
    stop = text[start : start + size]
    sampling = jspec.SamplingParams(max_new_tokens=24, stop=[stop, "never"])
    [got] = engine.generate([PROMPTS[0]], sampling)
    at = text.index(stop)
    assert got.text == text[:at]
    assert got.token_ids == plain[0].token_ids[: at + size]
    assert got.finish_reason == "stop"
    assert sum(got.stats.accept_lengths) == len(got.token_ids) - 1


def test_eos_and_ignore_eos(target, plain):
    eos = plain[0].token_ids[5]
    ending = with_letters(
        type(target)(
            name="ending",
            config=target.config,
            graphdef=target.graphdef,
            params=target.params,
            eos_token_ids=frozenset({eos}),
        )
    )
    engine = jspec.Engine(ending, "ngram")
    [got] = engine.generate([PROMPTS[0]], SAMPLING)
    assert got.token_ids == plain[0].token_ids[: plain[0].token_ids.index(eos) + 1]
    [on] = engine.generate([PROMPTS[0]], jspec.SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert on.token_ids == plain[0].token_ids


def test_context_limit_ends_the_text():
    small = tiny_target(max_context=32)
    [got] = jspec.Engine(small, "ngram").generate([[3] * 20], SAMPLING)
    assert len(got.token_ids) == 12
    assert got.finish_reason == "length"
    with pytest.raises(ValueError, match=r"32 tokens.*holds 32.*shorten"):
        jspec.Engine(small).generate([[3] * 32])


def test_stream_joins_to_generate(engine, plain):
    updates = list(engine.stream(PROMPTS[1], SAMPLING))
    output = updates[-1].output
    assert output is not None
    assert [token for u in updates for token in u.token_ids] == plain[1].token_ids
    assert "".join(p.text for u in updates for p in u.pieces) == plain[1].text == output.text
    drafted = [p.drafted for u in updates for p in u.pieces]
    assert drafted == output.stats.from_draft()
    view = updates[1].round
    assert view is not None
    assert [node.accepted for node in view.nodes if node] == [True] * 4
    assert view.bonus == updates[1].token_ids[-1]


def in_two_bytes(first, second):
    """Byte-level: two tokens are the bytes of é, every other one is a letter."""
    letters = [chr(65 + token) for token in range(40)]
    letters[first], letters[second] = "Ã©"  # as byte-level vocabularies write 0xC3 and 0xA9
    backend = Backend(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stream_shows_what_is_certain(engine, plain, target, monkeypatch, stopped):
    """A character of two bytes, and a stop string around it, begin in one round and end in another.

    After the prefill's token there are four a round: tokens 1 to 4, 5 to 8 and so on.
    """
    tokens = plain[0].token_ids
    last = next(place for place in range(4, 20, 4) if tokens[place] != tokens[place + 1])
    monkeypatch.setitem(target.__dict__, "tokenizer", in_two_bytes(*tokens[last : last + 2]))
    whole = target.tokenizer.decode(tokens)
    before = target.tokenizer.decode(tokens[:last])
    assert whole.startswith(f"{before}é")
    stop = whole[last - 1 : last + 2]
    end = whole.index(stop)
    asked = jspec.SamplingParams(max_new_tokens=24, stop=[stop] if stopped else [])
    shown, seen = "", []
    for update in engine.stream(PROMPTS[0], asked):
        seen += update.token_ids
        shown += "".join(piece.text for piece in update.pieces)
        if len(seen) == last + 1:
            assert shown == (whole[:end] if stopped else before)
    assert update.output.text == shown == (whole[:end] if stopped else whole)
    assert update.output.finish_reason == ("stop" if stopped else "length")
    [output] = engine.generate([PROMPTS[0]], asked)
    assert output.text == shown


def test_a_cut_round_shows_no_bonus(engine, plain):
    """Four tokens a round, six in all: the second round ends with its first drafted token."""
    updates = list(engine.stream(PROMPTS[1], jspec.SamplingParams(max_new_tokens=6)))
    cut = updates[-1].round
    assert updates[-1].token_ids == plain[1].token_ids[5:6]
    assert [node.token for node in cut.nodes if node.accepted] == plain[1].token_ids[4:6]
    assert cut.bonus is None


def test_one_trace_per_shape(target):
    engine = jspec.Engine(target, "ngram", batch_size=2)
    for prompts in (PROMPTS[:2], PROMPTS[1:], [[1], [2, 3]], [[4] * 16, [5] * 9]):
        engine.generate(prompts, SAMPLING)
        engine.generate(prompts, jspec.SamplingParams(max_new_tokens=30, stop=["zz"]))
    assert engine.traces == {"prefill 32": 1, "prefill 16": 1, "rounds": 1}


def test_no_transfer_inside_the_rounds(engine):
    batch = Batch(engine, PROMPTS, [SAMPLING] * 3, 3, incremental=False)
    budget = jnp.asarray(4, jnp.int32)
    with jax.transfer_guard("disallow"):
        state = engine.run_rounds(engine.params, batch.state, budget, sampled=False)
        state = engine.run_rounds(engine.params, state, budget, sampled=False)
    assert int(state.log.rounds[0]) > 4


@pytest.mark.parametrize("kind", ["right", "random", "wrong"])
def test_cache_holds_committed_tokens_only(target, plain, kind):
    """Rows below the length equal a fresh pass over the text; all others were never written."""
    drafter = Scripted(kind=kind, answers=answers_from(plain, 96), vocab_size=40)
    engine = jspec.Engine(target, drafter, tree=jspec.TreeConfig(num_steps=4, topk=3, num_nodes=20))
    batch = Batch(engine, PROMPTS, [SAMPLING] * 3, 3, incremental=False)
    while batch.running:
        batch.advance(2)
    state = batch.state
    for slot, (prompt, want) in enumerate(zip(PROMPTS, plain)):
        text = jnp.asarray([prompt + want.token_ids], jnp.int32)
        length = int(state.lengths[slot])
        assert length == text.shape[1] - 1
        positions = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
        fresh = target.forward(target.params, text, positions).new
        for cache, rows in zip(
            state.cache.keys + state.cache.values, fresh.keys + fresh.values, strict=True
        ):
            np.testing.assert_allclose(cache[slot, :length], rows[0, :length], atol=2e-5)
            assert not np.any(cache[slot, length:])


@pytest.mark.parametrize("length", [1.0, 2.5, 3.25, 4.0])
def test_simulated_acceptance(target, plain, length):
    drafter = Scripted(kind="wrong", answers=answers_from(plain, 96), vocab_size=40)
    engine = jspec.Engine(target, drafter, tree=chain(3), simulate_accept_length=length)
    [got] = engine.generate([PROMPTS[0]], jspec.SamplingParams(max_new_tokens=101))
    assert got.simulated
    assert got.stats.rule == "simulated"
    assert len(got.token_ids) == 101
    assert got.stats.accept_length == pytest.approx(length, abs=0.1)


def test_long_prompt_in_chunks_equals_one_pass():
    target = tiny_target(max_context=2048)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40, size).tolist() for size in (MAX_CHUNK + 70, 30, MAX_CHUNK)]
    outputs = jspec.Engine(target, "ngram").generate(
        prompts, jspec.SamplingParams(max_new_tokens=4)
    )
    for prompt, got in zip(prompts, outputs):
        text = jnp.asarray([prompt + got.token_ids], jnp.int32)
        positions = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
        hidden = target.forward(target.params, text, positions).hidden[:, len(prompt) - 1 : -1]
        scored = target.logits(target.params, hidden).argmax(axis=-1)[0]
        assert got.token_ids == scored.tolist()


def test_chunk_plan_covers_every_length():
    for longest in (1, 15, 16, 17, 511, 512, 513, 1024, 1500):
        plan = chunk_plan(longest)
        assert sum(width for _, width in plan) >= longest
        assert [offset for offset, _ in plan] == [MAX_CHUNK * i for i in range(len(plan))]


def test_capacity_buckets_are_few_and_fit():
    sizes = {capacity_bucket(tokens) for tokens in range(1, 9000)}
    assert len(sizes) < 15
    assert all(
        tokens <= capacity_bucket(tokens) < max(2 * tokens, 129) for tokens in range(1, 9000)
    )


def test_causal_bits():
    bits = np.asarray(causal_bits(70))[0]
    seen = (bits[:, np.arange(70) // 32] >> (np.arange(70) % 32)) & 1
    np.testing.assert_array_equal(seen, np.tril(np.ones((70, 70), np.uint32)))


def test_unusual_prompts_are_refused(plain_engine):
    with pytest.raises(ValueError, match="empty"):
        plain_engine.generate([[]])
    with pytest.raises(ValueError, match=r"token id 40 .* 0 to 39"):
        plain_engine.generate([[40]])
    with pytest.raises(ValueError, match="2 sampling parameters for 1"):
        plain_engine.generate([[1]], [SAMPLING, SAMPLING])


def test_settings_that_cannot_work_are_refused(target):
    with pytest.raises(ValueError, match="eagle9"):
        jspec.Engine(target, "eagle9")
    with pytest.raises(ValueError, match="needs a drafter"):
        jspec.Engine(target, tree=jspec.TreeConfig())
    with pytest.raises(ValueError, match="simulate_accept_length=9"):
        jspec.Engine(target, "ngram", simulate_accept_length=9.0)
    with pytest.raises(ValueError, match=r"top_p=1.5; expected a number above 0"):
        jspec.SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match="temperature"):
        jspec.SamplingParams(temperature=-1.0)
    with pytest.raises(ValueError, match="empty string"):
        jspec.SamplingParams(stop=[""])
