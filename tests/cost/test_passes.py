"""Bytes, operations and the roofline."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jspec.cost import HARDWARE, PRESETS, find_drafter, find_shape, network, target_pass
from jspec.cost.hardware import Hardware, find_hardware, measure_hardware
from jspec.cost.passes import distinct_experts, memory_needed

unhurried = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

names = st.sampled_from(sorted(PRESETS))
batches, widths, contexts = st.integers(1, 64), st.integers(1, 64), st.integers(0, 4096)


@unhurried
@given(names, batches, widths, contexts)
def test_a_pass_is_a_sum_over_its_parts(name, batch, nodes, context):
    shape = find_shape(name)
    net = network(shape)
    cost = target_pass(shape, batch=batch, nodes=nodes, context=context)
    tokens = batch * nodes
    per_token = 2 * (net.body + net.head)
    per_token += 2 * net.expert_layers * net.experts_per_token * net.expert_params
    pairs = tokens * (context + nodes) * net.pair_operations
    assert cost.operations == pytest.approx(tokens * per_token + pairs)
    assert cost.cache_bytes == 2 * batch * (context + nodes) * net.cache_numbers
    assert cost.weight_bytes == pytest.approx(2 * net.weights_read(tokens))
    assert cost.bytes == cost.weight_bytes + cost.cache_bytes


@unhurried
@given(names, batches, widths, contexts, st.sampled_from(["bfloat16", "float32"]))
def test_the_slower_of_the_two_decides(name, batch, nodes, context, dtype):
    cost = target_pass(find_shape(name), batch=batch, nodes=nodes, context=context, dtype=dtype)
    hardware = HARDWARE["h100"]
    reading = cost.bytes / hardware.bandwidth
    multiplying = cost.operations / hardware.peak(dtype)
    assert cost.seconds(hardware) == max(reading, multiplying)
    assert (cost.bound(hardware) == "memory") == (multiplying < reading)


@unhurried
@given(names, batches, widths)
def test_more_nodes_never_cost_less(name, batch, nodes):
    shape, hardware = find_shape(name), HARDWARE["a100"]
    narrow, wide = (
        target_pass(shape, batch=batch, nodes=width, context=512).seconds(hardware)
        for width in (nodes, nodes + 1)
    )
    assert narrow <= wide


@unhurried
@given(st.integers(1, 512), st.integers(1, 8))
def test_distinct_experts(tokens, per_token):
    found = distinct_experts(256, per_token, tokens)
    assert found <= 256
    assert found <= per_token * tokens + 1e-9
    assert distinct_experts(256, per_token, 1) == pytest.approx(per_token)


def test_latent_attention_caches_one_row():
    net = network(find_shape("deepseek-v3"))
    assert net.cache_numbers == 61 * (512 + 64)


def test_a_float8_model_has_a_bfloat16_cache():
    shape = find_shape("deepseek-v3")
    small, large = (
        target_pass(shape, context=1000, dtype=dtype) for dtype in ("float8", "bfloat16")
    )
    assert small.cache_bytes == large.cache_bytes
    assert 2 * small.weight_bytes == large.weight_bytes


def test_what_a_model_needs():
    shape = find_shape("llama-3-8b")
    assert memory_needed(shape) == 2 * shape.num_params
    # 128 KiB a token: 32 layers, 8 KV heads of 128, keys and values.
    assert memory_needed(shape, batch=3, context=5) - memory_needed(shape) == 15 * 131_072


def test_several_devices():
    one, two = HARDWARE["h100"], HARDWARE["h100"].times(2)
    assert (two.bandwidth, two.memory) == (2 * one.bandwidth, 2 * one.memory)
    assert two.peak("float8") == 2 * one.peak("float8")
    assert two.ridge() == one.ridge()
    assert HARDWARE["tpu-v5e"].times(4).float32 is None
    with pytest.raises(ValueError, match="devices=0"):
        one.times(0)


def test_every_device_has_a_source_and_a_bfloat16_peak():
    for name, hardware in HARDWARE.items():
        assert hardware.name == name
        assert len(hardware.source) > 10
        assert 50 < hardware.ridge() < 1000


def test_refusals():
    with pytest.raises(ValueError, match=r"hardware 'h101'; expected a100, h100.* or this-machine"):
        find_hardware("h101")
    with pytest.raises(ValueError, match=r"tpu-v5e has no float32 figure .* expected bfloat16"):
        HARDWARE["tpu-v5e"].peak("float32")
    with pytest.raises(ValueError, match="dtype='int4'"):
        HARDWARE["h100"].peak("int4")
    with pytest.raises(ValueError, match="dtype='int4'"):
        target_pass(find_shape("llama-3-8b"), dtype="int4")


def test_drafters_by_name():
    target = find_shape("llama-3-8b")
    for name in ("eagle", "eagle3", "medusa", "medusa-shared", "mtp", "llama-3.2-1b"):
        drafter = find_drafter(name, target)
        assert drafter.name == name
        assert drafter.passes(num_steps=3)
    assert find_drafter("ngram", target).passes(num_steps=3) == []
    assert len(find_drafter("eagle3", target).passes(num_steps=5, topk=4)) == 5
    assert len(find_drafter("medusa", target).passes(num_steps=3)) == 1


@pytest.mark.parametrize(
    ("name", "vocab", "says"),
    [
        ("eagle9", None, r"drafter 'eagle9': expected eagle, .*no such model"),
        ("qwen3-0.6b", None, r"vocabulary of 151936 tokens, .* has 128256"),
        ("ngram", 100, "drafts the whole vocabulary"),
        ("llama-3.2-1b", 100, "drafts the whole vocabulary"),
        ("eagle3", 200_000, "draft_vocab=200000; expected 1 to"),
    ],
)
def test_drafters_that_cannot_be(name, vocab, says):
    with pytest.raises(ValueError, match=says):
        find_drafter(name, find_shape("llama-3-8b"), draft_vocab=vocab)


def test_medusa_has_as_many_levels_as_heads():
    heads = find_drafter("medusa", find_shape("llama-3-8b"))
    with pytest.raises(ValueError, match="num_steps=5, but medusa has 4 heads"):
        heads.passes(num_steps=5)


def test_this_machine():
    found = measure_hardware(matrix_bytes=2**20, size=64)
    assert isinstance(found, Hardware)
    assert found.bandwidth > 0
    assert found.peak("float32") > 0
    assert found.memory > 2**28
    assert found.bfloat16 is None
