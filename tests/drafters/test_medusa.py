"""Medusa: its trees against slow references, its draws, its state, and greedy text with it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_medusa import fitted_heads, random_heads
from tiny_models import tiny_target

import jspec
from jspec.drafters import DraftContext, Rows
from jspec.drafters.medusa_build import build_medusa, target_head
from jspec.engine.batch import Batch
from jspec.trees import TreeConfig, cartesian, chain, from_choices

BATCH, NEW = 3, 24
PROMPTS = [[5, 9, 2], [7] * 21, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [30], [11, 12, 13, 14, 15, 16, 17]]
LOPSIDED = from_choices([[0], [1], [4], [0, 0], [0, 2], [1, 0], [0, 0, 3], [1, 0, 0]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def plain(target):
    return jspec.Engine(target).generate(PROMPTS, jspec.SamplingParams(max_new_tokens=NEW))


@pytest.fixture(scope="module")
def fitted(target, plain):
    texts = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    return build_medusa(fitted_heads(target, texts), target)


def random_medusa(target, **shape):
    return build_medusa(random_heads(target.config, **shape), target)


def context_of(batch=BATCH, temperature=None, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**32, (batch, 2), np.uint32)
    return DraftContext(
        tokens=jnp.zeros((batch, 16), jnp.int32),
        lengths=jnp.arange(3, 3 + batch, dtype=jnp.int32),
        root=jnp.arange(batch, dtype=jnp.int32) % BATCH,
        active=jnp.ones(batch, bool),
        keys=jnp.asarray(keys),
        temperature=None if temperature is None else jnp.asarray(temperature, jnp.float32),
    )


@functools.cache
def compiled(drafter, tree):
    return jax.jit(lambda p, h, c: drafter.propose(p, h, c, tree))


def propose(drafter, tree, hidden, context):
    return compiled(drafter, tree)(drafter.params, jnp.asarray(hidden), context)


def hidden_of(target, batch=BATCH, seed=1):
    return (
        np.random.default_rng(seed)
        .standard_normal((batch, target.config.hidden_size))
        .astype(np.float32)
    )


def reference_logits(drafter, target, hidden):
    """[B, K, Vd] in float64, straight from the definition."""
    tensors, config = drafter.heads.tensors, drafter.config
    logits = []
    for head in range(config.num_heads):
        x = hidden.astype(np.float64)
        for layer in range(config.num_layers):
            name = f"blocks.{head}.layers.{layer}"
            inside = x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)
            x = x + inside / (1 + np.exp(-inside))
        if config.projection == "target":
            projection = np.asarray(target_head(target), np.float64)
        else:
            own = config.projection == "own"
            projection = tensors[f"lm_heads.{head}.weight" if own else "lm_head.weight"]
        logits.append(x @ projection.T)
    return np.stack(logits, axis=1)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def paths_of(tree, slot):
    """{path of tokens: score} of every valid node below the root."""
    found = {0: ()}
    scores = {}
    for node in range(1, tree.num_nodes):
        if tree.valid[slot, node]:
            found[node] = (*found[int(tree.parent[slot, node])], int(tree.token[slot, node]))
            scores[found[node]] = float(tree.score[slot, node])
    assert len(set(found.values())) == len(found), "siblings are distinct"
    return scores


SHAPES = {
    "own": {"num_layers": 2},
    "shared": {"projection": "target"},
    "one": {"projection": "one", "bias": False},
    "truncated": {"draft_vocab_size": 13},
    "no-blocks": {"num_layers": 0, "bias": False},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_static_tree(target, shape):
    drafter = random_medusa(target, **SHAPES[shape])
    hidden = hidden_of(target)
    probability = softmax(reference_logits(drafter, target, hidden))
    proposal = propose(drafter, LOPSIDED, hidden, context_of())
    tree = jax.device_get(proposal.tree)
    ids = drafter.heads.tensors.get("token_map", np.arange(target.config.vocab_size))
    for slot in range(BATCH):
        best = np.argsort(-probability[slot], axis=-1)
        assert tree.token[slot, 0] == slot
        expected = {}
        for path in LOPSIDED.choices:
            tokens = [best[depth, rank] for depth, rank in enumerate(path)]
            score = np.prod([probability[slot, depth, token] for depth, token in enumerate(tokens)])
            expected[tuple(ids[tokens].tolist())] = score
        assert paths_of(tree, slot) == pytest.approx(expected, rel=1e-4)
    assert proposal.probabilities is None
    if shape == "truncated":
        np.testing.assert_array_equal(proposal.token_map, drafter.heads.tensors["token_map"])


@pytest.mark.parametrize(
    "config",
    [
        TreeConfig(num_steps=3, topk=4, num_nodes=2),
        TreeConfig(num_steps=3, topk=4, num_nodes=9),
        TreeConfig(num_steps=3, topk=3, num_nodes=22),
        TreeConfig(num_steps=2, topk=5, num_nodes=31),  # everything there is
    ],
    ids=lambda c: f"{c.num_steps}-{c.topk}-{c.num_nodes}",
)
def test_dynamic_tree_holds_the_likeliest_paths(target, config):
    drafter = random_medusa(target, draft_vocab_size=17)
    hidden = 2 * hidden_of(target)
    probability = softmax(reference_logits(drafter, target, hidden))
    tree = jax.device_get(propose(drafter, config, hidden, context_of()).tree)
    assert tree.valid.all()
    for slot in range(BATCH):
        best = np.argsort(-probability[slot], axis=-1)[:, : config.topk]
        every = {(): 1.0}
        for depth in range(config.num_steps):
            every |= {
                (*path, int(drafter.token_map[token])): score * probability[slot, depth, token]
                for path, score in every.items()
                if len(path) == depth
                for token in best[depth]
            }
        del every[()]
        found = paths_of(tree, slot)
        expected = sorted(every.values(), reverse=True)[: config.num_nodes - 1]
        assert sorted(found.values(), reverse=True) == pytest.approx(expected, rel=1e-4)
        assert {path: every[path] for path in found} == pytest.approx(found, rel=1e-4)


def test_dynamic_topk_1_is_the_chain(target):
    drafter = random_medusa(target)
    hidden = hidden_of(target)
    dynamic = propose(drafter, TreeConfig(num_steps=3, topk=1), hidden, context_of()).tree
    static = propose(drafter, chain(3), hidden, context_of()).tree
    for name in ("token", "parent", "valid"):
        np.testing.assert_array_equal(getattr(dynamic, name), getattr(static, name))
    np.testing.assert_allclose(dynamic.score, static.score, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, dynamic.links, static.links)


@pytest.mark.parametrize("tree", [LOPSIDED, TreeConfig(num_steps=3, topk=4, num_nodes=9)])
def test_nan_costs_one_slot_its_draft_and_no_other(target, tree):
    drafter = random_medusa(target)
    hidden = hidden_of(target)
    whole = jax.device_get(propose(drafter, tree, hidden, context_of()).tree)
    hidden[1, 3] = np.nan
    broken = jax.device_get(propose(drafter, tree, hidden, context_of()).tree)
    for slot in (0, 2):
        assert paths_of(broken, slot) == paths_of(whole, slot)
    assert (broken.token >= 0).all()
    assert (broken.token < target.config.vocab_size).all()
    assert np.isfinite(broken.score).all()


TEMPERATURE = (0.7, 1.3)
SLOTS = 4000


@pytest.fixture(scope="module")
def drawn(target):
    """Many slots with the same hidden state, each with keys of its own."""
    drafter = random_medusa(target, draft_vocab_size=9, num_heads=2)
    hidden = np.repeat(hidden_of(target, 1), SLOTS, axis=0)
    context = context_of(SLOTS, np.resize(TEMPERATURE, SLOTS))
    shape = from_choices([[0], [1], [2], [0, 0], [0, 1], [2, 0]])
    return drafter, hidden, shape, propose(drafter, shape, hidden, context)


class TestDraws:
    def test_children_are_drawn_without_replacement(self, target, drawn):
        drafter, hidden, _, proposal = drawn
        logits = reference_logits(drafter, target, hidden[:1])[0]
        index = np.zeros(target.config.vocab_size, int)
        index[drafter.token_map] = np.arange(9)
        token = index[np.asarray(proposal.tree.token)]
        for offset, temperature in enumerate(TEMPERATURE):
            p = softmax(logits / temperature)
            rows = token[offset::2]
            siblings = {0: rows[:, 1:4], 1: rows[:, [4, 5]]}
            for depth, group in siblings.items():
                assert all(len(set(row)) == len(row) for row in group.tolist())
                seen = np.zeros((9, 9))
                np.add.at(seen, (group[:, 0], group[:, 1]), 1)
                pairs = p[depth][:, None] * p[depth][None] / (1 - p[depth][:, None])
                expected = pairs * (1 - np.eye(9)) * len(rows)
                large = expected > 4
                chi = ((seen - expected) ** 2 / np.where(large, expected, 1))[large].sum()
                dof = large.sum()
                assert chi < dof + 4.5 * np.sqrt(2 * dof)

    def test_levels_are_drawn_apart(self, drawn):
        _, _, _, proposal = drawn
        token = np.asarray(proposal.tree.token)[::2]
        first, second = token[:, 1], token[:, 4]
        agree = (first == second).mean()
        by_chance = sum((first == t).mean() * (second == t).mean() for t in np.unique(first))
        assert abs(agree - by_chance) < 0.05

    def test_the_same_candidates_stand_under_every_parent(self, drawn):
        _, _, shape, proposal = drawn
        token = np.asarray(proposal.tree.token)
        assert shape.choices[3:] == ((0, 0), (0, 1), (2, 0))
        np.testing.assert_array_equal(token[:, 4], token[:, 6])

    def test_probabilities_are_what_each_node_s_children_came_from(self, target, drawn):
        drafter, hidden, shape, proposal = drawn
        assert proposal.probabilities.shape == (SLOTS, shape.num_nodes, 9)
        logits = reference_logits(drafter, target, hidden[:1])[0]
        for slot in range(4):
            p = softmax(logits / TEMPERATURE[slot % 2])
            np.testing.assert_allclose(proposal.probabilities[slot, 0], p[0], rtol=1e-4)
            for node in (1, 2, 3):
                np.testing.assert_allclose(proposal.probabilities[slot, node], p[1], rtol=1e-4)

    @pytest.mark.parametrize("tree", [LOPSIDED, TreeConfig(num_steps=3, topk=1)])
    def test_a_greedy_slot_beside_drawing_ones_takes_the_best(self, target, tree):
        drafter = random_medusa(target)
        hidden = hidden_of(target)
        best = propose(drafter, tree, hidden, context_of())
        mixed = propose(drafter, tree, hidden, context_of(temperature=[1.0, 0.0, 1.0]))
        np.testing.assert_array_equal(mixed.tree.token[1], best.tree.token[1])
        assert (np.asarray(mixed.tree.token)[[0, 2]] != np.asarray(best.tree.token)[[0, 2]]).any()
        assert mixed.tree.num_nodes == tree.num_nodes
        np.testing.assert_array_equal(mixed.tree.parent, best.tree.parent)

    def test_a_draw_is_a_function_of_key_and_length(self, target):
        drafter = random_medusa(target)
        hidden = np.repeat(hidden_of(target, 1), BATCH, axis=0)
        context = context_of(temperature=[1.0] * BATCH)
        same = dataclasses.replace(
            context,
            keys=jnp.broadcast_to(context.keys[:1], (BATCH, 2)),
            lengths=jnp.asarray([5, 5, 6], jnp.int32),
        )
        token = np.asarray(propose(drafter, LOPSIDED, hidden, same).tree.token)[:, 1:]
        np.testing.assert_array_equal(token[0], token[1])
        assert (token[0] != token[2]).any()


def test_state_is_the_last_committed_row(target):
    drafter = random_medusa(target)
    state = drafter.init_state(drafter.params, BATCH, 64)
    width = target.config.hidden_size
    assert state.shape == (BATCH, width)
    hidden = jnp.arange(BATCH * 4 * width, dtype=jnp.float32).reshape(BATCH, 4, width)
    ids = jnp.zeros((BATCH, 4), jnp.int32)
    rows = Rows(ids, ids, ids[:, 0], jnp.asarray([4, 0, 1], jnp.int32), hidden, ())
    after = drafter.extend(drafter.params, state + 7, rows, jnp.zeros(BATCH, jnp.int32))
    np.testing.assert_array_equal(after[0], hidden[0, 3])
    np.testing.assert_array_equal(after[1], 7.0)
    np.testing.assert_array_equal(after[2], hidden[2, 0])


def test_a_shared_projection_is_the_target_s_own_array(target):
    for kind in ("target", "one"):
        heads = random_heads(target.config, projection=kind)
        if kind == "one":
            tensors = dict(heads.tensors) | {"lm_head.weight": np.asarray(target_head(target))}
            heads = dataclasses.replace(heads, tensors=tensors)
        drafter = build_medusa(heads, target)
        projection = dict(nnx.to_flat_state(drafter.params))[("projections", 0)][...]
        assert projection is target_head(target)


def test_heads_of_another_target_are_refused(target):
    drafter = random_medusa(target)
    with pytest.raises(ValueError, match="vocabulary of 40, the target random has 24 and 44"):
        jspec.Engine(tiny_target(vocab_size=44), drafter)
    heads = random_heads(target.config)
    wide = dataclasses.replace(heads.config, hidden_size=32)
    with pytest.raises(ValueError, match=r"has shape \(24,\), expected .*another target"):
        build_medusa(dataclasses.replace(heads, config=wide), target)


def test_trees_that_do_not_fit_are_refused(target):
    drafter = random_medusa(target, draft_vocab_size=6)
    with pytest.raises(ValueError, match=r"num_steps=4 levels, .* 3 heads; lower num_steps to 3"):
        jspec.Engine(target, drafter, tree=chain(4))
    with pytest.raises(ValueError, match=r"topk=7 children a node, .* has 6 tokens"):
        jspec.Engine(target, drafter, tree=TreeConfig(num_steps=2, topk=7, num_nodes=9))
    assert jspec.Engine(target, drafter).tree.num_steps == 3
    many = random_medusa(target, num_heads=6)
    assert jspec.Engine(target, many).tree == TreeConfig()


TREES = {
    "chain": chain(3),
    "static": cartesian([4, 3, 1]),
    "dynamic": TreeConfig(num_steps=3, topk=4, num_nodes=16),
}


@pytest.fixture(scope="module")
def engine_of(target, fitted):
    """One engine for each tree and batch size."""

    @functools.cache
    def engine(shape, batch):
        return jspec.Engine(target, fitted, tree=TREES[shape], batch_size=batch)

    return engine


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("shape", TREES)
def test_greedy_text_is_the_plain_text(plain, engine_of, shape, batch):
    engine = engine_of(shape, batch)
    outputs = engine.generate(PROMPTS[:batch], jspec.SamplingParams(max_new_tokens=NEW))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain[:batch]]
    assert sum(o.stats.correct for o in outputs) > 2 * batch, "the heads are never right"
    assert engine.traces["rounds"] == 1


def test_state_after_rounds_equals_a_fresh_prefill(target, engine_of):
    asked = [jspec.SamplingParams(max_new_tokens=new) for new in (24, 11, 17, 24, 5)]
    batch = Batch(engine_of("static", 5), PROMPTS, asked, 5, incremental=False)
    forward = jax.jit(lambda ids, places: target.forward(target.params, ids, places).hidden)
    while batch.running:
        batch.advance(3)
        ids = batch.state.tokens[:, :64]
        places = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), ids.shape)
        fresh = np.asarray(forward(ids, places))[np.arange(5), np.asarray(batch.state.lengths) - 1]
        np.testing.assert_allclose(batch.state.drafter, fresh, rtol=1e-4, atol=1e-5)


def test_drawn_trees_leave_the_target_s_distribution():
    """χ² of three tokens. Nodes of one depth share what was drawn; a walk passes one of them."""
    small_target = tiny_target(vocab_size=8, num_layers=1)
    drafter = random_medusa(small_target, num_heads=2, draft_vocab_size=5)
    shape = from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])
    count = 1024
    engine = jspec.Engine(
        small_target, drafter, tree=shape, batch_size=count, draft_temperature=1.2
    )
    asked = [
        jspec.SamplingParams(temperature=0.8, max_new_tokens=3, seed=seed, ignore_eos=True)
        for seed in range(count)
    ]
    outputs = engine.generate([[3, 1]] * count, asked)
    assert {output.stats.rule for output in outputs} == {"rejection"}
    accepted = np.mean([output.stats.corrects[0] for output in outputs])
    assert 0.1 < accepted < 1.9
    seen = np.zeros((8, 8, 8))
    np.add.at(seen, tuple(np.array([output.token_ids for output in outputs]).T), 1)

    pairs = np.stack(np.meshgrid(*[np.arange(8)] * 2, indexing="ij"), axis=-1).reshape(64, 2)
    ids = jnp.asarray(np.concatenate([np.tile([3, 1], (64, 1)), pairs], axis=1), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), ids.shape)
    hidden = jax.jit(small_target.forward)(small_target.params, ids, places).hidden
    p = softmax(np.asarray(small_target.logits(small_target.params, hidden), np.float64) / 0.8)
    p = p.reshape(8, 8, 4, 8)
    joint = p[0, 0, 1][:, None, None] * p[:, 0, 2][:, :, None] * p[:, :, 3]
    expected = count * joint
    large = expected > 4
    cells = [seen[large], [seen[~large].sum()]]
    wanted = [expected[large], [expected[~large].sum()]]
    seen, expected = np.concatenate(cells), np.concatenate(wanted)
    chi = ((seen - expected) ** 2 / expected).sum()
    assert chi < len(seen) + 4.5 * np.sqrt(2 * len(seen))
