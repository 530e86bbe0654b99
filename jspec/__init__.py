"""Speculative decoding in JAX: draft a tree, verify it in one pass, keep the target's distribution.

import jspec

target = jspec.load_target("smollm2-135m")
drafter = jspec.load_drafter("ngram", target)
engine = jspec.Engine(target, drafter, tree=jspec.TreeConfig(num_steps=5, topk=4, num_nodes=8))
out = engine.generate(["The capital of France is"], jspec.SamplingParams(max_new_tokens=64))
print(out[0].text, out[0].stats.accept_length)
"""

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
