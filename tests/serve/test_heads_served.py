"""A draft head with a cache of its own: in chunks, in slots, the same texts by the same rounds."""

import pytest
from eagle_heads import eagle3_head
from tiny_models import tiny_target

import jspec
import serve
from jspec import SamplingParams
from jspec.drafters.eagle_build import build_drafter
from jspec.engine import prefill

PROMPTS = [[(7 * i * i + 3 * i) % 39 for i in range(length)] for length in (70, 5, 33)]
ASKED = SamplingParams(max_new_tokens=24)


def made():
    target = tiny_target(num_layers=3, max_context=256)
    head = eagle3_head(target, feature_layers=(0, 1, 2))
    tree = jspec.TreeConfig(num_steps=2, topk=3, num_nodes=6)
    return jspec.Engine(target, build_drafter(head, target), tree=tree, batch_size=3)


@pytest.fixture(scope="module")
def engine():
    return made()


@pytest.fixture(scope="module")
def expected(engine):
    """Each prompt taken in by one pass."""
    assert max(map(len, PROMPTS)) < prefill.MAX_CHUNK
    outputs = engine.generate(PROMPTS, ASKED)
    assert max(max(output.stats.accept_lengths) for output in outputs) > 1
    return [(output.token_ids, output.stats.accept_lengths) for output in outputs]


@pytest.mark.once
def test_chunks_change_neither_tokens_nor_acceptance(expected, monkeypatch):
    monkeypatch.setattr(prefill, "MAX_CHUNK", 16)
    outputs = made().generate(PROMPTS, ASKED)
    assert [(output.token_ids, output.stats.accept_lengths) for output in outputs] == expected


@pytest.mark.once
def test_served_by_the_rounds_of_generate(engine, expected):
    with serve.Server(engine, slots=2, capacity=128, rounds=3) as server:
        handles = [server.submit(prompt, ASKED) for prompt in PROMPTS]
        outputs = [handle.result(300) for handle in handles]
    assert [(output.token_ids, output.stats.accept_lengths) for output in outputs] == expected
