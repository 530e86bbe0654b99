"""Verification rules against runs of SGLang, EAGLE and Medusa.

Every set below the golden root is used, whatever its sizes. The references draw the last token
with one uniform over the whole vocabulary, so our draw is made to use one block.
"""

import functools
import itertools
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from given_logits import given

import jspec
from jspec.drafters import Proposal
from jspec.trees import build
from jspec.verify import Slots, Thresholds, TypicalAcceptance
from jspec.verify.block import block_walk
from jspec.verify.rejection import rejection_walk

ROOT = Path(
    os.environ.get("JSPEC_GOLDEN", Path(__file__).resolve().parents[3] / "shared/golden/dev")
)


@pytest.fixture(autouse=True)
def one_block(monkeypatch):
    monkeypatch.setattr("jspec.sampling.tokens._BLOCK", 1 << 30)


@functools.partial(jax.jit, static_argnames="max_path")
def one_by_one(logits, *rest, max_path):
    return rejection_walk(given(logits), *rest, max_path)


@jax.jit
def as_a_block(logits, *rest):
    return block_walk(given(logits), *rest)


@functools.partial(jax.jit, static_argnames=("rule", "max_path"))
def verified(rule, logits, slots, proposal, max_path):
    return rule.walk(given(logits), proposal, slots, max_path=max_path)


processing = jax.jit(jspec.sampling.process_logits, static_argnames="sampled")


@functools.cache
def arrays(path):
    with np.load(path) as file:
        return dict(file)


def cases(name, find):
    """A parameter per group of recorded cases that one batch can hold; `find` lists them."""
    found = [
        pytest.param(path, group, id=f"{path.parent.parent.name}-{group[0]}")
        for path in sorted(ROOT.rglob(name))
        for group in find(path)
    ]
    skip = pytest.mark.skip(reason=f"no {name} below {ROOT}")
    return pytest.mark.parametrize(
        ("path", "group"), found or [pytest.param(None, None, marks=skip)]
    )


def alike(pattern):
    """Groups the first groups of what an array's name matches by the array's shape."""

    def find(path):
        groups = {}
        for key, array in arrays(path).items():
            if match := re.fullmatch(pattern, key):
                groups.setdefault((match.groups()[1:], array.shape[-2:]), []).append(match[1])
        return [sorted(group) for group in groups.values()]

    return find


def log(probabilities):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(np.asarray(probabilities, np.float32)))


def tree_of(tokens, parents):
    tokens = jnp.asarray(np.asarray(tokens), jnp.int32)
    parents = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), tokens.shape)
    return build(tokens, parents, jnp.ones(tokens.shape, bool))


@pytest.mark.parametrize("way", ["token", "block"])
@cases("chain_sampling.npz", alike(r"(k\d+r\d+_)target_probs"))
def test_drawn_chains_as_sglang_verifies_them(path, group, way):
    data = arrays(path)

    def joined(name):
        return np.concatenate([data[case + name] for case in group])

    draft, token = joined("draft_probs"), joined("candidates")
    batch, nodes = token.shape
    draft = jnp.asarray(np.pad(draft, ((0, 0), (0, 1), (0, 0))))
    proposal = Proposal(tree_of(token, np.arange(nodes) - 1), (), draft)
    # SGLang keeps the coin of a token at the node before it.
    coins = jnp.asarray(np.roll(joined("uniform"), 1, axis=1))
    final = jnp.asarray(np.repeat(joined("uniform_final")[:, None], 2, axis=1))
    given = (log(joined("target_probs")), proposal, jnp.ones((batch,)), coins, final)
    walk = as_a_block(*given) if way == "block" else one_by_one(*given, max_path=nodes)
    np.testing.assert_array_equal(walk.length - 1, joined(f"{way}_accept_len"))
    predict = joined(f"{way}_predict").reshape(batch, nodes)
    last = np.asarray(walk.length) - 1
    np.testing.assert_array_equal(walk.bonus, predict[np.arange(batch), last])


@cases("posterior_sampling.npz", alike(r"(c\d+_)node_logits"))
def test_likeliest_children_as_eagle_verifies_them(path, group):
    """Children that were not drawn are tested one after another; EAGLE throws a coin for each."""
    data = arrays(path)
    listed = json.loads(path.with_suffix(".json").read_text())["cases"]
    settings = {f"c{entry['case']}_": entry for entry in listed}
    asked = [
        jspec.SamplingParams(
            temperature=float(settings[case]["temperature"]),
            top_k=settings[case]["top_k"],
            top_p=float(settings[case]["top_p"]) or 1.0,
        )
        for case in group
    ]
    logits = jnp.asarray(np.stack([data[case + "node_logits"] for case in group]))
    batch, nodes, vocabulary = logits.shape
    temperature = jnp.asarray([params.temperature for params in asked])
    shaping = jspec.sampling.Shaping.of(asked, batch, vocabulary)
    places = jnp.zeros((batch, nodes), jnp.int32)
    processed = processing(logits, shaping, temperature, places, None, None, sampled=True)
    token = np.concatenate([data[case + "draft_tokens"] for case in group])
    parents, coins, paths = [], [], []
    for case in group:
        above, children = links(data[case + "retrieve_indices"], nodes)
        accepted = int(data[case + "accept_length"])
        row = data[case + "retrieve_indices"][int(data[case + "best_candidate"])]
        row = row[: accepted + 1]
        # The coins in the order in which the reference tested nodes on its way.
        tested, thrown = np.ones(nodes, np.float32), iter(data[case + "coins_used"])
        for node, wanted in zip(row, [*row[1:], -1], strict=True):
            for child in children.get(node, []):
                tested[child] = next(thrown)
                if child == wanted:
                    break
        assert next(thrown, None) is None
        parents.append(above)
        coins.append(tested)
        paths.append(row)
    walk = one_by_one(
        processed,
        Proposal(tree_of(token, np.stack(parents)), ()),
        temperature,
        jnp.asarray(np.stack(coins)),
        jnp.full((batch, 2), 0.5),
        max_path=nodes,
    )
    for slot, (case, row) in enumerate(zip(group, paths)):
        assert walk.path[slot, : int(walk.length[slot])].tolist() == row.tolist()
        running = np.cumsum(data[case + "sample_p"].astype(np.float64))
        assert int(walk.bonus[slot]) == int(np.argmax(running > 0.5 * running[-1]))


def links(paths, nodes):
    """Parents, and each node's children in the order in which the paths name them."""
    parents, order = np.full(nodes, -1), {}
    for row in paths:
        row = row[row >= 0]
        for above, node in itertools.pairwise(row):
            parents[node] = above
            if node not in order.setdefault(above, []):
                order[above].append(node)
    return parents, order


@pytest.mark.parametrize("kind", ["greedy", "typical"])
@cases("trees_posterior.npz", alike(r"(post_(.+)_\d+_)node_logits"))
def test_trees_as_medusa_verifies_them(path, group, kind):
    data = arrays(path)
    paths = data[group[0].removeprefix("post_").rsplit("_", 2)[0] + "_retrieve_indices"]
    logits = jnp.asarray(np.stack([data[case + "node_logits"] for case in group]))
    token = np.stack([data[case + "node_tokens"] for case in group])
    batch, nodes = token.shape
    proposal = Proposal(tree_of(token, links(paths, nodes)[0]), ())
    pattern = re.escape(group[0]) + rf"({kind}(?:_t([\d.]+)_thr([\d.]+)_a([\d.]+))?)"
    recorded = [match.groups() for key in data if (match := re.fullmatch(pattern, key))]
    assert recorded
    for name, temperature, epsilon, delta in recorded:
        rule = TypicalAcceptance()
        if temperature is not None:
            rule = TypicalAcceptance(epsilon=float(epsilon), delta=float(delta))
        scale = jnp.full((batch,), float(temperature or 0.0))
        slots = Slots(scale, jnp.zeros((batch, 2), jnp.uint32), jnp.zeros((batch,), jnp.int32))
        walk = verified(rule, logits / float(temperature or 1.0), slots, proposal, paths.shape[1])
        for slot, case in enumerate(group):
            best, accepted = (int(value) for value in data[case + name])
            wanted = paths[best][: accepted + 1]
            got = np.asarray(walk.path[slot, : int(walk.length[slot])])
            if (wanted < 0).any():
                # The reference accepted its padding: a path as long may have won unpadded.
                assert (wanted >= 0).sum() <= len(got) <= accepted + 1
            else:
                np.testing.assert_array_equal(got, wanted)
            assert int(walk.bonus[slot]) == int(data[case + "node_logits"][got[-1]].argmax())


def test_thresholds_name_what_they_expect():
    with pytest.raises(ValueError, match=r"acc=1.5; expected a number from 0 to 1"):
        Thresholds(acc=1.5)
    with pytest.raises(ValueError, match=r"delta=0.0; expected a number above 0"):
        TypicalAcceptance(delta=0.0)
