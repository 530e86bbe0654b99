"""A target and its prediction module out of nothing: `python benchmarks/mtp_from_scratch.py DIR`.

Writes a small random DeepSeek-V3-shaped model (latent attention, experts, no module) and sources of
Python's standard library as bytes to DIR, trains model and module together with `jspec train mtp
--joint`, and drafts with the module on files it has not seen. What is left in DIR/run/head is an
ordinary checkpoint: `jspec generate --target DIR/run/head --drafter mtp`.

The default sources are the tables of the `encodings` package: a text of low entropy that hardly
repeats itself, so that a model of this size writes some of its own. `--sources '*.py'` is code.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jspec
from jspec.cli import main as run_command
from jspec.commands.figures import dump_json, write_json
from jspec.drafters.mtp_export import write_mtp
from jspec.targets import config_from_hf, random_target

PUBLIC = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
WIDTH, BATCH = 192, 4
"""Bytes a text, texts a step."""

PROMPT, NEW, PROMPTS = 64, 128, 16
GRAM = 8
"""Bytes of the pieces whose variety is counted."""


def main() -> None:
    """Write, train, draft, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--sources", default="encodings/*.py", help="below the standard library")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    training, held_out = corpus(args.sources)
    write_first(args.out / "first")
    write_texts(args.out / "texts.jsonl", training)
    start, cpu = time.perf_counter(), time.process_time()
    code = run_command([
        "train", "mtp", "--joint", "--start", "random", "--target", str(args.out / "first"),
        "--data", str(args.out / "texts.jsonl"), "--out", str(args.out / "run"),
        "--max-length", str(WIDTH), "--batch-tokens", str(WIDTH * BATCH), "--no-packing",
        "--validation", "0.01", "--chunk", "1024", "--steps", str(args.steps),
        "--eval-every", "100", "--save-every", "100", "--log-every", "20", "--beta2", "0.98",
        "--learning-rate", str(args.learning_rate), "--clip", "1.0", "--devices", "1",
    ])  # fmt: skip
    if code:
        raise SystemExit(code)
    figures = {
        "sources": args.sources,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "tokens": args.steps * WIDTH * BATCH,
        **training_figures(args.out / "run" / "metrics.jsonl"),
        **draft(args.out / "run" / "head", held_out),
    }
    print(dump_json(figures))
    if args.json:
        write_json(args.json, figures)


def corpus(pattern: str) -> tuple[bytes, list[bytes]]:
    """Modules of the standard library in a row, and the files left out of it."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob(pattern))
    texts = [file.read_bytes() for file in files]
    held_out = [text for text in texts[::12] if len(text) > 4 * PROMPT]
    return b"".join(text for index, text in enumerate(texts) if index % 12), held_out


def write_texts(path: Path, text: bytes) -> None:
    """Pieces of WIDTH bytes as token ids, all of them supervised."""
    with path.open("w", encoding="utf-8") as file:
        for at in range(0, len(text) - WIDTH + 1, WIDTH):
            line = {"input_ids": list(text[at : at + WIDTH]), "loss_mask": [1] * WIDTH}
            file.write(json.dumps(line) + "\n")


def write_first(folder: Path) -> None:
    """The model that training starts from: random, without a bias on the choice of experts."""
    target = random_target(config_from_hf(PUBLIC))
    for path, variable in nnx.to_flat_state(target.params):
        if path[-1] == "correction":
            variable[...] = jnp.zeros_like(variable[...])
    write_mtp(target, [], folder, public=PUBLIC)
    write_tokenizer(folder)


def training_figures(path: Path) -> dict[str, Any]:
    """What the last evaluation of a run saw."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    return {
        "steps": last["step"],
        "nats": [round(x, 3) for x in (last["text_loss"], *last["loss_by_depth"])],
        "simulated_acceptance": last["acceptance"],
        "simulated_tau": round(last["tau"], 3),
    }


def write_tokenizer(folder: Path) -> None:
    """Token i is byte i."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The printable stand-ins that byte-level tokenizers write bytes as, in the order of the bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(rest)
    }
    tokenizer = Tokenizer(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def draft(folder: Path, held_out: list[bytes]) -> dict[str, Any]:
    """τ of chains of 1, 2 and 3 on texts that training did not see; the text stays the target's."""
    target = jspec.load_target(folder)
    drafter = jspec.load_drafter("mtp", target)
    rng = np.random.default_rng(2)
    prompts, true = [], []
    for index in range(PROMPTS):
        text = held_out[index % len(held_out)]
        at = int(rng.integers(0, len(text) - PROMPT - NEW))
        prompts.append(list(text[at : at + PROMPT]))
        true.append(list(text[at + PROMPT : at + PROMPT + NEW]))
    figures: dict[str, Any] = {
        "parameters": target.num_params,
        "module_parameters": sum(x.size for x in jax.tree.leaves(drafter.params["module"])),
        f"distinct_{GRAM}_grams_of_held_out_text": variety(true),
    }
    temperatures = (0.0, 0.7, 1.0)
    sampling = [
        jspec.SamplingParams(max_new_tokens=NEW, temperature=temperature, seed=seed)
        for temperature in temperatures
        for seed in range(PROMPTS)
    ]
    # All temperatures in one batch: a slot's text does not depend on its neighbours.
    prompts = prompts * len(temperatures)
    plain = jspec.Engine(target, batch_size=len(prompts)).generate(prompts, sampling)
    written = {0: plain}
    for steps in (1, 2, 3):
        tree = jspec.TreeConfig(num_steps=steps, topk=1)
        engine = jspec.Engine(target, drafter, tree=tree, batch_size=len(prompts))
        written[steps] = engine.generate(prompts, sampling)
    for place, temperature in enumerate(temperatures):
        here = slice(place * PROMPTS, (place + 1) * PROMPTS)
        texts = [output.token_ids for output in plain[here]]
        found: dict[str, Any] = {f"distinct_{GRAM}_grams": variety(texts)}
        for steps in (1, 2, 3):
            outputs = written[steps][here]
            rounds = [length for output in outputs for length in output.stats.accept_lengths]
            found[f"chain_{steps}"] = round(float(np.mean(rounds)), 3)
            if temperature == 0.0:
                same = sum(a.token_ids == b for a, b in zip(outputs, texts))
                found[f"texts_as_plain_{steps}"] = f"{same} of {PROMPTS}"
        found["sample"] = bytes(texts[0]).decode("utf-8", "replace")
        figures[f"tau_at_temperature_{temperature:g}"] = found
    return figures


def variety(texts: Sequence[Sequence[int]]) -> float:
    """Distinct pieces of GRAM bytes over all of a text's, the mean over texts; a loop has few."""
    shares = []
    for text in texts:
        pieces = [tuple(text[at : at + GRAM]) for at in range(len(text) - GRAM + 1)]
        shares.append(len(set(pieces)) / len(pieces))
    return round(float(np.mean(shares)), 3)


if __name__ == "__main__":
    main()
