"""A target and its prediction module out of nothing: `python benchmarks/mtp_from_scratch.py DIR`.

Trains a small DeepSeek-V3-shaped model (latent attention, experts, one module) on the sources of
Python's standard library, byte by byte, for a few minutes; writes an ordinary checkpoint to DIR;
and drafts with the module on files it has not seen. `jspec generate --target DIR --drafter mtp`
runs the same model.
"""

import argparse
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jspec
from jspec.commands.figures import dump_json, write_json
from jspec.drafters.mtp_export import write_mtp
from jspec.targets import config_from_hf, random_target
from jspec.targets.mtp import FAMILIES, MTPModule
from train.objectives.mtp import MTPObjective, mtp_loss

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
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
FAMILY = FAMILIES["deepseek_v3"]
WIDTH, BATCH = 128, 8
"""Bytes a text, texts a step."""

PROMPT, NEW, PROMPTS = 64, 64, 16


def main() -> None:
    """Train, write, draft, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--minutes", type=float, default=8.0, help="stop training after this long")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    training, held_out = corpus()
    target, module, figures = train(training, args.steps, args.learning_rate, args.minutes)
    write_mtp(target, [module], args.out, public=PUBLIC)
    write_tokenizer(args.out)
    figures |= draft(args.out, held_out)
    print(dump_json(figures))
    if args.json:
        write_json(args.json, figures)


def corpus() -> tuple[np.ndarray, list[bytes]]:
    """The standard library's modules as one array of bytes, and the files left out of it."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_bytes() for file in files]
    held_out = [text for text in texts[::12] if len(text) > 4 * PROMPT]
    kept = [text for index, text in enumerate(texts) if index % 12]
    return np.frombuffer(b"".join(kept), np.uint8), held_out


def train(text: np.ndarray, steps: int, learning_rate: float, minutes: float):
    """The trained target and module, and what training looked like."""
    config = config_from_hf(PUBLIC)
    target = random_target(config)
    params = jax.tree.map(jnp.asarray, target.params)
    for path, variable in nnx.to_flat_state(params):
        if path[-1] == "correction":
            variable[...] = jnp.zeros_like(variable[...])
    module = fresh_module(config)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, 50, steps, learning_rate / 20)
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01)
    )
    loss = partial(whole_loss, target, MTPObjective())

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(trained, state, tokens):
        (_, seen), grads = jax.value_and_grad(loss, has_aux=True)(trained, tokens)
        updates, state = optimiser.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, seen

    trained = (params, module)
    state = optimiser.init(trained)
    rng, start, cpu = np.random.default_rng(0), time.perf_counter(), time.process_time()
    recent: list[Any] = []
    done = 0
    while done < steps and time.perf_counter() - start < 60 * minutes:
        places = rng.integers(0, len(text) - WIDTH, BATCH)
        tokens = np.stack([text[at : at + WIDTH] for at in places]).astype(np.int32)
        trained, state, seen = step(trained, state, jnp.asarray(tokens))
        recent = [*recent[-49:], seen]
        done += 1
        if done % 100 == 0:
            losses = np.mean([np.asarray(one.losses) for one in recent], axis=0)
            print(f"step {done}: nats {np.round(losses, 3)}", flush=True)
    losses, hits = (np.mean([np.asarray(one[i]) for one in recent], axis=0) for i in (0, 1))
    target = type(target)(
        name="from-scratch", config=config, graphdef=target.graphdef, params=trained[0]
    )
    figures = {
        "parameters": target.num_params,
        "module_parameters": sum(leaf.size for leaf in jax.tree.leaves(trained[1])),
        "steps": done,
        "tokens": done * BATCH * WIDTH,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "nats": [round(float(x), 3) for x in losses],
        "hits": [round(float(x), 3) for x in hits],
    }
    return target, trained[1], figures


def whole_loss(target, objective: MTPObjective, trained, tokens):
    """`mtp_loss` of (target parameters, module parameters)."""
    params, module = trained
    return mtp_loss(target, params, module, FAMILY, tokens, objective)


def fresh_module(config):
    """Random parameters of the usual scale."""
    shapes = nnx.state(nnx.eval_shape(lambda: MTPModule(config, FAMILY, dtype=jnp.float32)))
    rng = np.random.default_rng(1)

    def draw(path, variable):
        if "norm" in str(path[-2:]) or path[-1] == "correction":
            value = np.full(variable.shape, path[-1] != "correction")
        else:
            value = rng.standard_normal(variable.shape) / np.sqrt(variable.shape[-1])
        return variable.replace(jnp.asarray(value, variable.dtype))

    return nnx.from_flat_state((path, draw(path, leaf)) for path, leaf in nnx.to_flat_state(shapes))


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
    prompts = []
    for index in range(PROMPTS):
        text = held_out[index % len(held_out)]
        at = int(rng.integers(0, len(text) - PROMPT))
        prompts.append(list(text[at : at + PROMPT]))
    plain = jspec.Engine(target, batch_size=PROMPTS)
    engines = {
        steps: jspec.Engine(
            target, drafter, tree=jspec.TreeConfig(num_steps=steps, topk=1), batch_size=PROMPTS
        )
        for steps in (1, 2, 3)
    }
    figures: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        sampling = [
            jspec.SamplingParams(max_new_tokens=NEW, temperature=temperature, seed=seed)
            for seed in range(PROMPTS)
        ]
        found: dict[str, Any] = {}
        for steps, engine in engines.items():
            outputs = engine.generate(prompts, sampling)
            rounds = sum(len(output.stats.accept_lengths) for output in outputs)
            emitted = sum(sum(output.stats.accept_lengths) for output in outputs)
            found[f"chain_{steps}"] = round(emitted / rounds, 3)
            if temperature == 0.0:
                want = plain.generate(prompts, sampling)
                same = sum(a.token_ids == b.token_ids for a, b in zip(outputs, want))
                found[f"texts_as_plain_{steps}"] = f"{same} of {PROMPTS}"
            else:
                found["sample"] = bytes(outputs[0].token_ids).decode("utf-8", "replace")
        figures[f"tau_at_temperature_{temperature:.0f}"] = found
    return figures


if __name__ == "__main__":
    main()
