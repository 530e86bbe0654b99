"""Law 1: greedy speculative tokens are the greedy plain tokens, whatever is drafted."""

import numpy as np
import pytest
from scripted_drafters import KINDS, Scripted, answers_from
from tiny_models import tiny_target

import jspec
from jspec.trees import cartesian, chain, from_choices

# 8 nodes; topk 3 with T > P, and leaves at every depth.
EIGHT = from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
# 26 nodes in the manner of EAGLE-1's static tree: wide at the top, thin below.
TWENTY_SIX = from_choices(
    [[rank] for rank in range(4)]
    + [[a, b] for a in range(4) for b in range(3 - a // 2)]
    + [[a, b, 0] for a in range(3) for b in range(2)]
    + [[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0, 0]]
)
SIXTY_FOUR = cartesian([3, 5, 2, 1])

TREES = {
    "chain-1": chain(1),
    "chain-3": chain(3),
    "chain-7": chain(7),
    "static-8": EIGHT,
    "static-26": TWENTY_SIX,
    "static-79": SIXTY_FOUR,
    "static-64": cartesian([3, 4, 4]),
    "dynamic-chain": jspec.TreeConfig(num_steps=4, topk=1),
    "dynamic-8": jspec.TreeConfig(num_steps=5, topk=4, num_nodes=8),
    "dynamic-40": jspec.TreeConfig(num_steps=6, topk=3, num_nodes=40),
}
# The others keep the best-scored nodes, which need not include the deepest right one.
FULL_DEPTH = {name for name in TREES if not name.startswith("dynamic")} | {"dynamic-chain"}
PROMPTS = [[5, 9, 2], [7] * 21, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [30], [11, 12, 13, 14, 15, 16, 17]]
NEW = 24


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def plain(target):
    return jspec.Engine(target).generate(PROMPTS, jspec.SamplingParams(max_new_tokens=NEW))


@pytest.fixture(scope="module")
def answers(plain):
    return answers_from(plain, 96)


def test_tree_sizes():
    assert TREES["static-8"].num_nodes == 8
    assert TREES["static-26"].num_nodes == 26
    assert TREES["static-64"].num_nodes == 64
    assert TREES["static-64"].path_width < TREES["static-64"].num_nodes


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("shape", TREES)
def test_scripted(target, plain, answers, shape, batch):
    tree = TREES[shape]
    engine = None
    for kind in KINDS:
        drafter = Scripted(kind=kind, answers=answers, vocab_size=target.config.vocab_size)
        engine = engine or jspec.Engine(target, drafter, tree=tree, batch_size=batch)
        engine.params = (target.params, drafter.params)
        outputs = engine.generate(PROMPTS[:batch], jspec.SamplingParams(max_new_tokens=NEW))
        for got, want in zip(outputs, plain):
            assert got.token_ids == want.token_ids, kind
            assert got.finish_reason == want.finish_reason
            assert sum(got.stats.accept_lengths) == len(got.token_ids) - 1
            if kind == "wrong":
                assert set(got.stats.accept_lengths) == {1}
            if kind == "right" and shape in FULL_DEPTH:
                assert set(got.stats.accept_lengths[:-1]) <= {tree.path_width}
        if kind == "random" and tree.topk > 1:
            assert any(set(o.stats.corrects) > {0} for o in outputs), "never accepted anything"
    assert engine.traces["rounds"] == 1


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize(
    "tree",
    [
        jspec.TreeConfig(num_steps=1, topk=1),
        jspec.TreeConfig(num_steps=3, topk=1),
        jspec.TreeConfig(num_steps=7, topk=1),
        jspec.TreeConfig(num_steps=5, topk=4, num_nodes=8),
        jspec.TreeConfig(num_steps=5, topk=3, num_nodes=26),
        jspec.TreeConfig(num_steps=8, topk=4, num_nodes=64),
    ],
    ids=lambda tree: f"{tree.num_steps}-{tree.topk}-{tree.num_nodes}",
)
def test_ngram(target, plain, tree, batch):
    engine = jspec.Engine(target, "ngram", tree=tree, batch_size=batch)
    outputs = engine.generate(PROMPTS[:batch], jspec.SamplingParams(max_new_tokens=NEW))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain[:batch]]
    assert sum(o.stats.drafted for o in outputs) > 0


def test_sampled_text_is_the_same_with_and_without_speculation(target):
    sampling = [
        jspec.SamplingParams(max_new_tokens=NEW, temperature=t, seed=s)
        for t, s in [(0.0, 1), (0.7, 2), (1.0, 2**40), (1.5, 4), (1.0, 5)]
    ]
    plain = jspec.Engine(target).generate(PROMPTS, sampling)
    for tree in (TREES["static-26"], TREES["dynamic-8"]):
        drafter = Scripted(
            kind="random", answers=answers_from(plain, 96), vocab_size=target.config.vocab_size
        )
        engine = jspec.Engine(target, drafter, tree=tree)
        outputs = engine.generate(PROMPTS, sampling)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert np.mean([o.stats.accept_length for o in outputs]) > 1


def test_more_prompts_than_slots(target, plain):
    engine = jspec.Engine(target, "ngram", batch_size=2)
    outputs = engine.generate(PROMPTS, jspec.SamplingParams(max_new_tokens=NEW))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
