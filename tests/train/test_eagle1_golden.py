"""EAGLE-1 losses and gradients against numbers recorded by running SafeAILab's trainer.

Every set named `eagle1_train` below the golden root is used, and every run in it.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints.source import open_draft_checkpoint
from jspec.drafters import eagle_formats
from jspec.targets import load_target
from train.config import Eagle1Objective
from train.heads import merge_head, public_tensors, split_head
from train.objectives.eagle1 import Eagle1Batch, eagle1_loss, noisy
from train.objectives.teacher import Teacher

pytestmark = pytest.mark.once

ROOT = Path(
    os.environ.get("JSPEC_GOLDEN", Path(__file__).resolve().parents[3] / "shared/golden/dev")
)


def _runs():
    found = []
    for note in sorted(ROOT.rglob("eagle1_train/meta.json")):
        for run in json.loads(note.read_text())["runs"]:
            name = f"{note.parent.parent.name}-{run['run'].strip('_')}"
            found.append(pytest.param(note.parent, run, id=name))
    skip = pytest.mark.skip(reason=f"no eagle1_train set below {ROOT}")
    return found or [pytest.param(None, {}, marks=skip)]


@pytest.mark.parametrize(("folder", "run"), _runs())
def test_safeailab(folder, run):
    note = json.loads((folder / "meta.json").read_text())
    with np.load(folder / "io.npz") as file:
        arrays = {
            key.removeprefix(run["run"]): value
            for key, value in file.items()
            if key.startswith(run["run"])
        }
        # A noised run may repeat the batch of another one without saying it again.
        for key, value in file.items():
            other, _, name = key.partition("_batch_")
            if name and other.endswith(run["run"].strip("_").split("_")[-1]):
                arrays.setdefault(f"batch_{name}", value)
    target = load_target(folder.parent / "eagle1/target")
    checkpoint = open_draft_checkpoint(folder / run["draft_model"])
    form = eagle_formats.recognise(checkpoint)
    assert form is not None
    head = eagle_formats.read_head(checkpoint, form, target.config)
    graphdef, trained, frozen = split_head(head, target)

    # Their tokens and targets are shifted already; ours shift themselves.
    tokens = jnp.pad(jnp.asarray(arrays["batch_input_ids"], jnp.int32), ((0, 0), (1, 0)))
    clean = jnp.pad(jnp.asarray(arrays["batch_target"]), ((0, 0), (1, 0), (0, 0)))
    logits = target.logits(target.params, clean)
    there = jnp.pad(jnp.asarray(arrays["batch_attention_mask"]) > 0, ((0, 0), (0, 1)))
    # One more text position exists than they have rows.
    there = there | jnp.pad(there[:, :-1], ((0, 0), (1, 0)))
    batch = Eagle1Batch(
        tokens=tokens,
        positions=jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape),
        documents=jnp.where(there, 0, -1),
        supervised=jnp.pad(jnp.asarray(arrays["batch_loss_mask"]) > 0, ((0, 0), (0, 1))),
        hidden=jnp.pad(jnp.asarray(arrays["batch_hidden_states"]), ((0, 0), (0, 1), (0, 0))),
        teacher=Teacher(
            clean,
            jnp.argmax(logits, axis=-1).astype(jnp.int32),
            jax.nn.logsumexp(logits, axis=-1),
        ),
    )
    objective = Eagle1Objective(
        regression=float(note["v_w"]), classification=float(note["p_w"]), chunk=9
    )

    def loss(trained):
        return eagle1_loss(merge_head(graphdef, trained, frozen), batch, objective)

    (value, (parts, rows)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    np.testing.assert_allclose(value, arrays["loss"], rtol=1e-4)
    np.testing.assert_allclose(parts.regression, arrays["vloss"], rtol=1e-4)
    np.testing.assert_allclose(parts.classification, arrays["ploss"], rtol=1e-4)
    assert int(rows.active.sum()) == run["count"]
    hits = jnp.where(rows.active, rows.hit, 0.0).sum()
    assert float(hits) == float(arrays["correct_top123"][0])
    tensors = public_tensors(head.config, grads)
    names = [key for key in arrays if key.startswith("grad_")]
    assert names
    for key in names:
        scale = np.abs(arrays[key]).max()
        np.testing.assert_allclose(
            tensors[key.removeprefix("grad_")], arrays[key], rtol=1e-4, atol=1e-4 * scale,
            err_msg=key,
        )  # fmt: skip


def test_noise_is_uniform_and_scaled_by_the_length():
    zeros = jnp.zeros((2, 128, 64))
    noise = np.asarray(noisy(zeros, 0.2, jax.random.key(0)))
    assert 0.39 < noise.max() <= 0.4
    assert -0.4 <= noise.min() < -0.39
    assert abs(noise.mean()) < 0.01
