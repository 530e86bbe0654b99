"""A checkpoint is loaded whole and exactly, or refused with the name of what does not fit."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jspec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def _tensors():
    shapes = {"model.embed_tokens": (20, 16), "model.norm": (16,), "lm_head": (20, 16)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj": (16, 16) for name in "qo"}
        shapes |= {f"{prefix}.self_attn.{name}_proj": (8, 16) for name in "kv"}
        shapes |= {f"{prefix}.mlp.{name}_proj": (24, 16) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj"] = (16, 24)
        shapes[f"{prefix}.input_layernorm"] = shapes[f"{prefix}.post_attention_layernorm"] = (16,)
    rng = np.random.default_rng(0)
    return {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture
def load(tmp_path):
    """Writes a small Llama with the given changes and loads it; None takes something away."""

    def run(*, dtype="float32", tensors=None, **config):
        weights = {k: v for k, v in (_tensors() | (tensors or {})).items() if v is not None}
        settings = {k: v for k, v in (CONFIG | config).items() if v is not None}
        save_file(weights, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        return jspec.load_target(tmp_path, dtype=dtype)

    return run


def test_the_unchanged_checkpoint_loads(load):
    target = load()
    assert target.num_params == sum(tensor.size for tensor in _tensors().values())
    assert target.dtype == jnp.float32
    assert target.config.max_context == 64
    assert load(dtype="bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize("name", _tensors())
def test_missing_tensor(load, name):
    with pytest.raises(ValueError, match=rf"no tensor '{name}' of shape \("):
        load(tensors={name: None})


@pytest.mark.parametrize("name", _tensors())
def test_misshapen_tensor(load, name):
    wrong = np.zeros((*_tensors()[name].shape[:-1], 12), np.float32)
    with pytest.raises(ValueError, match=rf"'{name}' has shape \(.*12,?\), its config asks for"):
        load(tensors={name: wrong})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.0.mlp.down_proj.bias",
        "visual.patch.weight",
    ],
)
def test_unused_tensor(load, name):
    with pytest.raises(ValueError, match=rf"has 1 tensors that .* not explain: {name}"):
        load(tensors={name: np.zeros((16,), np.float32)})


def test_every_unused_tensor_is_named(load):
    extra = {name: np.zeros((1,), np.float32) for name in ("extra.a", "extra.b")}
    with pytest.raises(ValueError, match=r"has 2 tensors .*: extra\.a, extra\.b;"):
        load(tensors=extra)


def test_derived_buffers_are_no_tensors(load):
    frequencies = np.ones((2,), np.float32)
    load(tensors={"model.layers.0.self_attn.rotary_emb.inv_freq": frequencies})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"attention_bias": True}, "model.layers.0.self_attn.[qkvo]_proj.bias"),
        ({"mlp_bias": True}, "model.layers.0.mlp.(gate|down)_proj.bias"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "model.layers.0.self_attn.q_proj.bias"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 4}, "self_attn.[qk]_norm.weight"),
        ({"num_hidden_layers": 3}, "model.layers.2.[a-z_.]*.weight"),
    ],
)
def test_config_that_asks_for_more(load, changes, name):
    with pytest.raises(ValueError, match=rf"no tensor '.*{name}'"):
        load(**changes)


def test_config_with_fewer_layers(load):
    with pytest.raises(ValueError, match=r"does not explain: .*model\.layers\.1\.mlp\.up_proj"):
        load(num_hidden_layers=1)


def test_tied_config(load):
    embedding = _tensors()["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but lm_head\.weight differs"):
        load(tie_word_embeddings=True)
    same = load(tie_word_embeddings=True, tensors={"lm_head.weight": embedding})
    none = load(tie_word_embeddings=True, tensors={"lm_head.weight": None})
    assert same.num_params == none.num_params
    hidden = np.random.default_rng(1).standard_normal((1, 1, 16)).astype(np.float32)
    for target in (same, none):
        logits = target.logits(target.params, jnp.asarray(hidden))
        np.testing.assert_allclose(logits, hidden @ embedding.T, atol=1e-5)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], ["Gemma2ForCausalLM"], [], None])
def test_unsupported_architecture(load, architectures):
    name = architectures[0] if architectures else r"\(none\)"
    with pytest.raises(NotImplementedError, match=rf"architecture '{name}'.*LlamaForCausalLM"):
        load(architectures=architectures)


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_pytorch_tanh"])
def test_unsupported_activation(load, activation):
    with pytest.raises(NotImplementedError, match=f"hidden_act='{activation}'.*expected 'silu'"):
        load(hidden_act=activation)


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_partial_rotation(load, changes):
    with pytest.raises(NotImplementedError, match=r"partial_rotary_factor=0\.5"):
        load(**changes)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "su", "mrope"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_unknown_rope_type(load, kind, spelling):
    with pytest.raises(NotImplementedError, match=f"rope type '{kind}'.*default, linear, llama3"):
        load(**{spelling: {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4},
            "original_max_position_embeddings",
        ),
    ],
)
def test_rope_without_its_numbers(load, scaling, key):
    with pytest.raises(ValueError, match=f"rope type '{scaling['rope_type']}'.*'{key}'"):
        load(rope_scaling=scaling)


@pytest.mark.parametrize("dtype", ["float16", "int8", "f32"])
def test_unsupported_dtype(load, dtype):
    with pytest.raises(ValueError, match=f"dtype='{dtype}'.*float32 or bfloat16"):
        load(dtype=dtype)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ],
)
@pytest.mark.parametrize("value", [None, 0, "16"])
def test_missing_or_senseless_key(load, key, value):
    with pytest.raises(ValueError, match=f"config key '{key}' is {value!r}"):
        load(**{key: value})


def test_query_heads_in_whole_groups(load):
    with pytest.raises(ValueError, match=r"num_attention_heads=4 .* num_key_value_heads=3"):
        load(num_key_value_heads=3)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"sliding_window": 24}, 24),
        ({"sliding_window": 4096}, 64),
        ({"max_position_embeddings": 32768}, 4096),  # the family's default window
    ],
)
def test_mistral_window_limits_context(load, changes, limit):
    target = load(architectures=["MistralForCausalLM"], **changes)
    assert target.config.max_context == limit


def test_mistral_without_a_window(tmp_path, load):
    load(architectures=["MistralForCausalLM"])
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config |= {"sliding_window": None, "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert jspec.load_target(tmp_path, dtype="float32").config.max_context == 32768


def test_a_window_that_is_switched_off_is_no_limit(load):
    """Qwen configs carry a window that only `use_sliding_window` turns on; Llama has none."""
    assert load(sliding_window=24, use_sliding_window=False).config.max_context == 64


def test_prompt_beyond_the_window(load):
    target = load(architectures=["MistralForCausalLM"], sliding_window=24)
    engine = jspec.Engine(target)
    with pytest.raises(ValueError, match=r"prompt has 24 tokens.* holds 24"):
        engine.generate([[1] * 24])


def test_nothing_at_the_path(tmp_path):
    with pytest.raises(ValueError, match="holds no weights"):
        jspec.load_target(tmp_path)
    save_file(_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        jspec.load_target(tmp_path)
