"""EAGLE-3 losses, metrics and gradients against numbers recorded by running the reference trainers.

Every set named `eagle3_train` below the golden root is used, and every run in it, whatever their
sizes.
"""

import functools
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.checkpoints.source import open_draft_checkpoint
from jspec.drafters import eagle_formats
from jspec.drafters.heads import target_ids
from jspec.drafters.medusa_build import target_head
from jspec.targets import load_target
from train.acceptance import acceptance_sums
from train.config import Eagle3Objective
from train.heads import merge_head, public_tensors, split_head
from train.objectives.eagle3 import Eagle3Batch, eagle3_loss
from train.objectives.teacher import Teacher

pytestmark = pytest.mark.once

ROOT = Path(
    os.environ.get("JSPEC_GOLDEN", Path(__file__).resolve().parents[3] / "shared/golden/dev")
)
SETS = sorted(path.parent for path in ROOT.rglob("eagle3_train/specforge.npz"))
REAL = 1e-4


def _runs(pattern):
    found = []
    for folder in SETS:
        file, prefix = pattern
        if not (folder / file).exists():
            continue
        with np.load(folder / file) as arrays:
            tags = [key.removesuffix("_loss") for key in arrays.files if re.fullmatch(prefix, key)]
        found += [pytest.param(folder, tag, id=f"{folder.parent.name}-{tag}") for tag in tags]
    skip = pytest.mark.skip(reason=f"no eagle3_train set below {ROOT}")
    return found or [pytest.param(None, "", marks=skip)]


@functools.cache
def recorded(path):
    with np.load(path) as file:
        return dict(file)


@functools.cache
def specforge_run(folder, objective):
    """Two trainers recorded the same batch; it is compiled once."""
    setup = Setup(folder, "draft_model")
    return setup.run(specforge_batch(recorded(folder / "specforge.npz"), setup.target), objective)


class Setup:
    """A recorded head with its target, and the loss over a recorded batch."""

    def __init__(self, folder: Path, head_name: str):
        self.target = load_target(folder.parent / "eagle3/target")
        checkpoint = open_draft_checkpoint(folder / head_name)
        form = eagle_formats.recognise(checkpoint)
        assert form is not None
        self.head = eagle_formats.read_head(checkpoint, form, self.target.config)
        ids = target_ids(self.head)
        size = self.target.config.vocab_size
        self.ids = jnp.asarray(np.arange(size) if ids is None else ids, jnp.int32)
        self.teacher_head = target_head(self.target)[self.ids]

    def run(self, batch, objective, **switches):
        config = self.head.config
        for name, value in switches.items():
            object.__setattr__(config, name, value)
        graphdef, trained, frozen = split_head(self.head, self.target)

        def loss(trained):
            model = merge_head(graphdef, trained, frozen)
            return eagle3_loss(model, batch, self.teacher_head, self.ids, objective)

        (value, rows), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
        return value, rows, public_tensors(config, grads)


def check_gradients(grads, arrays, tag):
    prefix = f"{tag}_grad_"
    names = [key for key in arrays if key.startswith(prefix)]
    assert names
    for key in names:
        name = key.removeprefix(prefix).replace("midlayer.", "layers.0.")
        scale = np.abs(arrays[key]).max()
        np.testing.assert_allclose(
            grads[name], arrays[key], rtol=REAL, atol=REAL * scale, err_msg=key
        )


def specforge_batch(arrays, target):
    tokens = jnp.asarray(arrays["batch_input_ids"], jnp.int32)
    every = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = jnp.asarray(arrays["batch_target"])
    logits = target.logits(target.params, hidden)
    count = arrays["batch_hidden_state"].shape[-1] // hidden.shape[-1]
    return Eagle3Batch(
        tokens=tokens,
        positions=every,
        documents=jnp.where(jnp.asarray(arrays["batch_attention_mask"]) > 0, 0, -1),
        supervised=jnp.asarray(arrays["batch_loss_mask"]) > 0,
        rows=every,
        features=tuple(jnp.split(jnp.asarray(arrays["batch_hidden_state"]), count, axis=-1)),
        teacher=Teacher(
            hidden,
            jnp.argmax(logits, axis=-1).astype(jnp.int32),
            jax.nn.logsumexp(logits, axis=-1),
        ),
    )


@pytest.mark.parametrize(("folder", "tag"), _runs(("specforge.npz", r"ttt\d+(_lk_\w+)?_loss")))
def test_specforge(folder, tag):
    arrays = recorded(folder / "specforge.npz")
    note = json.loads((folder / "specforge.json").read_text())
    kind = tag.partition("_")[2] or "ce"
    steps, decay = len(arrays[f"{tag}_plosses"]), note["ploss_decay"]
    objective = Eagle3Objective(num_steps=steps, decay=decay, divergence=kind, mean="rows", chunk=9)
    value, rows, grads = specforge_run(folder, objective)
    np.testing.assert_allclose(value, arrays[f"{tag}_loss"], rtol=REAL)
    sums = acceptance_sums(rows, decay)
    np.testing.assert_allclose(sums["loss"], arrays[f"{tag}_plosses"], rtol=REAL)
    np.testing.assert_allclose(sums["hits"], arrays[f"{tag}_acc_corrects"])
    np.testing.assert_allclose(sums["rows"], arrays[f"{tag}_acc_denoms"])
    counted = np.asarray(rows.counted)
    rate = (np.asarray(rows.overlap) * counted).sum((1, 2)) / counted.sum((1, 2))
    np.testing.assert_allclose(rate, arrays[f"{tag}_acceptance_rates"], rtol=REAL)
    check_gradients(grads, arrays, tag)


@pytest.mark.parametrize(("folder", "tag"), _runs(("safeailab.npz", r"ttt\d+_loss")))
def test_safeailab(folder, tag):
    arrays = recorded(folder / "safeailab.npz")
    objective = Eagle3Objective(num_steps=len(arrays[f"{tag}_plosses"]), mean="rows", chunk=9)
    value, rows, grads = specforge_run(folder, objective)
    np.testing.assert_allclose(value, arrays[f"{tag}_loss"], rtol=REAL)
    sums = acceptance_sums(rows, objective.decay)
    np.testing.assert_allclose(sums["loss"], arrays[f"{tag}_plosses"], rtol=REAL)
    np.testing.assert_allclose(sums["hits"] / sums["rows"], arrays[f"{tag}_acces"], atol=1e-5)
    check_gradients(grads, arrays, tag)


@pytest.mark.parametrize(("folder", "tag"), _runs(("speculators.npz", r"\w+_ttt\d+_loss")))
def test_speculators(folder, tag):
    arrays = recorded(folder / "speculators.npz")
    note = json.loads((folder / "speculators.json").read_text())
    variant, kind, steps = re.fullmatch(r"(\w+)_(kl_div|ce)_ttt(\d+)", tag).groups()
    run = next(
        r for r in note["runs"]
        if (r["variant"], r["loss"], r["ttt_steps"]) == (variant, kind, int(steps))
    )  # fmt: skip
    setup = Setup(folder, "speculators_fc_norm" if variant == "fc_norm" else "speculators_base")
    decay = run["ttt_step_loss_decay"]
    objective = Eagle3Objective(
        num_steps=int(steps),
        decay=decay,
        divergence="kl" if kind == "kl_div" else "hard_ce",
        drop_out_of_vocab=False,
        cross_texts=True,
        chunk=7,
    )
    switches = {} if variant in ("base", "fc_norm") else {variant: True}
    batch = speculators_batch(arrays, setup)
    value, rows, grads = setup.run(batch, objective, **switches)
    np.testing.assert_allclose(value, arrays[f"{tag}_loss"], rtol=REAL)
    sums = acceptance_sums(rows, decay)
    spread = decay ** np.arange(int(steps))
    np.testing.assert_allclose(sums["loss"] * spread, arrays[f"{tag}_step_losses"], rtol=REAL)
    # Both of their accuracies count a row only where every earlier guess was right too.
    np.testing.assert_allclose(sums["right"], arrays[f"{tag}_full_acc_sum"])
    np.testing.assert_allclose(sums["rows"], arrays[f"{tag}_full_acc_total"])
    np.testing.assert_allclose(sums["right"], arrays[f"{tag}_cond_acc_sum"])
    # They count a row that was right so far as tried even where nothing is supervised any more.
    tried = np.concatenate([sums["rows"][:1], sums["right"][:-1]])
    np.testing.assert_allclose(tried, arrays[f"{tag}_cond_acc_total"])
    check_gradients(grads, arrays, tag)


def speculators_batch(arrays, setup):
    """Their rows pair the feature of t with token t + 1 already; ours do that themselves."""

    def before(x):
        return jnp.pad(jnp.asarray(x), ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))

    def behind(x, **fill):
        return jnp.pad(jnp.asarray(x), ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2), **fill)

    tokens = before(arrays["batch_input_ids"]).astype(jnp.int32)
    every = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    # Their hidden states come before the final norm.
    model = nnx.merge(setup.target.graphdef, setup.target.params)
    hidden = model.norm(before(arrays["batch_verifier_last_hidden_states"]))
    logits = jnp.einsum("bte,ve->btv", hidden, setup.teacher_head)
    features = behind(arrays["batch_hidden_states"])
    count = features.shape[-1] // hidden.shape[-1]
    return Eagle3Batch(
        tokens=tokens,
        positions=behind(arrays["batch_position_ids"]).astype(jnp.int32),
        documents=behind(arrays["batch_document_ids"], constant_values=-1).astype(jnp.int32),
        supervised=behind(arrays["batch_loss_mask"]),
        rows=every,
        features=tuple(jnp.split(features, count, axis=-1)),
        # They compare with the likeliest token of the draft vocabulary.
        teacher=Teacher(
            hidden, setup.ids[jnp.argmax(logits, axis=-1)], jax.nn.logsumexp(logits, axis=-1)
        ),
    )
