"""A tiny chat model on disk, and the two ways to run the command line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from jspec.cli import main

ROOT = Path(__file__).resolve().parents[2]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="session")
def write_model() -> Callable[..., Path]:
    """Writes a model of one's own: `write_model(folder, **changes of the config)`."""
    return _write_model


def _write_model(folder: Path, *, chat: bool = True, **changes) -> Path:
    """A random Llama with a byte-level tokenizer that has no merges."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = ["<|im_start|>", "<|im_end|>"]
    symbols = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if chat:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = CONFIG | {"vocab_size": len(symbols)} | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config), folder / "model.safetensors")
    return folder


def _weights(config: dict) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    weights = {
        name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    norms = [f"model.layers.{n}.input_layernorm" for n in range(config["num_hidden_layers"])]
    norms += [f"model.layers.{n}.post_attention_layernorm" for n in range(len(norms))]
    for name in [*norms, "model.norm"]:
        weights[f"{name}.weight"] = np.ones(hidden, np.float32)
    return weights


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A chat model."""
    return str(_write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def base_model(tmp_path_factory) -> str:
    """A model without a chat template, whose context holds 64 tokens."""
    folder = tmp_path_factory.mktemp("models") / "base"
    return str(_write_model(folder, chat=False, max_position_embeddings=64))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Path:
    """A cache folder for all tests that do not need one of their own: compiling is most of them."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def _compile_once(compiled):
    settings = {
        "jax_compilation_cache_dir": str(compiled / "compilation"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def jspec_run(capsys):
    """Runs the command line in this process; returns its stdout, which must be a success."""

    def run(*argv: str) -> str:
        code = main([*argv])
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out

    return run


@pytest.fixture
def jspec_fails(capsys):
    """Runs the command line in this process; returns the one line that says what is wrong."""

    def run(*argv: str) -> str:
        code = main([*argv])
        said = capsys.readouterr()
        assert code == 2
        assert said.out == ""
        assert said.err.startswith("jspec: error: ")
        assert said.err.count("\n") == 1
        assert said.err.endswith("\n")
        return said.err

    return run


@pytest.fixture
def spawn(compiled) -> Callable[..., subprocess.Popen]:
    """Starts Python in a process of its own."""

    def start(*argv: str, cache: Path = compiled) -> subprocess.Popen:
        # A shell's background jobs ignore SIGINT and pass that on; a handler is not passed on, so
        # that the new process starts with the default.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(
                [sys.executable, *argv],
                cwd=ROOT,
                env={**os.environ, "JSPEC_CACHE": str(cache)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)

    return start
