"""CPU figures of the decoding engine, in one run: `python benchmarks/decode.py [--json OUT]`.

1. Plain decoding against transformers' `generate` (torch, float32), interleaved, same prompts.
2. A target pass over T nodes against a pass over one, interleaved.
3. n-gram drafting against plain on prompts that repeat themselves and on prompts that do not.
4. The machinery: simulated acceptance on a chain, so that stages can be told apart.

Every time is a median of interleaved runs; read the ratios, not the milliseconds.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from experiment import PROMPTS, facts, in_turns, verify_pass

import jspec
from jspec.commands.figures import dump_json, write_json
from jspec.commands.measure import Comparison, peak_memory
from jspec.sampling import SamplingParams
from jspec.targets import Target

WIDTHS = (1, 2, 4, 8, 16, 32)

_NOTE = (
    "The committee met on Tuesday to review the harbour plan. The harbour plan adds two piers and "
    "a new breakwater. The mayor said the harbour plan would cost nine million. The fishermen said "
    "the breakwater would protect their boats. The committee will vote on the harbour plan in June."
)
_CODE = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n\n"
    "    def is_empty(self):\n        return len(self.items) == 0\n"
)
REPETITIVE = {
    "summarise": f"Summarise this text, quoting its sentences:\n\n{_NOTE}",
    "edit": f"Repeat this text word for word, but write 'port' instead of 'harbour':\n\n{_NOTE}",
    "code": f"Add a docstring to every method and print the whole class again:\n\n{_CODE}",
    "copy": f"Copy this text exactly:\n\n{_NOTE}",
}
UNREPETITIVE = {name: PROMPTS[name] for name in ("story", "advice", "science", "travel")}


def against_transformers(target: Target, new_tokens: int, repeats: int) -> dict:
    """Tokens per second of whole generations, prefill included, on both sides."""
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return {"skipped": "torch is not installed"}
    model: Any = torch_copy(target, torch, LlamaConfig, LlamaForCausalLM)
    prompts = [
        target.tokenizer.encode_chat([{"role": "user", "content": text}])
        for text in UNREPETITIVE.values()
    ]
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    engine = jspec.Engine(target)

    def ours(prompt):
        return engine.generate([prompt], sampling)[0].token_ids

    def theirs(prompt):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        return out[0, len(prompt) :].tolist()

    times: dict[str, list[float]] = {"jspec": [], "transformers": []}
    same = 0
    for repeat in range(repeats + 1):
        for index, prompt in enumerate(prompts):
            ways = [("jspec", ours), ("transformers", theirs)]
            results = {}
            for name, way in ways if (repeat + index) % 2 else ways[::-1]:
                start = time.perf_counter()
                results[name] = way(prompt)
                if repeat:
                    times[name].append(time.perf_counter() - start)
            same += repeat == 0 and results["jspec"] == results["transformers"]
    rates = {name: new_tokens / median(seconds) for name, seconds in times.items()}
    ratio = median(t / j for t, j in zip(times["transformers"], times["jspec"]))
    return {
        "tokens_per_second": rates,
        "ratio": ratio,
        "identical": same,
        "compared": len(prompts),
        "torch_threads": torch.get_num_threads(),
    }


def torch_copy(target: Target, torch, config_class, model_class):
    """The same weights in transformers' own Llama."""
    config = target.config
    model = model_class(
        config_class(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope.theta,
            max_position_embeddings=config.max_context,
            tie_word_embeddings=True,
        )
    ).eval()
    model.generation_config.pad_token_id = 0
    params = target.params
    state = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["norm"]["weight"],
    }
    for index in range(config.num_layers):
        layer, name = params["layers"][index], f"model.layers.{index}"
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = np.asarray(layer["attention"]["qkv_proj"]["weight"][...])
        gate_up = np.asarray(layer["mlp"]["gate_up_proj"]["weight"][...])
        for part, rows in zip("qkv", np.split(qkv, [q, q + kv])):
            state[f"{name}.self_attn.{part}_proj.weight"] = rows
        for part, rows in zip(("gate", "up"), np.split(gate_up, 2)):
            state[f"{name}.mlp.{part}_proj.weight"] = rows
        state[f"{name}.self_attn.o_proj.weight"] = layer["attention"]["o_proj"]["weight"]
        state[f"{name}.mlp.down_proj.weight"] = layer["mlp"]["down_proj"]["weight"]
        state[f"{name}.input_layernorm.weight"] = layer["input_norm"]["weight"]
        state[f"{name}.post_attention_layernorm.weight"] = layer["post_attention_norm"]["weight"]
    tensors = {
        name: torch.tensor(np.asarray(value[...] if hasattr(value, "get_value") else value))
        for name, value in state.items()
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    return model


def pass_widths(target: Target, repeats: int, capacity: int = 512, length: int = 400) -> dict:
    """One pass and the argmax of its logits, at every width, in turns."""
    times = in_turns(
        {
            width: verify_pass(target, nodes=width, capacity=capacity, length=length)
            for width in WIDTHS
        },
        repeats,
    )
    return {
        "capacity": capacity,
        "length": length,
        "ms": {width: 1e3 * median(times[width]) for width in WIDTHS},
        "min_ms": {width: 1e3 * min(times[width]) for width in WIDTHS},
        "ratio": {width: median(times[width]) / median(times[1]) for width in WIDTHS},
        "min_ratio": {width: min(times[width]) / min(times[1]) for width in WIDTHS},
    }


def speculation(target: Target, prompts: dict[str, str], new_tokens: int, repeats: int, **settings):
    """Plain against speculative on chat prompts; the figures of `jspec bench`."""
    plain = jspec.Engine(target, batch_size=1)
    speculative = jspec.Engine(target, "ngram", batch_size=1, **settings)
    ids = [speculative.encode([{"role": "user", "content": text}]) for text in prompts.values()]
    comparison = Comparison(plain, speculative, ids, SamplingParams(max_new_tokens=new_tokens), 1)
    comparison.measure(repeats, lambda stage, share: None)
    return comparison.figures()


def main() -> None:
    """Run everything and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--only", nargs="*", help="parts to run; default all", metavar="PART")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = jspec.load_target(args.target)
    tree = jspec.TreeConfig(num_steps=7, topk=2, num_nodes=8)
    chain = jspec.TreeConfig(num_steps=7, topk=1)
    few = max(args.repeats // 2, 1)
    parts = {
        "pass_widths": lambda: pass_widths(target, 4 * args.repeats),
        "against_transformers": lambda: against_transformers(target, 64, few),
        "repetitive": lambda: speculation(target, REPETITIVE, args.new_tokens, few, tree=tree),
        "unrepetitive": lambda: speculation(target, UNREPETITIVE, args.new_tokens, few, tree=tree),
        "machinery": lambda: speculation(
            target,
            {"story": UNREPETITIVE["story"]},
            args.new_tokens,
            args.repeats,
            tree=chain,
            simulate_accept_length=3.0,
        ),
    }
    figures: dict[str, Any] = facts()
    unknown = [name for name in args.only or () if name not in parts]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; expected {', '.join(parts)}")
    for name in args.only or parts:
        figures[name] = parts[name]()
        figures["peak_memory"] = peak_memory()
        print(name, dump_json(figures[name]), flush=True)
        if args.json:  # after every part, so that an interrupted run keeps what it has
            write_json(args.json, figures)


if __name__ == "__main__":
    main()
