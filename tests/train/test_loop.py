"""The loop survives what happens to runs: kills, signals, NaN, other meshes."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import toy_run
from toy_run import toy_fit, toy_method

from train.config import OptimizerConfig, RunConfig
from train.loop import Diverged

ROOT = Path(__file__).resolve().parents[2]


def losses(out):
    """Step -> loss, to the bit; a step that was taken twice counts the last time."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def start(*flags, devices=2):
    # The same compiler settings as here: the last bits depend on them.
    count = "--xla_force_host_platform_device_count="
    kept = [flag for flag in os.environ["XLA_FLAGS"].split() if not flag.startswith(count)]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*kept, f"{count}{devices}"]),
    }
    return subprocess.Popen(
        [sys.executable, toy_run.__file__, *map(str, flags)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole")
    toy_fit(out)
    return losses(out), np.load(out / "head/w.npy")


def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, whole):
    out = tmp_path / "run"
    child = start(out, "--die-at", 27)  # two batches a step: inside step 14
    said, _ = child.communicate()
    assert child.returncode == -signal.SIGKILL, said
    assert max(losses(out)) in (12, 13)
    toy_fit(out, resume=True)
    assert losses(out) == whole[0]
    np.testing.assert_array_equal(np.load(out / "head/w.npy"), whole[1])
    assert not list(out.glob(".head*"))


def test_sigterm_saves_and_stops(tmp_path, whole):
    def ask(number):
        if number == 14:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    result = toy_fit(tmp_path / "run", method=toy_method(before_batch=ask))
    assert (result.stopped, result.steps) == (True, 8)
    assert signal.getsignal(signal.SIGTERM) == before
    result = toy_fit(tmp_path / "run", resume=True)
    assert (result.stopped, result.steps) == (False, 20)
    assert losses(tmp_path / "run") == whole[0]


def test_steps_that_are_not_finite_are_skipped_and_counted(tmp_path):
    optimizer = OptimizerConfig(learning_rate=0.1, max_bad_steps=4)
    toy_fit(tmp_path / "a", method=toy_method(broken=(3, 4, 5)), optimizer=optimizer)
    lines = [json.loads(x) for x in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in lines[:8]] == [False] * 3 + [True] * 3 + [False] * 2
    assert lines[-2]["skipped"] == 3
    assert np.isfinite(np.load(tmp_path / "a/head/w.npy")).all()
    with pytest.raises(Diverged, match="4 steps in a row"):
        toy_fit(tmp_path / "b", method=toy_method(broken=range(3, 30)), optimizer=optimizer)


def test_a_folder_belongs_to_one_run(tmp_path, whole):
    toy_fit(tmp_path / "run", steps=2)
    with pytest.raises(ValueError, match="holds a run already"):
        toy_fit(tmp_path / "run", steps=2)
    with pytest.raises(ValueError, match="steps: 2 then, 3 now"):
        toy_fit(tmp_path / "run", steps=3, resume=True)


def test_learns_and_reports(tmp_path, whole):
    found = whole[0]
    assert found[20] < 0.75 * found[1]
    toy_fit(tmp_path / "run", tensorboard=True)
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [10, 20]
    assert evaluations[1]["tau"] == pytest.approx(1 + evaluations[1]["acceptance"][0], abs=1e-5)
    train = lines[0]
    assert {"loss", "accuracy", "min_pq", "tokens_per_second", "memory_bytes", "tau"} <= set(train)
    assert list((tmp_path / "run/tensorboard").iterdir())


@pytest.mark.parametrize("flags", [(), ("--fsdp",)])
def test_eight_devices_have_the_losses_of_one(tmp_path, whole, flags):
    child = start(tmp_path / "run", "--devices", 8, *flags, devices=8)
    said, _ = child.communicate()
    assert child.returncode == 0, said
    found = losses(tmp_path / "run")
    np.testing.assert_allclose(list(found.values()), list(whole[0].values()), rtol=1e-5)
    np.testing.assert_allclose(np.load(tmp_path / "run/head/w.npy"), whole[1], atol=1e-4)


def test_two_processes_have_the_losses_of_one(tmp_path, whole):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    out = tmp_path / "run"
    both = [
        start(out, "--devices", 2, "--coordinator", meeting, "--process", i, devices=1)
        for i in range(2)
    ]
    said = [child.communicate(timeout=240)[0] for child in both]
    assert [child.returncode for child in both] == [0, 0], said
    for notes in (out, out / "process1"):
        found = losses(notes)
        np.testing.assert_allclose(list(found.values()), list(whole[0].values()), rtol=1e-5)
    np.testing.assert_allclose(np.load(out / "head/w.npy"), whole[1], atol=1e-4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"processes": 2}, "need a coordinator"),
        ({"coordinator": "localhost:1"}, "one needs none"),
        ({"coordinator": "localhost:1", "processes": 2, "process": 2}, "expected 0 to 1"),
    ],
)
def test_processes_that_cannot_be_meant(tmp_path, given, says):
    with pytest.raises(ValueError, match=says):
        RunConfig(out=tmp_path, **given)


def test_a_quiet_run_says_nothing(tmp_path, capsys):
    toy_fit(tmp_path / "run", steps=2)
    said = capsys.readouterr()
    assert said.out + said.err == ""
