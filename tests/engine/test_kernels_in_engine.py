"""The engine hands `implementation` to every kernel: the Pallas kernels write the same text."""

from tiny_models import tiny_target

import jspec
from jspec.targets import RopeConfig


def test_pallas_kernels_write_the_same_text():
    target = tiny_target(num_layers=1, head_dim=16, rope=RopeConfig(theta=1e4, dim=16))
    sampling = jspec.SamplingParams(max_new_tokens=8)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [9, 4]]
    tree = jspec.TreeConfig(num_steps=2, topk=2, num_nodes=4)
    plain = jspec.Engine(target, implementation="xla").generate(prompts, sampling)
    engine = jspec.Engine(target, "ngram", tree=tree, implementation="interpret")
    outputs = engine.generate(prompts, sampling)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
