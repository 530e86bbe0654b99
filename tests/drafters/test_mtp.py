"""Prediction modules as drafters: the same greedy text, exact state, the target's own arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experts import MTP_KINDS, tiny_tensors, write_checkpoint

import jspec
from jspec.drafters.base import DraftContext, Rows
from jspec.drafters.mtp_formats import read_mtp
from jspec.trees import TreeConfig, chain

PROMPTS = [[5, 9, 2], [7] * 21, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]
SAMPLING = jspec.SamplingParams(max_new_tokens=20)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The target of a kind, loaded once from a checkpoint with its modules."""
    made = {}

    def get(kind):
        if kind not in made:
            public = MTP_KINDS[kind]
            folder = write_checkpoint(tmp_path_factory.mktemp(kind), public, tiny_tensors(public))
            made[kind] = jspec.load_target(folder, dtype="float32")
        return made[kind]

    return get


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        ("deepseek_v3", TreeConfig(num_steps=3, topk=3, num_nodes=9)),
        ("mimo", None),
        ("in-turn", None),
    ],
)
def test_greedy_text_is_the_targets(target, kind, tree):
    model = target(kind)
    want = jspec.Engine(model).generate(PROMPTS, SAMPLING)
    engine = jspec.Engine(model, jspec.load_drafter("mtp", model, probe=False), tree=tree)
    got = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert got[0].stats.drafter == "mtp"
    assert engine.tree.num_steps == 3


def _rows(model, tokens, start, count, width):
    """Rows of consecutive tokens with the target's true hidden states; slots may differ."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = model.forward(model.params, tokens, positions).hidden
    at = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    at = jnp.minimum(at, tokens.shape[1] - 2)
    taken, following = (jnp.take_along_axis(tokens, at + step, axis=1) for step in (0, 1))
    chosen = jnp.take_along_axis(hidden, at[:, :, None], axis=1)
    return Rows(taken, following, start, count, chosen, ())


def _caches(state):
    return state.caches if hasattr(state, "caches") else (state.cache,)


@pytest.mark.parametrize("kind", ["deepseek_v3", "in-turn"])
def test_extended_state_is_a_fresh_prefill(target, kind):
    """Also where a prompt is shorter than there are modules."""
    model = target(kind)
    drafter = jspec.load_drafter("mtp", model, probe=False)
    tokens = np.random.default_rng(4).integers(0, 40, (2, 24))
    tokens = jnp.asarray(tokens, jnp.int32)
    make = jax.jit(partial(_rows, model, tokens), static_argnums=2)
    prefill = jax.jit(drafter.prefill)

    @jax.jit
    def extend(params, state, rows):
        return drafter.extend(params, state, rows, rows.count - 1)

    def fresh(count):
        state = drafter.init_state(drafter.params, 2, 32)
        return prefill(drafter.params, state, make(jnp.zeros_like(count), count, 16))

    length = jnp.asarray([1, 5], jnp.int32)
    state = fresh(length)
    for step in ((1, 3), (1, 1), (0, 2), (4, 4), (2, 1)):
        count = jnp.asarray(step, jnp.int32)
        state = extend(drafter.params, state, make(length, count, 4))
        length = length + count
        want = fresh(length)
        pairs = zip(_caches(state), _caches(want), strict=True)
        for index, (got_cache, want_cache) in enumerate(pairs):
            for got, good in zip(jax.tree.leaves(got_cache), jax.tree.leaves(want_cache)):
                for slot, rows in enumerate(length.tolist()):
                    own = slice(0, max(rows - index, 0))
                    np.testing.assert_allclose(got[slot, own], good[slot, own], atol=1e-5)
        for got, good in zip(jax.tree.leaves(state.hidden), jax.tree.leaves(want.hidden)):
            np.testing.assert_allclose(got, good, atol=1e-5)


def test_first_guesses_of_a_short_text(target):
    """One committed token and three modules: rows before the text's start are never seen."""
    model = target("in-turn")
    drafter = jspec.load_drafter("mtp", model, probe=False)
    tokens = jnp.asarray([[3, 8, 0, 0]], jnp.int32)
    one = jnp.ones((1,), jnp.int32)
    keys, yes = jnp.zeros((1, 2), jnp.uint32), jnp.ones((1,), bool)
    context = DraftContext(tokens, one, tokens[:, 1], yes, keys)

    @jax.jit
    def drafted(params):
        state = drafter.init_state(params, 1, 16)
        state = drafter.prefill(params, state, _rows(model, tokens, one * 0, one, 16))
        return drafter.propose(params, state, context, chain(3)).tree.token[0, 1:]

    @jax.jit
    def by_hand(params):
        """Module k reads module k - 1's only row and the newest guess."""
        stack, guesses = drafter._stack(params), []
        hidden = model.forward(model.params, tokens[:, :1], one[:, None] * 0).hidden
        token = tokens[:, 1:2]
        for index, module in enumerate(stack.modules):
            embedded = jnp.take(stack.embedding[...], token, axis=0)
            out, _ = module(hidden, embedded, jnp.full((1, 1), index, jnp.int32), None, None)
            hidden = module.carried(out)
            said = jnp.einsum("bte,ve->btv", hidden, stack.head[...])
            token = jnp.argmax(said, axis=-1).astype(jnp.int32)
            guesses.append(token[0, 0])
        return jnp.stack(guesses)

    np.testing.assert_array_equal(drafted(drafter.params), by_hand(drafter.params))


def test_embedding_and_head_are_the_targets_own(target):
    for kind in ("deepseek_v3", "in-turn"):
        model = target(kind)
        params = jspec.load_drafter("mtp", model, probe=False).params
        assert params["embedding"][...] is model.embedding
        assert params["head"][...] is model.head


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (TreeConfig(num_steps=2, topk=2, num_nodes=4), r"3 modules.*not a tree with topk=2"),
        (chain(4), r"3 modules .* at most 3 tokens, got num_steps=4"),
    ],
)
def test_modules_in_turn_draft_short_chains(target, tree, message):
    with pytest.raises(NotImplementedError, match=message):
        jspec.Engine(target("in-turn"), read_mtp(target("in-turn")), tree=tree)
