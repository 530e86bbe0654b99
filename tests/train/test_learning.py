"""Heads learn on a target small enough for a test, and serve exactly as training says they will."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experts import MIMO, tiny_tensors, write_checkpoint
from tiny_models import tiny_config

import jspec
from jspec.engine.stats import acceptance_by_depth
from jspec.targets import random_target
from jspec.trees import TreeConfig
from train.acceptance import figures
from train.config import (
    DataConfig,
    Eagle1HeadConfig,
    Eagle3HeadConfig,
    Eagle3Objective,
    MedusaHeadConfig,
    MTPHeadConfig,
    MTPObjective,
    OptimizerConfig,
)
from train.data import BatchConfig, Schedule
from train.methods.common import prepare
from train.methods.eagle1 import eagle1_method
from train.methods.eagle3 import eagle3_method
from train.methods.medusa import medusa_method
from train.methods.mtp import mtp_method
from train.state import make_step, start_state

pytestmark = pytest.mark.once

STEPS, DEPTH = 250, 2
PROMPT, ANSWER, HEADS = 4, 44, 3
LAYERS = (0, 1)


@pytest.fixture(scope="module")
def target():
    """Sure of what it says: its text is a grammar of low entropy."""
    config = tiny_config(num_layers=3, hidden_size=32, intermediate_size=64)
    return random_target(config, seed=3, sharpness=6.0)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    return greedy_text(target, tmp_path_factory.mktemp("data"))


def greedy_text(target, folder):
    """The target's own greedy text: a random model soon goes round in circles."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40, size=PROMPT).tolist() for _ in range(8)]
    engine = jspec.Engine(target, None, batch_size=16)
    outputs = engine.generate(prompts, jspec.SamplingParams(max_new_tokens=ANSWER, ignore_eos=True))
    path = folder / "greedy.jsonl"
    lines = []
    for output in outputs:
        ids = [*output.prompt_token_ids, *output.token_ids]
        mask = [0] * len(output.prompt_token_ids) + [1] * len(output.token_ids)
        lines.append(json.dumps({"input_ids": ids, "loss_mask": mask}))
    path.write_text("\n".join(lines) + "\n")
    return path


def prepared(target, data, lookback=DEPTH - 1):
    config = DataConfig(data=str(data), max_length=96, batch_tokens=192, validation=0.0)
    return prepare(config, target, lookback=lookback, seed=0, eval_batches=1)


def train(method, side, steps=STEPS, rate=1e-2):
    """Trained parameters, and the figures of the last passes over the data."""
    optimizer = OptimizerConfig(learning_rate=rate, clip=1.0)
    step = make_step(method.loss, optimizer, steps, dtype=jnp.float32, seed=0)
    state, told = start_state(method.trained, optimizer, steps), []
    for number in range(steps):
        batch = side.schedule[number].arrays()
        state, seen = step(state, method.frozen, [jax.tree.map(jnp.asarray, batch)])
        told.append(seen["sums"])
    last = told[-side.schedule.batches_per_epoch :]
    sums = {name: np.sum([np.asarray(s[name]) for s in last], axis=0) for name in last[0]}
    return jax.device_get(state.params), figures(sums)


def eagle3(target, side, depth):
    config = Eagle3HeadConfig(
        draft_vocab_size=36,
        feature_layers=LAYERS,
        objective=Eagle3Objective(num_steps=depth, decay=1.0),
        export_dtype="float32",
    )
    return eagle3_method(config, target, side, max_length=96, seed=0)


@pytest.fixture(scope="module")
def unrolled(target, data):
    side = prepared(target, data)
    method = eagle3(target, side, DEPTH)
    params, seen = train(method, side)
    return method, params, seen, side


def test_eagle3_overfits_and_serves_what_training_saw(unrolled, target, tmp_path):
    method, params, seen, side = unrolled
    assert seen["accuracy"][0] > 0.9
    method.export(params, tmp_path / "head")
    drafter = jspec.load_drafter(tmp_path / "head", target)
    served, foreseen = served_and_foreseen(drafter, target, method, params, side)
    assert served == foreseen
    assert np.mean(served) > 0.8 * DEPTH


def served_and_foreseen(drafter, target, method, params, side):
    """Accepted drafts of every round on the training texts: in the engine, and as training says."""
    tree = TreeConfig(num_steps=DEPTH, topk=1, num_nodes=DEPTH + 1)
    engine = jspec.Engine(target, drafter, tree=tree, batch_size=16)
    prompts = [example.tokens[:PROMPT].tolist() for example in side.examples]
    sampling = jspec.SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    served, foreseen = [], []
    for output, hits in zip(engine.generate(prompts, sampling), row_hits(method, params, side)):
        # The last rounds look beyond the text that training had.
        count = len(output.stats.corrects) - 2
        served += output.stats.corrects[:count]
        foreseen += rounds(hits, count)
    return served, foreseen


def row_hits(method, params, side):
    """[K, T] of every text alone: whether step k from row t says the target's token."""
    alone = BatchConfig(tokens=64, max_length=64, packing=False, lookback=DEPTH - 1)
    schedule = Schedule(side.examples, alone)
    observe = jax.jit(method.observe, static_argnums=3)
    hits = {}
    for number in range(schedule.batches_per_epoch):
        batch = schedule[number]
        _, rows = observe(params, method.frozen, jax.tree.map(jnp.asarray, batch.arrays()), None)
        # From the order of teacher rows to that of draft rows.
        by_row = [np.roll(np.asarray(rows.hit[k, 0]), -1 - k) for k in range(DEPTH)]
        hits[int(batch.examples.max())] = np.stack(by_row)
    return [hits[index] for index in range(len(side.examples))]


def rounds(hits, count):
    """Accepted drafts of each round, from the last prompt token on."""
    row, accepted = PROMPT - 1, []
    for _ in range(count):
        misses = np.flatnonzero(hits[:, row] == 0)
        accepted.append(int(misses[0]) if len(misses) else DEPTH)
        row += accepted[-1] + 1
    return accepted


def test_training_time_test_helps_from_depth_two_on(unrolled, target, data):
    _, _, with_test, side = unrolled
    method = eagle3(target, prepared(target, data, 0), 1)
    params, _ = train(method, side)
    # The same head structure, looked at over as many steps as the other.
    deep = eagle3(target, side, DEPTH)
    batch = side.schedule[0].arrays()
    _, sums = jax.jit(deep.loss, static_argnums=3)(
        params, deep.frozen, jax.tree.map(jnp.asarray, batch), None
    )
    without = figures(jax.device_get(sums))
    assert without["accuracy"][0] > 0.9
    assert all(a > b + 0.05 for a, b in zip(with_test["accuracy"][1:], without["accuracy"][1:]))


def test_every_medusa_head_learns_its_own_place(target, data, tmp_path):
    side = prepared(target, data, HEADS - 1)
    config = MedusaHeadConfig(
        num_heads=HEADS, projection="own", draft_vocab_size=40, export_dtype="float32"
    )
    method = medusa_method(config, target, side)
    params, seen = train(method, side, rate=3e-2)
    assert min(seen["accuracy"]) > 0.75
    method.export(params, tmp_path / "heads")
    drafter = jspec.load_drafter(tmp_path / "heads", target)
    tree = TreeConfig(num_steps=HEADS, topk=1, num_nodes=HEADS + 1)
    engine = jspec.Engine(target, drafter, tree=tree, batch_size=16)
    prompts = [example.tokens[:PROMPT].tolist() for example in side.examples]
    sampling = jspec.SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    outputs = engine.generate(prompts, sampling)
    served = acceptance_by_depth([output.stats for output in outputs])
    # A head that learnt its neighbour's place would be right at no depth but one.
    assert min(served) > 0.5


def test_mtp_learns_beside_a_frozen_target(tmp_path):
    tensors = tiny_tensors(MIMO, seed=3)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 6.0
    target = jspec.load_target(write_checkpoint(tmp_path, MIMO, tensors), dtype="float32")
    side = prepared(target, greedy_text(target, tmp_path))
    config = MTPHeadConfig(
        start="target", objective=MTPObjective(num_steps=DEPTH), format="mtp-modules"
    )
    method = mtp_method(config, target, side, seed=0)
    params, seen = train(method, side)
    assert seen["accuracy"][0] > 0.9
    method.export(params, tmp_path / "head")
    drafter = jspec.load_drafter(tmp_path / "head", target)
    served, foreseen = served_and_foreseen(drafter, target, method, params, side)
    assert served == foreseen
    assert np.mean(served) > 0.7 * DEPTH


def test_eagle1_learns_and_serves(target, data, tmp_path):
    side = prepared(target, data, 0)
    method = eagle1_method(
        Eagle1HeadConfig(export_dtype="float32"), target, side, max_length=96, seed=0
    )
    params, seen = train(method, side)
    assert seen["accuracy"][0] > 0.6
    method.export(params, tmp_path / "head")
    drafter = jspec.load_drafter(tmp_path / "head", target)
    engine = jspec.Engine(
        target, drafter, tree=TreeConfig(num_steps=1, topk=1, num_nodes=2), batch_size=16
    )
    prompts = [example.tokens[:PROMPT].tolist() for example in side.examples]
    outputs = engine.generate(prompts, jspec.SamplingParams(max_new_tokens=ANSWER, ignore_eos=True))
    assert acceptance_by_depth([output.stats for output in outputs])[0] > 0.6
