"""Every sampling parameter means the same with and without speculation; log-probabilities too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_drafters import Scripted, answers_from
from tiny_models import tiny_target

import jspec
from jspec.trees import from_choices

V = 40
NEW = 20
PROMPTS = [[5, 9, 2], [7] * 21, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [30, 30]]
TREE = from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])

EVERYTHING = jspec.SamplingParams(
    temperature=0.9,
    seed=3,
    max_new_tokens=NEW,
    top_k=7,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    logit_bias={4: 1.0},
    banned_token_ids=(11,),
    forced_token_ids={0: 8, 5: 9},
    logprobs=3,
)
"""Asked by the last request of every batch, so that all batches take the same program."""

SHORT = jspec.SamplingParams(max_new_tokens=NEW)


@st.composite
def asked(draw):
    """One request that asks some of what can be asked."""
    tokens = st.integers(0, V - 1)
    bias = draw(st.dictionaries(tokens, st.sampled_from([-np.inf, -3.0, 0.5, 4.0]), max_size=4))
    banned = draw(st.lists(tokens, max_size=3))
    barred = {*banned, *(token for token, value in bias.items() if value == -np.inf)}
    free = tokens.filter(lambda token: token not in barred)
    return {
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0, 1.5])),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "top_k": draw(st.sampled_from([0, 1, 2, 5, V, 10**6])),
        "top_p": draw(st.sampled_from([1.0, 0.95, 0.5, 0.01])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.2, 2.0, 0.7])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.5, -0.5])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.4, -0.3])),
        "logit_bias": bias,
        "banned_token_ids": banned,
        "forced_token_ids": draw(st.dictionaries(st.integers(0, NEW), free, max_size=4)),
        "logprobs": draw(st.sampled_from([None, 0, 2, 3])),
    }


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def plain(target):
    return jspec.Engine(target)


@pytest.fixture(scope="module")
def speculative(target):
    drafter = Scripted(kind="random", answers=np.zeros((4, 96), np.int32), vocab_size=V)
    return jspec.Engine(target, drafter, tree=TREE)


def both(plain, speculative, sampling):
    """Plain outputs, and speculative ones by a drafter that is often right about them."""
    wanted = plain.generate(PROMPTS, sampling)
    drafter = dataclasses.replace(speculative.drafter, answers=answers_from(wanted, 96))
    speculative.params = (speculative.target.params, drafter.params)
    return wanted, speculative.generate(PROMPTS, sampling)


@given(st.lists(asked(), min_size=3, max_size=3))
@settings(deadline=None, max_examples=25)
def test_plain_is_speculative(plain, speculative, requests):
    sampling = [jspec.SamplingParams(max_new_tokens=NEW, **request) for request in requests]
    wanted, got = both(plain, speculative, [*sampling, EVERYTHING])
    for params, one, other in zip([*sampling, EVERYTHING], wanted, got):
        assert one.token_ids == other.token_ids
        assert len(one.token_ids) == NEW
        assert not set(one.token_ids) & set(params.banned_token_ids)
        for place, token in params.forced_token_ids.items():
            assert place >= NEW or one.token_ids[place] == token
        if params.logprobs is not None:
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            assert [len(top) for top in other.top_logprobs] == [params.logprobs] * NEW
    assert plain.traces["rounds"] == speculative.traces["rounds"] == 1


def test_penalties_change_the_text_and_drafts_are_accepted(plain, speculative):
    """What the property test compares is neither the unpenalised text nor plain decoding."""
    greedy = dataclasses.replace(EVERYTHING, temperature=0.0, forced_token_ids={}, logit_bias={})
    without = dataclasses.replace(greedy, repetition_penalty=1.0, presence_penalty=0.0)
    without = dataclasses.replace(without, frequency_penalty=0.0)
    _, with_penalties = both(plain, speculative, [greedy] * 3 + [EVERYTHING])
    wanted, unpenalised = both(plain, speculative, [without] * 3 + [EVERYTHING])
    assert [o.token_ids for o in wanted] == [o.token_ids for o in unpenalised]
    assert all(a.token_ids != b.token_ids for a, b in zip(with_penalties[:3], unpenalised[:3]))
    assert np.mean([o.stats.accept_length for o in with_penalties]) > 1.3
    distinct = [len(set(o.token_ids)) for o in (*with_penalties[:3], *unpenalised[:3])]
    assert min(distinct[:3]) > max(distinct[3:])


def test_logprobs_are_teacher_forced_scores(target, plain, speculative):
    wanted, got = both(plain, speculative, [EVERYTHING] * 4)
    score = jax.jit(
        lambda text, at: target.logits(
            target.params, target.forward(target.params, text, at).hidden
        )
    )
    for outputs in (wanted, got):
        for output in outputs:
            text = output.prompt_token_ids + output.token_ids
            padded = np.zeros((1, 48), np.int32)
            padded[0, : len(text)] = text
            logits = score(jnp.asarray(padded), jnp.arange(48, dtype=jnp.int32)[None])
            rows = jax.nn.log_softmax(logits[0, len(output.prompt_token_ids) - 1 : len(text) - 1])
            rows = np.asarray(rows, np.float64)
            assert len(output.logprobs) == len(output.top_logprobs) == len(output.token_ids)
            own = rows[np.arange(len(rows)), output.token_ids]
            np.testing.assert_allclose(output.logprobs, own, atol=1e-4)
            for row, top in zip(rows, output.top_logprobs):
                assert list(top) == np.argsort(-row)[:3].tolist()
                np.testing.assert_allclose(list(top.values()), np.sort(row)[::-1][:3], atol=1e-4)


def test_a_row_without_a_possible_token_is_an_error(target, plain, speculative):
    none_left = jspec.SamplingParams(max_new_tokens=NEW, banned_token_ids=tuple(range(V)))
    warm = dataclasses.replace(none_left, temperature=1.0)
    for engine in (plain, speculative):
        for banned in (none_left, warm):
            with pytest.raises(ValueError, match=r"request 1 .* no token .* at place 0 of the"):
                engine.generate(PROMPTS, [SHORT, banned, SHORT, EVERYTHING])
    kept = plain.params
    plain.params = (jax.tree.map(lambda leaf: leaf * np.nan, target.params), ())
    with pytest.raises(ValueError, match="the target's logits are not finite"):
        plain.generate(PROMPTS, [SHORT] * 3 + [EVERYTHING])
    plain.params = kept


def test_no_token_is_left_in_the_middle_of_a_text(speculative):
    """Each token can be written twice: the third time its penalty overflows."""
    twice = jspec.SamplingParams(max_new_tokens=2 * V + 9, frequency_penalty=3e38)
    enough = dataclasses.replace(twice, max_new_tokens=2 * V)
    outputs = speculative.generate(PROMPTS, [enough, enough, SHORT, EVERYTHING])
    assert sorted(outputs[0].token_ids) == sorted([*range(V)] * 2)
    with pytest.raises(ValueError, match=r"request 1 of the batch: no token .* at place 80 of"):
        speculative.generate(PROMPTS, [enough, twice, SHORT, EVERYTHING])


def test_the_coldest_draws_are_greedy(plain):
    [greedy, *_] = plain.generate(PROMPTS, [SHORT] * 3 + [EVERYTHING])
    cold = [dataclasses.replace(SHORT, temperature=t, seed=1) for t in (1e-45, 1e-38, 1e-30)]
    got = plain.generate([PROMPTS[0]] * 3 + [PROMPTS[3]], [*cold, EVERYTHING])
    assert [output.token_ids for output in got[:3]] == [greedy.token_ids] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": -1}, "top_k=-1; expected 0"),
        ({"top_p": 0.0}, "top_p=0.0; expected a number above 0"),
        ({"min_p": 1.5}, "min_p=1.5; expected a number from 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0; expected a finite number above 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan; expected a finite number"),
        ({"logit_bias": {3: float("inf")}}, "token 3 is inf; .* use forced_token_ids"),
        ({"logprobs": -1}, "logprobs=-1; expected 0 or more"),
        ({"forced_token_ids": {-1: 3}}, "place -1; expected 0 or more"),
        ({"forced_token_ids": {0: 3}, "banned_token_ids": [3]}, "both banned and forced"),
    ],
)
def test_values_outside_their_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        jspec.SamplingParams(**wrong)


def test_tokens_outside_the_vocabulary_are_refused(plain):
    for wrong in (
        {"logit_bias": {40: 1.0}},
        {"banned_token_ids": [99]},
        {"forced_token_ids": {0: -1}},
    ):
        with pytest.raises(ValueError, match="outside the vocabulary; expected 0 to 39"):
            plain.generate(PROMPTS[:1], jspec.SamplingParams(**wrong))
