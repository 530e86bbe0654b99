"""`jspec train mtp`: a target and its module from scratch, served, resumed; what is refused."""

import json
import shutil

import numpy as np
import pytest
from tiny_experts import DEEPSEEK, MTP_KINDS, tiny_tensors, write_checkpoint

import jspec
from jspec.checkpoints import open_checkpoint
from jspec.cli import main
from jspec.trees import chain

STEPS, DEPTH = 120, 2


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Texts that count in steps of their own."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(80):
        ids = (rng.integers(40) + rng.choice([1, 3, 7]) * np.arange(32)) % 40
        lines.append(json.dumps({"input_ids": ids.tolist(), "loss_mask": [1] * len(ids)}))
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def checkpoint(folder, public=DEEPSEEK, **config):
    return write_checkpoint(folder, public | config, tiny_tensors(public | config))


def words(target, data, out, *more):
    return [
        "train", "mtp", "--target", str(target), "--data", str(data), "--out", str(out),
        "--max-length", "32", "--batch-tokens", "128", "--no-packing", "--validation", "0.1",
        "--num-steps", str(DEPTH), "--quiet", "--no-compilation-cache", *more,
    ]  # fmt: skip


JOINT = ("--joint", "--start", "random", "--learning-rate", "1e-2", "--devices", "1")
JOINT += ("--steps", str(STEPS), "--eval-every", "60", "--save-every", str(STEPS - 1))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A model without a module, and the folder of a run that trained both."""
    folder = tmp_path_factory.mktemp("joint")
    (folder / "first").mkdir()
    first = checkpoint(folder / "first", num_nextn_predict_layers=0)
    assert main(words(first, data, folder / "run", *JOINT)) == 0
    return first, folder / "run"


def lines(out, kind):
    every = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


@pytest.mark.once
def test_joint_training_from_scratch(run):
    _, out = run
    train, checks = lines(out, "train"), lines(out, "eval")
    assert train[-1]["loss"] < 0.3 * train[0]["loss"]
    assert checks[-1]["text_loss"] < 0.3 * train[0]["text_loss"]
    assert [line["step"] for line in checks] == [60, STEPS]
    target = jspec.load_target(out / "head", dtype="float32")
    assert target.config.mtp_layers == 1
    engine = jspec.Engine(target, jspec.load_drafter("mtp", target), tree=chain(DEPTH))
    prompts = [[(start + 3 * i) % 40 for i in range(6)] for start in (2, 11, 30)]
    outputs = engine.generate(prompts, jspec.SamplingParams(max_new_tokens=24))
    assert np.mean([output.stats.accept_length for output in outputs]) > 2.0


@pytest.mark.once
def test_goes_on_where_it_was(run, data, tmp_path):
    first, out = run
    again = tmp_path / "again"
    shutil.copytree(out, again)
    shutil.rmtree(again / "checkpoints" / "newest" / str(STEPS))
    assert main(words(first, data, again, *JOINT, "--resume")) == 0
    before, *after = [line["loss"] for line in lines(again, "train") if line["step"] == STEPS]
    assert after == [before]


@pytest.mark.parametrize(
    ("kind", "config", "more", "says"),
    [
        ("in-turn", {}, (), "has 3 modules run in turn; only one module run recurrently"),
        ("deepseek_v3", {"num_nextn_predict_layers": 0}, (), "has no module; start from target or"),
        ("mimo", {}, ("--format", "nextn"), "nextn holds one module as a decoder layer, not 1 of"),
        ("deepseek_v3", {}, ("--joint", "--format", "nextn"), "leaves out the target, which"),
        ("deepseek_v3", {}, ("--joint", "--features", "x"), "--joint trains the target"),
        (
            "deepseek_v3",
            {"first_k_dense_replace": 2},
            ("--start", "target"),
            "is dense, and a module of its family is a mixture of experts; start from random",
        ),
        ("deepseek_v3", {}, ("--num-steps", "0"), "num_steps=0, decay=0.6, weight=0.3"),
    ],
)
def test_what_is_refused(data, tmp_path, capsys, kind, config, more, says):
    target = checkpoint(tmp_path, MTP_KINDS[kind], **config)
    assert main(words(target, data, tmp_path / "run", "--dry-run", *more)) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_other_families_are_refused_by_name(data, tmp_path, capsys):
    public = MTP_KINDS["mimo"] | {"architectures": ["Qwen2ForCausalLM"]}
    del public["num_nextn_predict_layers"]
    target = write_checkpoint(tmp_path, public, tiny_tensors(public))
    assert main(words(target, data, tmp_path / "run")) == 2
    assert "prediction modules of 'qwen2' targets are not supported" in capsys.readouterr().err


def test_a_quantised_target_keeps_its_checkpoint(data, tmp_path, capsys):
    config = {"quantization_config": {"quant_method": "fp8"}}
    target = checkpoint(tmp_path, **config)
    assert main(words(target, data, tmp_path / "run")) == 2
    assert "write mtp-modules instead" in capsys.readouterr().err
    assert "quantization_config" in open_checkpoint(target).config
