"""Every kernel lowers for CUDA, and compiles for real GPUs within its promised resources."""

import re

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk
from pallas_kernels import compile_report
from pallas_kernels import triton_backend as tb
from pallas_kernels.compile_cases import SHARED_LIMIT, compile_cases

CASES = [pytest.param(case, id=case.name) for case in compile_cases() if case.tested]


@pytest.mark.parametrize("case", CASES)
def test_lowers_for_cuda(case):
    text = tb.lower_for_cuda(case.function, *case.args).as_text()
    calls = re.findall(r"custom_call @\S*triton\S*\(", text)
    assert len(calls) == 1, "expected exactly one kernel launch"


@pytest.mark.skipif(
    compile_report.unavailable() is not None, reason=str(compile_report.unavailable())
)
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_compiles_within_its_resources(case, arch):
    (report,) = compile_report.compile_kernels(case.function, *case.args, arch=arch)
    if case.bounded:
        assert report.spill_bytes == 0, report
        assert report.shared_bytes <= SHARED_LIMIT, report
    if case.tensor_cores:
        assert report.mma > 0, report


def test_commit_aliases_every_cache():
    (case,) = (c for c in compile_cases() if c.name.startswith("commit_path 4"))
    text = tb.lower_for_cuda(case.function, *case.args).as_text()
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\]", text)
    assert sorted(map(int, aliases)) == list(range(len(case.args[0])))


def test_a_named_kernel_refuses_to_run_without_a_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("a GPU is at hand")
    parent = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(NotImplementedError, match="needs a CUDA GPU, got the 'cpu' backend"):
        pk.build_tree(parent, jnp.ones((1, 4), bool), implementation="triton")
