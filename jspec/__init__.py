"""Speculative decoding in JAX: draft a tree, verify it in one pass, keep the target's distribution.

import jspec

target = jspec.load_target("smollm2-135m")
drafter = jspec.load_drafter("ngram", target)
engine = jspec.Engine(target, drafter, tree=jspec.TreeConfig(num_steps=5, topk=4, num_nodes=8))
out = engine.generate(["The capital of France is"], jspec.SamplingParams(max_new_tokens=64))
print(out[0].text, out[0].stats.accept_length)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.drafters import load_drafter
    from jspec.engine import Engine, Output, Stats, Update
    from jspec.sampling import SamplingParams
    from jspec.targets import load_target
    from jspec.trees import StaticTree, TreeConfig

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "Output",
    "SamplingParams",
    "StaticTree",
    "Stats",
    "TreeConfig",
    "Update",
    "load_drafter",
    "load_target",
]

# Imported when first used, so that `jspec --help` does not wait for JAX.
_HOME = {
    "Engine": "jspec.engine",
    "Output": "jspec.engine",
    "SamplingParams": "jspec.sampling",
    "StaticTree": "jspec.trees",
    "Stats": "jspec.engine",
    "TreeConfig": "jspec.trees",
    "Update": "jspec.engine",
    "load_drafter": "jspec.drafters",
    "load_target": "jspec.targets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
