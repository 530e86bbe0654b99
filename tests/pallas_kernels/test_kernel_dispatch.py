"""Which implementation runs, and what a measured config changes."""

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch, timing, tune, tuning
from pallas_kernels.tree_attention.config import TreeAttentionConfig
from pallas_kernels.tree_attention.heuristic import choose_config, default_config, tuning_key
from pallas_kernels.tree_attention.traffic import bytes_moved


def refuse(*_):
    raise NotImplementedError("not this one")


def fail(*_):
    raise ValueError("a real fault")


TABLE = {"xla": lambda x: ("xla", x), "triton": lambda x: ("triton", x), "interpret": refuse}


def test_default_on_a_cpu_is_xla(monkeypatch):
    monkeypatch.setattr(dispatch, "default_is_cuda", lambda: False)
    assert dispatch.call("op", None, TABLE, 1) == ("xla", 1)


def test_default_on_a_gpu_is_the_kernel_and_falls_through_only_if_unsupported(monkeypatch):
    monkeypatch.setattr(dispatch, "default_is_cuda", lambda: True)
    assert dispatch.call("op", None, TABLE, 1) == ("triton", 1)
    assert dispatch.call("op", None, {**TABLE, "triton": refuse}, 1) == ("xla", 1)
    with pytest.raises(ValueError, match="a real fault"):
        dispatch.call("op", None, {**TABLE, "triton": fail}, 1)


def test_a_named_implementation_is_never_replaced(monkeypatch):
    monkeypatch.setattr(dispatch, "default_is_cuda", lambda: True)
    with pytest.raises(NotImplementedError, match="not this one"):
        dispatch.call("op", "interpret", TABLE, 1)
    with pytest.raises(ValueError, match="op: got implementation='cuda', expected None or one of"):
        dispatch.call("op", "cuda", TABLE, 1)


SIZES = {
    "batch": 3,
    "rows": 32,
    "capacity": 2048,
    "kv_heads": 8,
    "dim": 128,
    "dtype": jnp.bfloat16,
}


def test_heuristic_reads_what_tune_writes(monkeypatch, tmp_path):
    path = tmp_path / "tuning.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    rule = default_config(**SIZES, processors=132)
    assert choose_config(**SIZES) == rule  # no file yet
    measured = dataclasses.replace(rule, block_k=128, num_stages=3)
    key = tuning_key(**SIZES)
    fields = dataclasses.asdict(measured)
    tuning.write(path, {tuning.device_kind(): {"tree_attention": {key: fields}}})
    assert choose_config(**SIZES) == measured
    assert choose_config(**{**SIZES, "batch": 4}) == measured  # the same power of two
    assert choose_config(**{**SIZES, "batch": 5}) != measured
    tuning.write(path, {"another GPU": {"tree_attention": {key: fields}}})
    assert choose_config(**SIZES) == rule  # a rewritten file is read again


def test_a_broken_tuning_file_is_named(monkeypatch, tmp_path):
    path = tmp_path / "tuning.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    path.write_text(json.dumps(["nonsense"]))
    with pytest.raises(ValueError, match=r"tuning\.json is no table of measured configs"):
        choose_config(**SIZES)


def test_tune_refuses_without_a_gpu(tmp_path):
    if dispatch.default_is_cuda():
        pytest.skip("a GPU is at hand")
    done = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.tune", "--out", str(tmp_path / "t.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "needs a CUDA GPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_tune_measures_and_keeps_the_fastest(monkeypatch):
    default = TreeAttentionConfig(block_rows=16, splits=2)
    every = tune.candidates(default)
    assert every[0] == default
    assert len(set(every)) == len(every)
    seconds = dict.fromkeys(every, 2.0) | {every[3]: 1.0}
    measured = iter(every)
    monkeypatch.setattr(timing, "compiled_loop", lambda *_: None)
    monkeypatch.setattr(timing, "seconds_per_call", lambda *_: seconds[next(measured)])
    args = tune.inputs(batch=1, nodes=5, capacity=32, heads=2, kv_heads=2, dim=16, dtype="float32")
    assert tune.fastest(args, default) == (every[3], 1.0, 2.0)


def test_timing_counts_every_call():
    x = jnp.ones((8, 8))
    copies = [(x,), (x + 1,)]
    loop = timing.compiled_loop(lambda a, b: a @ b, x, copies)
    assert 0 < timing.seconds_per_call(loop, x, copies, least=0.0, repeats=1) < 1.0


def test_mask_bytes_do_not_depend_on_the_context():
    def traffic(context, splits=1):
        return bytes_moved(
            batch=2,
            queries=40,
            nodes=40,
            committed=2 * context,
            heads=32,
            kv_heads=8,
            dim=128,
            itemsize=2,
            splits=splits,
        )

    assert traffic(512).mask == traffic(32768).mask == 2 * 40 * 2 * 4
    assert traffic(512).prefix == 2 * 2 * 512 * 8 * 128 * 2
    assert traffic(512).partials == 0
    assert traffic(512, splits=4).total - traffic(512).total == 2 * 4 * 2 * 40 * 32 * 130 * 4
