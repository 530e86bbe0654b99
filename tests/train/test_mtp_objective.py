"""The objective of a prediction module, and of a target with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experts import MTP_KINDS, tiny_tensors, write_checkpoint

import jspec
from train.config import MTPObjective
from train.objectives.mtp import MTPBatch, mtp_loss, unroll

STEPS, LENGTH = 3, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Target and drafter of a family, loaded once."""
    made = {}

    def get(kind):
        if kind not in made:
            public = MTP_KINDS[kind]
            folder = write_checkpoint(tmp_path_factory.mktemp(kind), public, tiny_tensors(public))
            target = jspec.load_target(folder, dtype="float32")
            made[kind] = target, jspec.load_drafter("mtp", target, probe=False)
        return made[kind]

    return get


def texts(count=2, length=LENGTH, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 40, (count, length)), jnp.int32)


def hidden_of(target, tokens, positions=None):
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return target.forward(target.params, tokens, positions).hidden


def whole(target, tokens, mask=None):
    """A batch of texts that fill their sequences."""
    every = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return MTPBatch(
        tokens=tokens,
        positions=every,
        documents=jnp.zeros_like(tokens),
        mask=jnp.ones(tokens.shape, bool) if mask is None else mask,
        rows=every,
        hidden=hidden_of(target, tokens),
    )


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "mimo"])
def test_a_row_is_what_it_is_in_a_draft(model, kind):
    """The drafter's own pass over the true rows and then the row's guesses, one after another."""
    target, drafter = model(kind)
    tokens = texts(1)
    batch = whole(target, tokens)
    got = jax.jit(lambda params: unroll(drafter._model(params), batch, STEPS))(drafter.params)
    for row in (0, LENGTH - 1 - STEPS):

        @jax.jit
        def draft(params, row=row):
            model = drafter._model(params)
            hidden, said = batch.hidden[:, : row + 1], []
            for step in range(STEPS):
                width = row + 1 + step
                carried, _ = model(
                    tokens[:, 1 : width + 1],
                    hidden,
                    jnp.arange(width, dtype=jnp.int32)[None],
                    None,
                    None,
                )
                said.append(model.module.normed(carried[:, -1]))
                hidden = jnp.concatenate([hidden, carried[:, -1:]], axis=1)
            return said

        for step, want in enumerate(draft(drafter.params)):
            np.testing.assert_allclose(got[step, 0, row], want[0], atol=2e-5)


def run(drafter, batch, objective, joint):
    """The loss of a batch, jitted."""

    @jax.jit
    def loss(params, batch):
        return mtp_loss(drafter._model(params), batch, objective, joint=joint)

    return loss(drafter.params, batch)


def log_probs(drafter, batch, steps):
    """Of every step's draft and of the target, [1 + K, B, T, V], the target first."""

    @jax.jit
    def every(params):
        model = drafter._model(params)
        states = jnp.concatenate([batch.hidden[None], unroll(model, batch, steps)])
        return jax.nn.log_softmax(states @ model.head[...].T)

    return np.asarray(every(drafter.params))


def losses_by_hand(log_p, batch, objective, joint):
    """Total and [K] losses, from whole arrays of log-probabilities."""
    tokens, parts = np.asarray(batch.tokens), []
    for step in range(objective.num_steps):
        ahead = 2 + step
        log_q = log_p[1 + step][:, :-ahead]
        if objective.labels == "hard":
            label = tokens[:, ahead:, None]
            far = -np.take_along_axis(log_q, label, axis=-1)[..., 0]
        else:
            far = -(np.exp(log_p[0][:, ahead - 1 : -1]) * log_q).sum(axis=-1)
        parts.append(far.mean())
    share = objective.decay ** np.arange(objective.num_steps)
    total = (share * parts).sum()
    if joint:
        text = -np.take_along_axis(log_p[0][:, :-1], tokens[:, 1:, None], axis=-1).mean()
        total = text + objective.weight * total / share.sum()
    return total, parts


@pytest.mark.parametrize(("joint", "labels"), [(False, "soft"), (True, "hard"), (True, "soft")])
def test_total_and_figures(model, joint, labels):
    target, drafter = model("deepseek_v3")
    batch = whole(target, texts())
    objective = MTPObjective(num_steps=2, decay=0.5, weight=0.4, labels=labels, chunk=10)
    total, rows = run(drafter, batch, objective, joint)
    log_p = log_probs(drafter, batch, 2)
    want, parts = losses_by_hand(log_p, batch, objective, joint)
    np.testing.assert_allclose(total, want, rtol=1e-5)
    np.testing.assert_allclose(rows.loss.sum(axis=(1, 2)), parts * np.array([1, 0.5]), rtol=1e-5)
    assert rows.active.sum(axis=(1, 2)).tolist() == [2 * (LENGTH - 2), 2 * (LENGTH - 3)]
    assert (rows.text is not None) == joint
    best, *said = np.argmax(log_p, axis=-1)
    for step in (0, 1):
        hit = said[step][:, : -2 - step] == best[:, 1 + step : -1]
        np.testing.assert_array_equal(np.asarray(rows.hit)[step, :, 1 + step : -1], hit)


def test_only_supervised_tokens_count(model):
    """A frozen target: the rows that look at an answer, wherever the draft steps begin."""
    target, drafter = model("deepseek_v3")
    mask = jnp.broadcast_to(jnp.arange(LENGTH) >= 8, (2, LENGTH))
    batch = whole(target, texts(), mask)
    few = batch._replace(rows=jnp.broadcast_to(jnp.arange(5, 13, dtype=jnp.int32), (2, 8)))
    objective = MTPObjective(num_steps=2)
    total, rows = run(drafter, batch, objective, False)
    again, fewer = run(drafter, few, objective, False)
    np.testing.assert_allclose(total, again, rtol=1e-6)
    for name in ("active", "hit", "overlap"):
        np.testing.assert_allclose(getattr(rows, name), getattr(fewer, name), atol=1e-6)
    assert rows.active.sum(axis=(1, 2)).tolist() == [8, 8]


@pytest.mark.parametrize("joint", [False, True])
def test_packed_texts_do_not_see_each_other(model, joint):
    target, drafter = model("deepseek_v3")
    tokens = texts(2, 6)
    apart = whole(target, tokens)
    place = jnp.tile(jnp.arange(6, dtype=jnp.int32), 2)[None]
    packed = MTPBatch(
        tokens=tokens.reshape(1, 12),
        positions=place,
        documents=jnp.repeat(jnp.arange(2, dtype=jnp.int32), 6)[None],
        mask=jnp.ones((1, 12), bool),
        rows=jnp.arange(12, dtype=jnp.int32)[None],
        hidden=apart.hidden.reshape(1, 12, -1),
    )
    objective = MTPObjective(num_steps=2)
    one, other = (run(drafter, b, objective, joint) for b in (apart, packed))
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    for name in ("active", "hit", "overlap"):
        got, want = (np.asarray(getattr(rows[1], name)) for rows in (other, one))
        np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-5)


def test_gradients_reach_what_is_trained(model):
    """A frozen head gets none; in joint training all but the choice of experts does."""
    target, drafter = model("deepseek_v3")
    batch, objective = whole(target, texts()), MTPObjective(num_steps=2)

    def loss(params, hidden, joint):
        seen = batch._replace(hidden=hidden)
        return mtp_loss(drafter._model(params), seen, objective, joint=joint)[0]

    def grads(joint):
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
        found = gradient(drafter.params, batch.hidden, joint)
        leaves = jax.tree_util.tree_leaves_with_path(found)
        return {
            jax.tree_util.keystr(path)
            for path, leaf in leaves
            if not np.abs(np.asarray(leaf)).any()
        }

    still = grads(True)
    assert len(still) == 1
    assert "correction" in still.pop()
    frozen = grads(False)
    assert len(frozen) == 2
    assert any("head" in path for path in frozen)


@pytest.mark.parametrize(
    "settings", [{"num_steps": 0}, {"weight": 0.0}, {"decay": 0.0}, {"decay": 1.5}]
)
def test_senseless_objective(settings):
    with pytest.raises(ValueError, match=r"num_steps=.*decay=.*weight="):
        MTPObjective(**settings)
