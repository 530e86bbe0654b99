"""Counts from shapes against the parameters of the very modules, built without their arrays."""

import json

import jax
import pytest
from flax import nnx
from tiny_models import tiny_config

from jspec.cost import PRESETS, ModelShape, eagle, eagle3, find_shape, medusa, mtp, network
from jspec.drafters.eagle import Eagle, EagleConfig
from jspec.drafters.eagle3 import Eagle3, Eagle3Config
from jspec.drafters.medusa import MedusaConfig, MedusaHeads
from jspec.targets.config import config_from_hf
from jspec.targets.decoder import Decoder
from jspec.targets.mtp import FAMILIES, MTPModule

PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}
"""Parameters of the published checkpoints, a tied head counted once."""


def built(make) -> int:
    """Numbers in a module."""
    module = nnx.eval_shape(make)
    return sum(x.size for x in jax.tree.leaves(nnx.state(module)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    assert find_shape(name).num_params == PUBLISHED[name]


def test_deepseek_v3_has_671_billion_and_uses_37_of_them():
    shape = find_shape("deepseek-v3")
    assert shape.num_params == pytest.approx(671e9, rel=1e-3)
    net = network(shape)
    used = net.body + net.expert_layers * net.experts_per_token * net.expert_params + net.head
    assert used + shape.embedding_params == pytest.approx(37.6e9, rel=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_counts_as_its_decoder(name):
    shape = find_shape(name)
    assert shape.num_params == built(lambda: Decoder(shape.config, dtype="float32"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True},
        {"qkv_bias": True, "family": "qwen2"},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"qk_norm": True, "family": "qwen3"},
        {"num_kv_heads": 4, "head_dim": 6},
    ],
    ids=str,
)
def test_switches(changes):
    shape = ModelShape(name="tiny", config=tiny_config(**changes))
    assert shape.num_params == built(lambda: Decoder(shape.config, dtype="float32"))


def test_eagle():
    shape = find_shape("llama-3-8b")
    one_layer = config_from_hf(PRESETS["llama-3-8b"] | {"num_hidden_layers": 1})
    config = EagleConfig(decoder=one_layer, fc_bias=False)
    whole = built(lambda: Eagle(config, dtype="float32"))
    step = eagle(shape).step
    # The embedding is looked up; the first layer has no norm before its attention.
    assert whole - shape.embedding_params == step.body + step.head - shape.config.hidden_size


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-4b"])
def test_eagle3(name):
    shape = find_shape(name)
    config = Eagle3Config(
        decoder=config_from_hf(PRESETS[name] | {"num_hidden_layers": 1}),
        draft_vocab_size=32_000,
        target_hidden_size=shape.config.hidden_size,
        feature_layers=(1, 2, 3),
        target_num_layers=shape.config.num_layers,
    )
    whole = built(lambda: Eagle3(config, dtype="float32"))
    extend = eagle3(shape).extend
    assert whole - shape.embedding_params == extend.body + extend.head


@pytest.mark.parametrize(("projection", "matrices"), [("own", 4), ("one", 1)])
def test_medusa(projection, matrices):
    shape = find_shape("llama-3-8b")
    config = MedusaConfig(
        num_heads=4,
        num_layers=1,
        hidden_size=4096,
        vocab_size=128_256,
        draft_vocab_size=128_256,
        bias=False,
        projection=projection,
    )
    whole = built(lambda: MedusaHeads(config, dtype="float32"))
    heads = medusa(shape, projection="own" if projection == "own" else "shared")
    assert whole == 4 * heads.block + matrices * heads.projection
    (cost,) = heads.passes(num_steps=4)
    assert cost.weight_bytes == 2 * whole
    assert cost.operations == 2 * 4 * (heads.block + heads.projection)


def test_mtp():
    shape = find_shape("deepseek-v3")
    config = shape.config
    whole = built(lambda: MTPModule(config, FAMILIES["deepseek_v3"], dtype="float32"))
    step = mtp(shape).step
    assert whole == step.body + step.experts * step.expert_params


def test_a_folder_and_a_file(tmp_path):
    public = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 30,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(public))
    shape = find_shape(tmp_path)
    assert shape.num_params == find_shape(str(file)).num_params
    assert shape.num_params == built(lambda: Decoder(shape.config, dtype="float32"))


def test_unusable_sources(tmp_path):
    with pytest.raises(ValueError, match=r"no such model 'gpt-9'; expected llama-3-8b"):
        find_shape("gpt-9")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find_shape(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match="expected a JSON object"):
        find_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(NotImplementedError, match="GPT2LMHeadModel"):
        find_shape(tmp_path)
