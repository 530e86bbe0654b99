"""Strict settings for every test: no promotion by accident, types checked at run time.

jaxtyping's shapes are enforced (through beartype) in tests only, so users pay nothing for them.
"""

import os
from importlib.metadata import version
from pathlib import Path

# Two virtual CPU devices: code that assumes it owns the only device fails here.
# Tests compile hundreds of tiny programs that run for milliseconds: LLVM need not optimise them,
# and the older way to emit fusions takes less than half the time (newer XLA has lost the flag).
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

install_import_hook(["jspec", "pallas_kernels"], "beartype.beartype")

SHARED = Path(__file__).resolve().parents[2] / "shared"


def golden_root() -> Path:
    """The recorded reference numbers: `JSPEC_GOLDEN`, or the set beside the checkout."""
    return Path(os.environ.get("JSPEC_GOLDEN", SHARED / "golden" / "dev"))


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Real prompts (JSONL); tests that need them skip where they are absent."""
    root = SHARED / "data"
    if not root.is_dir():
        pytest.skip(f"no real prompts at {root}")
    return root


@pytest.fixture(scope="session")
def real_path() -> Path:
    """The real model's local path; downloaded once, skipped where that is impossible."""
    from jspec.checkpoints import resolve_source

    try:
        return resolve_source("smollm2-135m", progress=False)
    except ValueError as error:
        pytest.skip(f"the real model cannot be fetched: {error}")
