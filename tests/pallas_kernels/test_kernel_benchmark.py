"""The benchmark's own machinery, with XLA in the kernel's place and sizes that a CPU takes."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels import tree_attention

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels.py"
SNAPSHOT = SCRIPT.parent / "results" / "kernels-compile.json"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("kernels_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(bench, monkeypatch):
    def kernel(q, *rest):
        return tree_attention(q, *rest, implementation="xla")

    monkeypatch.setattr(bench, "HEADS", 4)
    monkeypatch.setattr(bench, "KV_HEADS", 2)
    monkeypatch.setattr(bench, "DIM", 16)
    monkeypatch.setattr(bench, "kernel", kernel)
    monkeypatch.setattr(bench, "METHODS", {**bench.METHODS, "kernel": kernel})
    monkeypatch.setattr(bench, "measure_copy", lambda: 1e9)
    monkeypatch.setattr(bench, "copies", lambda batch, context: 2)
    return bench


def test_all_methods_compute_the_same(small):
    outs = []
    for name, method in small.METHODS.items():
        q, rest = small.make_operands(name, 2, 7, 24)
        q, rest = jax.tree.map(
            lambda x: x.astype("float32") if x.dtype == "bfloat16" else x, (q, rest)
        )
        outs.append(np.asarray(method(q, *rest)))
    np.testing.assert_allclose(outs[0], outs[1], atol=2e-6)
    np.testing.assert_allclose(outs[0], outs[2], atol=2e-6)


def test_rows_and_aims(small, monkeypatch):
    monkeypatch.setattr(small.timing, "seconds_per_call", lambda *_: 1e-3)
    options = small.Options(nodes=(1, 8), context=(32,), batch=(2,))
    rows = list(small.measure(options))
    assert len(rows) == 1 + 3 * 2
    kernel = [row for row in rows if row["method"] == "kernel"]
    assert [row["mask_bytes"] for row in kernel] == [2 * 1 * 4, 2 * 8 * 4]
    assert all(row["relative_error"] < 2e-2 for row in kernel)
    assert all("GB/s" in small.line(row) for row in rows)
    json.dumps(rows)
    long = [{**row, "context": 8192} for row in kernel]
    assert small.aims(long)["most_time_of_8_nodes_over_1_from_8k"] == 1.0
    spent = list(small.measure(small.Options(nodes=(1,), context=(32,), batch=(1,), budget=-1.0)))
    assert all("time budget" in row["left_out"] for row in spent[1:])


def test_refuses_without_a_gpu(bench, capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("a GPU is at hand")
    assert bench.main(bench.Options()) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_snapshot_keeps_the_promises(bench):
    snapshot = json.loads(SNAPSHOT.read_text())
    rows = snapshot["kernels"]
    assert {row["case"] for row in rows} == {case.name for case in bench.compile_cases()}
    assert {row["arch"] for row in rows} == set(bench.ARCHITECTURES)
    for row in rows:
        if row["bounded"]:
            assert row["spill_bytes"] == 0
            assert row["shared_bytes"] <= bench.SHARED_LIMIT
        if row["case"].startswith("tree_attention"):
            assert row["mma"] > 0
