from pathlib import Path

import pytest

from jspec.checkpoints import resolve_source


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; downloaded once, skipped where that is impossible."""
    try:
        path = resolve_source("smollm2-135m", progress=False)
    except ValueError as error:
        pytest.skip(f"no real model: {error}")
    if path.suffix != ".gguf":
        pytest.skip(f"the hub's original is cached at {path}, not the GGUF file")
    return path
