"""A drafter that guesses nothing right is told from one that does."""

import math
import warnings

import pytest
from scripted_drafters import Scripted, answers_from
from tiny_models import tiny_target

import jspec
from jspec.drafters import NGram, probe
from jspec.drafters.probe import warn_if_useless


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def scripted(target):
    prompts = probe._prompts(target)
    plain = jspec.Engine(target).generate(prompts, jspec.SamplingParams(max_new_tokens=24))

    def make(kind):
        answers = answers_from(plain, 96)
        return Scripted(kind=kind, answers=answers, vocab_size=target.config.vocab_size)

    return make


def test_measures_acceptance_of_the_first_guess(target, scripted):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_if_useless(target, scripted("right")) == 1.0
    with pytest.warns(UserWarning, match=r"wrong guesses 0\.0% .* Likely causes: it was trained"):
        assert warn_if_useless(target, scripted("wrong")) == 0.0


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa"])
def test_causes_fit_the_method(target, monkeypatch, name):
    monkeypatch.setattr(probe, "probe_acceptance", lambda *_: 0.01)
    cause = {"eagle": "bias of fc", "eagle3": "off by one", "medusa": "Medusa-2"}[name]
    with pytest.warns(UserWarning, match=rf"{name} guesses 1\.0% .*{cause}.*rope_theta"):
        warn_if_useless(target, type("Named", (NGram,), {"name": name})())


@pytest.mark.parametrize("measured", [probe.USELESS, 0.5, math.nan])
def test_a_weak_drafter_or_one_that_drafts_nothing_is_no_reason_to_warn(
    target, monkeypatch, measured
):
    monkeypatch.setattr(probe, "probe_acceptance", lambda *_: measured)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_useless(target, NGram())


def test_prompts_without_a_tokenizer(target):
    assert all(
        0 <= token < target.config.vocab_size for ids in probe._prompts(target) for token in ids
    )
