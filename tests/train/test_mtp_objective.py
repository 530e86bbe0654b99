"""The joint objective of a target and its prediction module."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_experts import DEEPSEEK, tiny_tensors, write_checkpoint

import jspec
from jspec.targets.mtp import FAMILIES
from train.objectives.mtp import MTPObjective, mtp_loss

FAMILY = FAMILIES["deepseek_v3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("m"), DEEPSEEK, tiny_tensors(DEEPSEEK))
    target = jspec.load_target(folder, dtype="float32")
    return target, jspec.load_drafter("mtp", target, probe=False)


def test_every_step_is_the_drafters_own_pass(model):
    """Losses by hand from the drafter's module, step fed by step, over the rows with a label."""
    target, drafter = model
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 9)), jnp.int32)
    objective = MTPObjective(steps=2, weight=0.5, decay=0.25)

    @jax.jit
    def run(params, module):
        return mtp_loss(target, params, module, FAMILY, tokens, objective)

    @jax.jit
    def states(params, draft_params):
        positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9))
        draft = drafter._model(draft_params)
        hidden = target.forward(params, tokens, positions).hidden
        found = [target.logits(params, hidden)]
        for step in (1, 2):
            # Rows whose tokens run out are cut, not padded: causal rows do not see them.
            width = 9 - step
            hidden, _ = draft(
                tokens[:, step:], hidden[:, :width], positions[:, :width] + step - 1, None, None
            )
            found.append(draft.logits(hidden))
        return found

    total, figures = run(target.params, drafter.params["module"])
    losses, hits = [], []
    for ahead, logits in enumerate(states(target.params, drafter.params), start=1):
        logits, label = (
            np.asarray(logits, np.float64)[:, : 9 - ahead],
            np.asarray(tokens)[:, ahead:],
        )
        share = np.exp(logits - logits.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        losses.append(-np.log(np.take_along_axis(share, label[:, :, None], axis=-1)).mean())
        hits.append((logits.argmax(-1) == label).mean())
    np.testing.assert_allclose(figures.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(figures.hits, hits, rtol=1e-6)
    want = losses[0] + 0.5 * (losses[1] + 0.25 * losses[2]) / 1.25
    np.testing.assert_allclose(total, want, rtol=1e-5)


def test_both_learn_from_it(model):
    """A text that repeats itself is learned by the target and by both steps of the module."""
    target, drafter = model
    tokens = jnp.asarray([[(7 * i + 3 * s) % 11 for i in range(24)] for s in range(4)], jnp.int32)
    objective = MTPObjective(steps=2)
    optimiser = optax.sgd(0.1, momentum=0.9)
    trained = (target.params, drafter.params["module"])

    def loss(trained):
        params, module = trained
        return mtp_loss(target, params, module, FAMILY, tokens, objective)

    @jax.jit
    def step(trained, state):
        (_, figures), grads = jax.value_and_grad(loss, has_aux=True)(trained)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(trained, updates), state, figures, grads

    state = optimiser.init(trained)
    first = last = None
    for _ in range(120):
        trained, state, last, grads = step(trained, state)
        if first is None:
            first = last
            still = [
                path
                for path, leaf in nnx.to_flat_state(grads[1])
                if not np.abs(np.asarray(leaf[...])).any()
            ]
            # Only the choice of experts depends on it, and a choice has no gradient.
            assert still == [("block", "mlp", "router", "correction")]
    assert first is not None
    assert last is not None
    assert np.all(np.asarray(first.hits) < 0.4)
    assert np.all(np.asarray(last.hits) > 0.9)


@pytest.mark.parametrize(
    "settings", [{"steps": 0}, {"weight": -0.1}, {"decay": 0.0}, {"decay": 1.5}]
)
def test_senseless_objective(settings):
    with pytest.raises(ValueError, match=r"steps=.*weight=.*decay="):
        MTPObjective(**settings)


def test_texts_too_short_for_their_steps(model):
    target, drafter = model
    with pytest.raises(ValueError, match="texts of 4 tokens have no label for step 3"):
        mtp_loss(
            target,
            target.params,
            drafter.params["module"],
            FAMILY,
            jnp.zeros((1, 4), jnp.int32),
            MTPObjective(steps=3),
        )
