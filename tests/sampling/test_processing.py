"""Logits processing against transformers, and at the edges that it leaves open."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jspec
from jspec.sampling import History, Shaping, branch_tokens, draw, likeliest, process_logits
from jspec.sampling.filters import keep_threshold
from jspec.trees import build

V = 300  # more than the filters' candidates, so that some rows need the search
ASK_ALL = {
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {1: 1.0},
    "forced_token_ids": {9: 1},
}
"""Asked by the last slot, so that every example takes the same program."""


@functools.partial(jax.jit, static_argnames="sampled")
def processed(logits, shaping, temperature, places, prompts, lengths, tree, *, sampled=True):
    history = History.of_prompts(prompts, lengths, logits.shape[-1])
    branch = branch_tokens(tree, 2)
    return process_logits(logits, shaping, temperature, places, history, branch, sampled=sampled)


def chain_of(tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    parents = jnp.broadcast_to(jnp.arange(-1, tokens.shape[1] - 1, dtype=jnp.int32), tokens.shape)
    return build(tokens, parents, jnp.ones(tokens.shape, bool))


def by_transformers(row, text, output, asked):
    """One row through transformers' processors, in its order; ours where it has none."""
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    from transformers.generation import logits_process as theirs

    ids, scores = torch.tensor([text]), torch.tensor(row[None])
    if asked["logit_bias"]:
        bias = [[[token], float(value)] for token, value in asked["logit_bias"].items()]
        scores = theirs.SequenceBiasLogitsProcessor(bias)(ids, scores)
    if asked["repetition_penalty"] != 1.0:
        penalty = theirs.RepetitionPenaltyLogitsProcessor(asked["repetition_penalty"])
        scores = penalty(ids, scores)
    counts = torch.tensor(np.bincount(output, minlength=V)[None])
    scores = scores - asked["frequency_penalty"] * counts
    scores = scores - asked["presence_penalty"] * (counts > 0)
    scores = theirs.TemperatureLogitsWarper(asked["temperature"])(ids, scores)
    if asked["top_k"]:
        scores = theirs.TopKLogitsWarper(asked["top_k"])(ids, scores)
    if asked["top_p"] < 1:
        scores = theirs.TopPLogitsWarper(asked["top_p"])(ids, scores)
    if asked["min_p"]:
        scores = theirs.MinPLogitsWarper(asked["min_p"])(ids, scores)
    return torch.softmax(scores, dim=-1)[0].numpy()


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    asked=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.5]),
            "top_k": st.sampled_from([0, 1, 5, 129, 200, V]),
            "top_p": st.sampled_from([1.0, 0.01, 0.5, 0.9, 0.99]),
            "min_p": st.sampled_from([0.0, 0.05, 0.5]),
            "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
            "presence_penalty": st.sampled_from([0.0, 0.7]),
            "frequency_penalty": st.sampled_from([0.0, -0.4]),
            "logit_bias": st.dictionaries(
                st.integers(0, V - 1), st.sampled_from([-2.0, 1.5, -np.inf]), max_size=3
            ),
        }
    ),
)
@settings(deadline=None, max_examples=60)
def test_as_transformers_does(seed, spread, asked):
    rng = np.random.default_rng(seed)
    logits = np.float32(spread * rng.standard_normal((2, 3, V)))
    prompt, output = rng.integers(0, V, 9), rng.integers(0, 4, 3)
    temperature = jnp.asarray([asked["temperature"], 1.0])
    params = [jspec.SamplingParams(**asked), jspec.SamplingParams(temperature=1.0, **ASK_ALL)]
    got = processed(
        jnp.asarray(logits),
        Shaping.of(params, 2, V),
        temperature,
        jnp.broadcast_to(jnp.arange(1, 4, dtype=jnp.int32), (2, 3)),
        jnp.asarray(np.stack([prompt, prompt]), jnp.int32),
        jnp.asarray([9, 9], jnp.int32),
        chain_of(np.stack([output, output])),
    )
    mass = np.exp(np.asarray(got[0], np.float64))
    mass /= mass.sum(axis=-1, keepdims=True)
    for node in range(3):
        before = output[: node + 1]
        wanted = by_transformers(logits[0, node], [*prompt, *before], before, asked)
        np.testing.assert_allclose(mass[node], wanted, atol=2e-6)


def filtered(rows, **asked):
    params = [jspec.SamplingParams(temperature=1.0, **asked)]
    shaping = Shaping.of(params, 1, rows.shape[-1])
    shifted = jnp.asarray(rows - rows.max(axis=-1, keepdims=True))[None]
    threshold = keep_threshold(shifted, shaping.top_k, shaping.top_p, shaping.min_p)
    return np.asarray(shifted >= threshold)[0]


@pytest.mark.parametrize("width", [6, 400])
def test_ties_are_kept(width):
    """With the last token kept, everything that ties with it."""
    rows = np.full((1, width), -50.0, np.float32)
    rows[0, :6] = np.log([0.4, 0.2, 0.2, 0.1, 0.05, 0.05])
    kept = {
        "top_k": ({"top_k": 2}, [0, 1, 2]),
        "top_p inside a tie": ({"top_p": 0.5}, [0, 1, 2]),
        "top_p at an edge": ({"top_p": 0.79}, [0, 1, 2]),
        "top_p past it": ({"top_p": 0.81}, [0, 1, 2, 3]),
        "min_p": ({"min_p": 0.24}, [0, 1, 2, 3]),
        "first top_k": ({"top_k": 3, "top_p": 0.7}, [0, 1, 2]),
        "both": ({"top_k": 4, "top_p": 0.4}, [0]),
    }
    for name, (asked, wanted) in kept.items():
        assert np.flatnonzero(filtered(rows, **asked)[0]).tolist() == wanted, name


@pytest.mark.parametrize("top_k", [128, 129, 200, 300])
def test_the_search_finds_what_sorting_finds(top_k):
    rng = np.random.default_rng(top_k)
    rows = np.float32(np.round(rng.standard_normal((4, 300)) * 20) / 40)  # ties everywhere
    kth = np.sort(rows, axis=-1)[:, -top_k]
    np.testing.assert_array_equal(filtered(rows, top_k=top_k), rows >= kth[:, None])
    p = np.exp(rows.astype(np.float64))
    p /= p.sum(axis=-1, keepdims=True)
    above = (p[:, None, :] * (rows[:, None, :] > rows[:, :, None])).sum(axis=-1)
    np.testing.assert_array_equal(filtered(rows, top_p=0.9), above < 0.9)


def test_penalties_follow_the_branch_and_not_the_tree():
    """Siblings do not see each other; a token met twice counts twice."""
    token = jnp.asarray([[3, 4, 5, 3, 4]], jnp.int32)
    parent = jnp.asarray([[-1, 0, 0, 1, 2]], jnp.int32)
    tree = build(token, parent, jnp.ones(token.shape, bool))
    params = [jspec.SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0)]
    prompts = jnp.asarray([[7, 7, 0]], jnp.int32)
    got = processed(
        jnp.full((1, 5, 8), 8.0),
        Shaping.of(params, 1, 8),
        jnp.zeros((1,)),
        jnp.zeros((1, 5), jnp.int32),
        prompts,
        jnp.asarray([2], jnp.int32),
        tree,
        sampled=False,
    )
    # Seen in the prompt only: halved. Seen in the output: halved, and less its count.
    expected = np.full((5, 8), 8.0)
    expected[:, 7] = 4.0
    for node, branch in enumerate(([3], [3, 4], [3, 5], [3, 4, 3], [3, 5, 4])):
        for one in branch:
            expected[node, one] = 4.0 - branch.count(one)
    np.testing.assert_array_equal(got[0], expected)


def test_nothing_asked_changes_nothing():
    shaping = Shaping.of([jspec.SamplingParams()] * 3, 4, 10)
    assert jax.tree.leaves(shaping) == []
    logits = jnp.arange(10.0)[None, None]
    zeros = jnp.zeros((1, 1), jnp.int32)
    same = process_logits(logits, shaping, jnp.zeros((1,)), zeros, None, None, sampled=False)
    assert same is logits


def test_rows_without_a_possible_token():
    rows = jnp.asarray([[-jnp.inf] * 4, [jnp.nan, 1.0, 2.0, 3.0], [0.0, 3.0, 3.0, -jnp.inf]])
    scaled = process_logits(
        rows[None],
        Shaping(),
        jnp.ones((1,)),
        jnp.zeros((1, 3), jnp.int32),
        None,
        None,
        sampled=True,
    )
    assert likeliest(scaled)[0].tolist() == [-1, -1, 1]
    assert likeliest(rows).tolist() == [-1, -1, 1]


@pytest.mark.parametrize("vocabulary", [5, 256, 700])
def test_draws_have_the_measure_of_their_mass(vocabulary):
    """Over a grid of uniforms: within a cell a boundary, and never a token without mass."""
    rng = np.random.default_rng(vocabulary)
    mass = rng.random(vocabulary).astype(np.float32) ** 4
    mass[rng.random(vocabulary) < 0.4] = 0
    side = 128
    grid = (np.stack(np.meshgrid(np.arange(side), np.arange(side)), axis=-1) / side).reshape(-1, 2)
    tokens = jax.jit(draw)(
        jnp.broadcast_to(jnp.asarray(mass), (side * side, vocabulary)),
        jnp.asarray(grid, jnp.float32),
    )
    observed = np.bincount(tokens, minlength=vocabulary) / side**2
    assert (observed[mass == 0] == 0).all()
    share = mass / mass.sum(dtype=np.float64)
    block = np.arange(vocabulary) // 256
    blocks = np.bincount(block, share)[block]
    allowed = (blocks + share / blocks + 1 / side) / side
    assert (np.abs(observed - share) <= allowed).all()
    nothing = draw(jnp.zeros((1, vocabulary)), jnp.zeros((1, 2)))
    assert nothing.tolist() == [-1]
