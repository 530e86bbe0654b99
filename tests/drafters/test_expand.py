"""Growing drafts: chains, static and dynamic trees of every model-based drafter."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_heads import eagle3_head, eagle_head
from tiny_models import tiny_target

import jspec
from jspec.drafters import DraftContext
from jspec.drafters.base import Rows
from jspec.drafters.draw import pick_children
from jspec.drafters.eagle_build import build_drafter
from jspec.drafters.expand import Level, grow
from jspec.drafters.standalone import standalone
from jspec.trees import TreeConfig, cartesian, chain, from_choices

TARGET = tiny_target()
VOCAB = TARGET.config.vocab_size
DRAFTERS = {
    "eagle": lambda: build_drafter(eagle_head(TARGET, num_layers=2), TARGET),
    "eagle3": lambda: build_drafter(eagle3_head(TARGET, feature_layers=(0, 1)), TARGET),
    "eagle3-two-layers": lambda: build_drafter(
        eagle3_head(
            TARGET,
            draft_vocab_size=VOCAB,
            num_layers=2,
            norm_output=True,
            feature_layers=(1,),
        ),
        TARGET,
    ),
    "standalone": lambda: standalone(tiny_target(seed=3), TARGET),
    "standalone-twin": lambda: standalone(TARGET, TARGET),
}
TREES = {
    "chain": chain(3),
    "static": from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    "dynamic": TreeConfig(num_steps=4, topk=3, num_nodes=8),
}
PROMPTS = [[5, 9, 2], [7] * 21, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [30], [11, 12, 13, 14, 15, 16, 17]]
NEW = 16


@pytest.fixture(scope="module")
def plain():
    return jspec.Engine(TARGET).generate(PROMPTS, jspec.SamplingParams(max_new_tokens=NEW))


def pairs():
    """Every drafter with a dynamic tree, one of them with every tree (a compilation each)."""
    for name, shape in itertools.product(DRAFTERS, TREES):
        if name == "eagle3" or shape == "dynamic":
            yield name, shape
    yield "standalone-twin", "chain"


@pytest.mark.parametrize(("name", "shape"), list(pairs()))
def test_greedy_is_plain(name, shape, plain):
    """Law 1, with real drafters; a twin of the target is right as far as the tree goes."""
    engine = jspec.Engine(TARGET, DRAFTERS[name](), tree=TREES[shape], batch_size=5)
    batches = (1, 2, 5) if (name, shape) == ("eagle3", "dynamic") else (5,)
    for batch in batches:
        outputs = engine.generate(PROMPTS[:batch], jspec.SamplingParams(max_new_tokens=NEW))
        for got, want in zip(outputs, plain):
            assert got.token_ids == want.token_ids
            if name == "standalone-twin" and shape != "dynamic":
                width = TREES[shape].path_width
                assert set(got.stats.accept_lengths[:-1]) <= {width}
    assert engine.traces["rounds"] == len(batches)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "standalone"])
def test_state_equals_a_fresh_prefill(name):
    """Law 7: however the text came about, the drafter knows what a prefill of it would know."""
    engine = jspec.Engine(TARGET, DRAFTERS[name](), tree=TREES["dynamic"], batch_size=2)
    from jspec.engine.batch import Batch

    asked = [jspec.SamplingParams(max_new_tokens=40, ignore_eos=True)] * 2
    grown = Batch(engine, PROMPTS[:2], asked, 2, incremental=False)
    grown.advance(5)
    lengths = np.asarray(grown.state.lengths)
    tokens = np.asarray(grown.state.tokens)
    known = [tokens[slot, : lengths[slot]].tolist() for slot in range(2)]
    fresh = Batch(engine, known, asked, 2, incremental=False)
    np.testing.assert_array_equal(fresh.state.root, grown.state.root)
    got, want = grown.state.drafter, fresh.state.drafter
    np.testing.assert_allclose(got.hidden, want.hidden, rtol=1e-4, atol=1e-4)
    for mine, its in zip(jax.tree.leaves(got.cache), jax.tree.leaves(want.cache)):
        for slot, length in enumerate(lengths):
            np.testing.assert_allclose(
                mine[slot, :length], its[slot, :length], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("name", ["eagle3", "standalone"])
def test_chunked_prefill_is_one_prefill(name):
    drafter = DRAFTERS[name]()
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, VOCAB, (2, 33)), jnp.int32)
    width = TARGET.config.hidden_size
    features = tuple(
        jnp.asarray(rng.standard_normal((2, 32, width)), jnp.float32)
        for _ in drafter.feature_layers
    )

    def rows(start, stop):
        return Rows(
            tokens=ids[:, start:stop],
            next_tokens=ids[:, start + 1 : stop + 1],
            start=jnp.full((2,), start, jnp.int32),
            count=jnp.full((2,), stop - start, jnp.int32),
            hidden=jnp.zeros((2, stop - start, width)),
            features=tuple(f[:, start:stop] for f in features),
        )

    def run(cuts):
        state = drafter.init_state(drafter.params, 2, 48)
        for start, stop in itertools.pairwise(cuts):
            state = drafter.prefill(drafter.params, state, rows(start, stop))
        return state

    once, chunked = run([0, 32]), run([0, 16, 32])
    np.testing.assert_allclose(once.hidden, chunked.hidden, rtol=1e-4, atol=1e-5)
    for mine, its in zip(jax.tree.leaves(once.cache), jax.tree.leaves(chunked.cache)):
        np.testing.assert_allclose(mine[:, :32], its[:, :32], rtol=1e-4, atol=1e-5)


class TestScores:
    """A drafter made of one table: what follows a token, whatever came before."""

    table = jnp.asarray(np.random.default_rng(5).standard_normal((12, 12)) * 2, jnp.float32)

    def context(self, batch=1, temperature=None):
        zeros = jnp.zeros((batch,), jnp.int32)
        return DraftContext(
            tokens=jnp.zeros((batch, 8), jnp.int32),
            lengths=zeros,
            root=zeros + 3,
            active=jnp.ones((batch,), bool),
            keys=jnp.arange(2 * batch, dtype=jnp.uint32).reshape(batch, 2),
            temperature=None if temperature is None else jnp.full((batch,), temperature),
        )

    def say(self, token):
        return Level(self.table[token], jnp.zeros((*token.shape, 1)))

    def grow(self, tree, **options):
        context = options.pop("context", self.context())
        root = self.say(context.root[:, None])
        return grow(tree, context, root, lambda left, ask: (left, self.say(ask.token)), **options)

    def expected(self, grown):
        """Accepted tokens to expect if the drafter is right about its probabilities."""
        return float(grown.tree.score[0, 1:].sum())

    @pytest.mark.parametrize("topk", [2, 3, 4])
    @pytest.mark.parametrize("num_steps", [2, 4, 6])
    def test_a_tree_expects_no_less_than_a_chain_of_as_many_nodes(self, num_steps, topk):
        one = self.grow(TreeConfig(num_steps=num_steps, topk=1))
        tree = self.grow(TreeConfig(num_steps=num_steps, topk=topk, num_nodes=num_steps + 1))
        assert self.expected(tree) >= self.expected(one) - 1e-6

    def test_topk_one_is_the_chain(self):
        dynamic, static = (
            self.grow(tree).tree for tree in (TreeConfig(num_steps=4, topk=1), chain(4))
        )
        for got, want in zip(jax.tree.leaves(dynamic), jax.tree.leaves(static)):
            np.testing.assert_allclose(got, want, rtol=1e-6)

    def test_scores_are_products_of_probabilities(self):
        tree = self.grow(TreeConfig(num_steps=3, topk=3, num_nodes=14)).tree
        chances = np.asarray(jax.nn.softmax(self.table, axis=-1))
        token, parent = np.asarray(tree.token[0]), np.asarray(tree.parent[0])
        score = [1.0]
        for node in range(1, 14):
            score.append(score[parent[node]] * chances[token[parent[node]], token[node]])
        np.testing.assert_allclose(tree.score[0], score, rtol=1e-5)

    def test_tempering_shapes_the_tree_only(self):
        def depth(temperature):
            bounds = TreeConfig(num_steps=6, topk=4, num_nodes=12)
            return int(self.grow(bounds, tempered=temperature).tree.depth.max())

        assert depth(0.2) > depth(8.0)

    def test_nan_costs_the_slot_its_draft_alone(self):
        context = self.context(batch=2)
        spoiled = self.say(context.root[:, None])
        spoiled = spoiled._replace(logits=spoiled.logits.at[0].set(jnp.nan))
        grown = grow(
            TreeConfig(num_steps=3, topk=2, num_nodes=6),
            context,
            spoiled,
            lambda left, ask: (left, self.say(ask.token)),
        )
        assert not bool(grown.tree.valid[0, 1:].any())
        assert bool(grown.tree.valid[1].all())
        alone = self.grow(TreeConfig(num_steps=3, topk=2, num_nodes=6)).tree
        np.testing.assert_array_equal(grown.tree.token[1], alone.token[0])

    def test_draft_vocabulary_is_mapped(self):
        back = jnp.arange(12, dtype=jnp.int32)[::-1]
        mapped = self.grow(chain(1), token_map=back).tree
        assert int(mapped.token[0, 1]) == 11 - int(jnp.argmax(self.table[3]))


class TestDrawing:
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((1, 1, 6)), jnp.float32)

    def children(self, context, topk=3):
        return pick_children(self.logits, topk, context, 0)

    def test_children_are_drawn_without_replacement(self):
        """The first is distributed as q, the second as q without the first."""
        batch = 20000
        context = dataclasses.replace(
            TestScores().context(batch), temperature=jnp.full((batch,), 0.7)
        )
        many = dataclasses.replace(
            context,
            keys=jax.random.bits(jax.random.key(0), (batch, 2), jnp.uint32),
        )
        logits = jnp.broadcast_to(self.logits, (batch, 1, 6))
        children = jax.jit(lambda: pick_children(logits, 2, many, 0))()
        first, second = np.asarray(children.ids[:, 0]).T
        q = np.asarray(jax.nn.softmax(self.logits[0, 0] / 0.7))
        np.testing.assert_allclose(children.probabilities[0, 0], q, rtol=1e-5)
        assert (first != second).all()
        joint = np.histogram2d(first, second, bins=6, range=[[0, 6], [0, 6]])[0] / batch
        want = q[:, None] * q[None, :] / (1 - q[:, None])
        np.fill_diagonal(want, 0)
        # Five standard errors of the likeliest cell.
        assert np.abs(joint - want).max() < 5 * np.sqrt(want.max() / batch)

    def test_temperature_zero_takes_the_best(self):
        base = TestScores().context(1)
        best = self.children(base)
        cold = self.children(dataclasses.replace(base, temperature=jnp.zeros((1,))))
        np.testing.assert_array_equal(best.ids, cold.ids)

    def test_neighbours_do_not_matter(self):
        wide = TestScores().context(3, temperature=1.0)
        logits = jnp.broadcast_to(self.logits, (3, 1, 6))
        together = pick_children(logits, 3, wide, 2)
        alone = pick_children(self.logits, 3, jax.tree.map(lambda leaf: leaf[1:2], wide), 2)
        np.testing.assert_array_equal(together.ids[1], alone.ids[0])

    def test_a_drawn_tree_carries_what_it_was_drawn_from(self):
        shape = cartesian([2, 2, 1])
        scores = TestScores()
        context = scores.context(1, temperature=0.9)
        grown = scores.grow(shape, context=context)
        chances = np.asarray(jax.nn.softmax(scores.table / 0.9, axis=-1))
        inner = sorted(set(shape.parents) - {-1})
        for node in inner:
            np.testing.assert_allclose(
                grown.probabilities[0, node], chances[int(grown.tree.token[0, node])], rtol=1e-5
            )
        token, parent = np.asarray(grown.tree.token[0]), np.asarray(grown.tree.parent[0])
        for node in inner:
            below = token[parent == node]
            assert len(set(below.tolist())) == len(below)
