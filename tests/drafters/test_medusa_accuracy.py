"""Measured accuracies against counting by hand, and trees built from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_medusa import fitted_heads, random_heads
from tiny_models import tiny_target

import jspec
from jspec.drafters.medusa_accuracy import measure_accuracies
from jspec.drafters.medusa_build import build_medusa
from jspec.trees import chain
from jspec.trees.search import best_tree, expected_accept_length

PROMPTS = [[5, 9, 2], [7] * 21, [30, 4]]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def texts(target):
    outputs = jspec.Engine(target).generate(PROMPTS, jspec.SamplingParams(max_new_tokens=40))
    return [([*o.prompt_token_ids, *o.token_ids], len(o.prompt_token_ids)) for o in outputs]


def by_hand(target, drafter, texts, ranks):
    hits = np.zeros((drafter.config.num_heads, ranks))
    places = np.zeros(drafter.config.num_heads)
    forward = jax.jit(lambda ids, at: target.forward(target.params, ids, at).hidden[0])
    tensors = drafter.heads.tensors
    ids_of = tensors.get("token_map", np.arange(target.config.vocab_size))
    for ids, first in texts:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(ids)] = ids
        hidden = np.asarray(forward(padded, jnp.arange(64, dtype=jnp.int32)[None]), np.float64)
        for head in range(drafter.config.num_heads):
            for place in range(first - 1, len(ids) - 2 - head):
                inside = tensors[f"blocks.{head}.layers.0.weight"] @ hidden[place]
                inside = inside + tensors[f"blocks.{head}.layers.0.bias"]
                x = hidden[place] + inside / (1 + np.exp(-inside))
                best = ids_of[np.argsort(-(tensors[f"lm_heads.{head}.weight"] @ x))[:ranks]]
                hits[head] += best == ids[place + 2 + head]
                places[head] += 1
    return hits / places[:, None]


@pytest.mark.parametrize("small", [None, 17])
def test_counts_what_came(target, texts, small):
    plain = [ids for ids, _ in texts]
    drafter = build_medusa(fitted_heads(target, plain, draft_vocab_size=small), target)
    found = measure_accuracies(target, drafter, texts, ranks=6)
    np.testing.assert_allclose(found, by_hand(target, drafter, texts, 6), atol=1e-12)
    assert found[0, 0] > 0.2
    tree = best_tree(found, 12)
    assert expected_accept_length(tree, found) > expected_accept_length(chain(3), found)


def test_texts_too_short_for_the_last_head(target):
    drafter = build_medusa(random_heads(target.config), target)
    with pytest.raises(ValueError, match="no place where head 2 could be judged: it guesses 4"):
        measure_accuracies(target, drafter, [([1, 2, 3, 4], 1)])
    with pytest.raises(ValueError, match="ranks=41; expected 1 to 40"):
        measure_accuracies(target, drafter, [([1, 2, 3], 1)], ranks=41)
