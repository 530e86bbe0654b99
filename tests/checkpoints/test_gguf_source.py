"""GGUF files against the arrays they were written from, and against transformers."""

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import MODEL_ARCH_NAMES

from jspec.checkpoints import open_checkpoint
from jspec.checkpoints.gguf_container import GGUFFile
from jspec.checkpoints.gguf_models import llama3_rope_factors

ARCHITECTURES = ["llama", "qwen2", "qwen3"]
E, F, H, K, N, V = 64, 96, 4, 2, 2, 96


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_tensors_and_config_come_back(tmp_path: Path, arch: str, quantisation: str):
    config = tiny_config(arch)
    tensors = tiny_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, quantisation=quantisation)
    checkpoint = open_checkpoint(path)
    assert checkpoint.names() == frozenset(tensors)
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, original in tensors.items():
        expected = original
        if original.ndim > 1:
            expected = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
        found = checkpoint.read(name)
        assert found.dtype == np.float32
        assert checkpoint.shape(name) == original.shape
        np.testing.assert_array_equal(found, expected, err_msg=name)
    assert config.items() <= checkpoint.config.items()
    assert checkpoint.config["rope_scaling"] is None
    assert checkpoint.config["attention_bias"] == (arch == "qwen2")
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2]}


def test_tied_embeddings_and_biases(tmp_path: Path):
    config = tiny_config("llama", tie_word_embeddings=True, attention_bias=True)
    tensors = tiny_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, tensors))
    assert checkpoint.config["tie_word_embeddings"]
    assert checkpoint.config["attention_bias"]
    assert checkpoint.names() == frozenset(tensors)
    for name, expected in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), expected, err_msg=name)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_reads_the_same(tmp_path: Path, arch: str):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    # transformers ignores a Qwen3 file's head size and takes its own default, 128.
    config = tiny_config(arch, **({"head_dim": 128} if arch == "qwen3" else {}))
    write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config), quantisation="Q8_0")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    state = {name: values.float().numpy() for name, values in model.state_dict().items()}
    assert checkpoint.names() == frozenset(state)
    for name, values in state.items():
        np.testing.assert_array_equal(checkpoint.read(name), values, err_msg=name)
    for key in ("hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size"):
        assert getattr(model.config, key) == checkpoint.config[key]


def test_real_weights_equal_transformers(real_gguf: Path, tmp_path: Path):
    """Two layers of the real file, without its vocabulary, which transformers takes 20 s over."""
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    whole = GGUFFile(real_gguf)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in whole.metadata.items():
        if key.startswith("llama.") and key != "llama.block_count":
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_block_count(2)
    for name, info in whole.tensors.items():
        if name.startswith(("blk.0.", "blk.1.")) or not name.startswith("blk."):
            kind = gguf.GGMLQuantizationType[info.quantisation]
            values = whole.read(name) if kind.name == "F32" else whole.raw(name)
            writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    checkpoint = open_checkpoint(real_gguf)
    compared = [name for name in model.state_dict() if name != "lm_head.weight"]
    assert len(compared) == 2 * 9 + 2
    for name in compared:
        expected = model.state_dict()[name].numpy()
        np.testing.assert_array_equal(checkpoint.read(name), expected, err_msg=name)


def test_real_config(real_gguf: Path):
    config = open_checkpoint(real_gguf).config
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert expected.items() <= config.items()


def _open(tmp_path: Path, arch: str = "llama", metadata=None, extra=None):
    config = tiny_config(arch)
    path = tmp_path / "m.gguf"
    return open_checkpoint(
        write_gguf(path, config, tiny_tensors(config), metadata=metadata, extra=extra)
    )


def test_llama3_scaling_is_recognised_from_its_factors(tmp_path: Path):
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_rope_factors(head_dim=16, theta=20000.0, **scaling)
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    checkpoint = _open(tmp_path, extra=extra)
    assert checkpoint.config["rope_scaling"] == {"rope_type": "llama3", **scaling}
    assert "rope_freqs.weight" not in checkpoint.names()


def test_llama3_factors_equal_transformers():
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        head_dim=128, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling}
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = llama3_rope_factors(head_dim=128, theta=500000.0, **scaling)
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(plain / factors, frequencies.numpy(), rtol=1e-5)


def test_factors_of_one_scale_nothing(tmp_path: Path):
    extra = {"rope_freqs.weight": np.ones(8, np.float32)}
    assert _open(tmp_path, extra=extra).config["rope_scaling"] is None


def test_other_factors_are_refused(tmp_path: Path):
    extra = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    with pytest.raises(NotImplementedError, match=r"rope_freqs.weight is not Llama 3's"):
        _open(tmp_path, extra=extra)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"scaling.type": "none"}, None),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"scaling.type": "linear", "scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 64,
                "scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict, expected: dict | None):
    metadata = {f"qwen2.rope.{key}": value for key, value in metadata.items()}
    assert _open(tmp_path, "qwen2", metadata).config["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("arch", "metadata", "reason"),
    [
        ("llama", {"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ("llama", {"llama.rope.scaling.alpha": 2.0}, "llama.rope.scaling.alpha is not supported"),
        ("llama", {"llama.expert_count": 8}, "mixture-of-experts"),
        ("qwen2", {"qwen2.attention.sliding_window": 8}, "qwen2 with a sliding window"),
        ("qwen2", {"qwen2.rope.dimension_count": 8}, "partial rotary"),
    ],
)
def test_unsupported_metadata(tmp_path: Path, arch: str, metadata: dict, reason: str):
    with pytest.raises(NotImplementedError, match=reason) as error:
        _open(tmp_path, arch, metadata)
    assert "\n" not in str(error.value)


def test_sliding_window_means_mistral(tmp_path: Path):
    config = _open(tmp_path, metadata={"llama.attention.sliding_window": 128}).config
    assert config["model_type"] == "mistral"
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 128


def test_end_of_turn_also_ends_generation(tmp_path: Path):
    metadata = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert _open(tmp_path, metadata=metadata).generation_config["eos_token_id"] == [2, 5]


def test_unsupported_architecture(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(NotImplementedError, match="architecture 'gemma2' is not supported, expect"):
        open_checkpoint(tmp_path / "m.gguf")


def test_tensor_without_counterpart(tmp_path: Path):
    with pytest.raises(ValueError, match=r"tensor 'blk.0.attn_sinks.weight' has no counterpart"):
        _open(tmp_path, extra={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})


def test_unreadable_quantisation(tmp_path: Path):
    path = _open(tmp_path).path
    content = bytearray(path.read_bytes())
    at = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    assert struct.unpack_from("<I", content, at) == (0,)  # F32
    struct.pack_into("<I", content, at, 24)  # I8
    path.write_bytes(content)
    with pytest.raises(NotImplementedError, match="quantisation I8 cannot be read"):
        open_checkpoint(path).read("model.norm.weight")
    struct.pack_into("<I", content, at, 999)
    path.write_bytes(content)
    with pytest.raises(NotImplementedError, match="ggml type 999"):
        open_checkpoint(path)


@pytest.mark.parametrize("cut", [0, 3, 20, 40, 400, 3000, -40])
def test_truncated_gguf(tmp_path: Path, cut: int):
    path = _open(tmp_path).path
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"m.gguf is (a )?(truncated|not a GGUF file)") as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


def test_damaged_headers_are_errors_not_crashes(tmp_path: Path):
    path = _open(tmp_path).path
    intact = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(200):
        content = bytearray(intact)
        for at in rng.integers(0, 2500, size=3):
            content[at] = rng.integers(256)
        path.write_bytes(content)
        with contextlib.suppress(ValueError, NotImplementedError):
            open_checkpoint(path)


def test_old_version(tmp_path: Path):
    path = _open(tmp_path).path
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 4, 1)
    path.write_bytes(content)
    with pytest.raises(NotImplementedError, match="GGUF version 1, expected 2 or 3"):
        open_checkpoint(path)


# --- tiny random models, written the way llama.cpp's converter writes them


def tiny_config(arch: str, **changes) -> dict:
    """The Hugging Face config of a tiny model of this GGUF architecture."""
    hf_class = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch]
    return {
        "architectures": [f"{hf_class}ForCausalLM"],
        "model_type": arch,
        "hidden_size": E,
        "intermediate_size": F,
        "num_hidden_layers": N,
        "num_attention_heads": H,
        "num_key_value_heads": K,
        "head_dim": 32 if arch == "qwen3" else E // H,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "max_position_embeddings": 256,
        "vocab_size": V,
        "tie_word_embeddings": False,
    } | changes


def tiny_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    width = config["head_dim"]
    shapes = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, E)
    for layer in range(N):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", H * width), ("k", K * width), ("v", K * width)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, E)
            if config["model_type"] == "qwen2" or config.get("attention_bias"):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (width,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (width,)
        if config.get("attention_bias") and config["model_type"] == "llama":
            shapes[f"{prefix}self_attn.o_proj.bias"] = (E,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (E, H * width)
        shapes[f"{prefix}input_layernorm.weight"] = (E,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (E,)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (F, E)
        shapes[f"{prefix}mlp.up_proj.weight"] = (F, E)
        shapes[f"{prefix}mlp.down_proj.weight"] = (E, F)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    config: dict,
    tensors: dict[str, np.ndarray],
    *,
    quantisation: str = "F32",
    metadata: dict | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write the model; `metadata` adds keys, `extra` adds tensors under their GGUF names."""
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(N)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if arch == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_vocab_size(config["vocab_size"])
    else:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_token_list([f"t{index}" for index in range(V)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool}
        add.get(type(value), writer.add_uint32)(key, value)
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], N)
    for name, values in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            values = permute(values, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            values = permute(values, config["num_key_value_heads"])
        base, suffix = name.rsplit(".", 1)
        ggml_name = f"{names.get_name(base)}.{suffix}"
        kind = gguf.GGMLQuantizationType[quantisation if values.ndim > 1 else "F32"]
        writer.add_tensor(ggml_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weights: np.ndarray, n_head: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`."""
    return (
        weights.reshape(n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )
