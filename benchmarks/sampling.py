"""What sampling costs on a CPU, in one run: `python benchmarks/sampling.py [--json OUT]`.

1. Logits processing and verification of T nodes, beside the verify pass that gave their logits, for
   requests that ask more and more and for every rule. The draft is the dearest there is, a chain
   that is accepted whole: a walk that ends sooner processes as many nodes less. All programs take
   turns; read the ratios.
2. What a drawn draft is worth: mean accept lengths at temperature 1 of the rules that know what it
   was drawn from and of the one that does not, with the same drafter, in real generations.
3. The same for a drafter that draws from the target's own distribution with noise on its logits.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import jspec
from jspec.commands.figures import dump_json, write_json
from jspec.commands.prompts import BUILT_IN
from jspec.drafters import Drafter, Proposal
from jspec.sampling import (
    History,
    NodeLogits,
    SamplingParams,
    Shaping,
    branch_tokens,
    choose_tokens,
    likeliest,
)
from jspec.targets import Prefix, Target
from jspec.targets.masks import causal_bits
from jspec.trees import build, cartesian, chain
from jspec.verify import RULES, Greedy, Slots

TEXT = (
    "Speculative decoding drafts several tokens and verifies them in one pass of the target. The "
    "cost of a pass is the time to read its weights, so a few more tokens come almost for free. "
)
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
DRAWN = {"draft_temperature": 1.0}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties, bias": {**PENALTIES, "logit_bias": {3: -1.0}},
    "temperature 1": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-p 0.95 at temperature 2": {"temperature": 2.0, "top_p": 0.95},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "everything": {
        "temperature": 1.0,
        **{"top_k": 50, "top_p": 0.9, "min_p": 0.05, "logit_bias": {3: -1.0}},
        **PENALTIES,
    },
}


def costs(target: Target, nodes: int, repeats: int) -> dict:
    """Milliseconds of the pass, and of processing and verifying what it gave."""
    ids = target.tokenizer.encode(TEXT * 8)[: 256 + nodes]
    length = len(ids) - nodes
    cache = target.empty_cache(1, 512)
    tokens = jnp.asarray([ids], jnp.int32)
    lengths = jnp.full((1,), length, jnp.int32)
    places = jnp.arange(len(ids), dtype=jnp.int32)[None]
    params = target.params

    def prefill(params, cache):
        passed = target.forward(params, tokens[:, :length], places[:, :length])
        path = jnp.arange(length, dtype=jnp.int32)[None]
        return cache.commit(passed.new, path, lengths, jnp.zeros((1,), jnp.int32))

    cache = jax.jit(prefill)(params, cache)
    drafted = tokens[:, length:]

    @jax.jit
    def verify(params, cache):
        prefix = Prefix(cache, lengths)
        passed = target.forward(params, drafted, places[:, length:], prefix, causal_bits(nodes))
        return target.logits(params, passed.hidden)

    logits = verify(params, cache)
    vocabulary = target.config.vocab_size
    history = History.of_prompts(tokens[:, :length], lengths, vocabulary)

    def program(rule, asked: SamplingParams) -> Callable:
        sampled = asked.temperature > 0
        shaping = Shaping.of([asked], 1, vocabulary)
        slots = Slots(jnp.full((1,), asked.temperature), jnp.zeros((1, 2), jnp.uint32), lengths)

        def shaped(logits, history, tree):
            branch = branch_tokens(tree, nodes - 1) if shaping.looks_back else None
            return NodeLogits(
                logits, slots.temperature, places[:, :nodes], shaping, history, branch, sampled
            )

        @jax.jit
        def next_token(logits, history, proposal):
            rows = shaped(logits, history, proposal.tree).every()
            at = lengths + 1 + proposal.tree.depth
            chosen = choose_tokens(rows, slots.temperature, slots.keys, at, sampled=sampled)
            return chosen if rule.draws else likeliest(rows)

        @jax.jit
        def run(logits, history, proposal):
            rows = shaped(logits, history, proposal.tree)
            return rule.walk(rows, proposal, slots, max_path=nodes)

        # The dearest draft: all of it is accepted, so that every node is visited. A penalty looks
        # at the nodes above, so a node's token is right once theirs are.
        proposal = chain_of(drafted, logits)
        for _ in range(nodes - 1):
            chosen = next_token(logits, history, proposal)
            proposal = chain_of(jnp.concatenate([drafted[:, :1], chosen[:, :-1]], axis=1), logits)
        assert int(run(logits, history, proposal).length[0]) == nodes, (rule.name, asked)
        return lambda: run(logits, history, proposal)

    programs: dict[str, Callable] = {"pass": lambda: verify(params, cache)}
    for name, asked in ASKED.items():
        params_ = SamplingParams(**asked)
        rule = RULES["target-sampling"]() if params_.temperature > 0 else Greedy()
        programs[name] = program(rule, params_)
    warm = SamplingParams(temperature=1.0)
    for name in ("rejection", "block", "typical", "thresholds"):
        programs[name] = program(RULES[name](), warm)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats + 2):
        for name, run in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if repeat > 1:
                times[name].append(time.perf_counter() - start)
    whole = median(times["pass"])
    return {
        "nodes": nodes,
        "vocabulary": vocabulary,
        "ms": {name: 1e3 * median(values) for name, values in times.items()},
        "share_of_pass": {name: median(v) / whole for name, v in times.items() if name != "pass"},
    }


def chain_of(tokens: Array, logits: Array) -> Proposal:
    """A chain [1, T], as if drawn from the target's own distributions."""
    parents = jnp.arange(-1, tokens.shape[1] - 1, dtype=jnp.int32)[None]
    tree = build(tokens, parents, jnp.ones(tokens.shape, bool))
    return Proposal(tree, (), jax.nn.softmax(logits))


def drawn_drafts(target: Target, drafter: Drafter, new_tokens: int, seeds: int) -> dict:
    """Mean accept lengths over built-in prompts and seeds, with their standard errors."""
    shapes = {"chain of 4": chain(4), "tree of 15": cartesian([2, 2, 1, 1])}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("likeliest tokens, target-sampling", {}),
        ("drawn tokens, target-sampling", {"verification": "target-sampling", **DRAWN}),
        ("drawn tokens, rejection", {"verification": "rejection", **DRAWN}),
        ("drawn tokens, block", {"verification": "block", **DRAWN}),
    ]
    prompts = [[{"role": "user", "content": text}] for text in BUILT_IN] * seeds
    sampling = [
        SamplingParams(temperature=1.0, seed=seed, max_new_tokens=new_tokens, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    found: dict[str, Any] = {"requests": len(prompts), "new_tokens": new_tokens}
    for shape, tree in shapes.items():
        found[shape] = {}
        for name, options in ways:
            if tree.topk > 1 and "block" in name:
                continue
            engine = jspec.Engine(target, drafter, tree=tree, **options)
            outputs = engine.generate(prompts, sampling)
            rounds = np.asarray([output.stats.rounds for output in outputs])
            mean = len(outputs) * (new_tokens - 1) / rounds.sum()
            # Of a ratio of means, to first order.
            error = mean * np.std(rounds) / np.mean(rounds) / np.sqrt(len(outputs))
            found[shape][name] = {"accept_length": float(mean), "standard_error": float(error)}
            print(shape, name, found[shape][name], flush=True)
    return found


def worth(vocabulary: int = 256, steps: int = 4, noise: float = 1.0, chains: int = 1000) -> dict:
    """Mean accept lengths on chains drawn from q, where p and q are the same up to noise."""
    rng = np.random.default_rng(0)
    row = 2.5 * rng.standard_normal(vocabulary)
    logits = row + noise * rng.standard_normal((steps + 1, vocabulary))
    q = np.exp(row - row.max())
    q /= q.sum()
    batch = (chains, steps + 1)
    drawn = rng.choice(vocabulary, batch, p=q)
    likely = np.full(batch, row.argmax())
    parents = jnp.broadcast_to(jnp.arange(-1, steps, dtype=jnp.int32), batch)
    keys = np.stack([np.zeros(chains), np.arange(chains)], axis=1).astype(np.uint32)
    slots = Slots(jnp.ones((chains,)), jnp.asarray(keys), jnp.zeros((chains,), jnp.int32))
    after = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (*batch, vocabulary))
    before = jnp.broadcast_to(jnp.asarray(q, jnp.float32), (*batch, vocabulary))
    places = jnp.zeros(batch, jnp.int32)
    found = {}
    for name, rule, tokens in (
        ("likeliest tokens, target-sampling", "target-sampling", likely),
        ("drawn tokens, target-sampling", "target-sampling", drawn),
        ("drawn tokens, rejection", "rejection", drawn),
        ("drawn tokens, block", "block", drawn),
    ):
        rule = RULES[rule]()

        @jax.jit
        def run(tokens, after, before, rule=rule):
            tree = build(tokens, parents, jnp.ones(batch, bool))
            proposal = Proposal(tree, (), before)
            logits = NodeLogits(after, slots.temperature, places)
            return rule.walk(logits, proposal, slots, max_path=steps + 1).length

        found[name] = float(np.mean(run(jnp.asarray(tokens, jnp.int32), after, before)))
    return {"vocabulary": vocabulary, "num_steps": steps, "accept_length": found}


def main() -> None:
    """Run everything and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--drafter", default="smollm2-135m-eagle3", help="one that draws")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=8, help="of each built-in prompt")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = jspec.load_target(args.target)
    drafter = jspec.load_drafter(args.drafter, target)
    figures: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "target": args.target,
        "drafter": drafter.description,
    }
    stages: dict[str, Callable[[], dict]] = {
        "costs": lambda: costs(target, args.nodes, args.repeats),
        "drawn_drafts": lambda: drawn_drafts(target, drafter, args.new_tokens, args.seeds),
        "noisy_drafts": worth,
    }
    for name, stage in stages.items():
        # Processes that wanted a core over the minute before: 0 is an idle machine.
        before = os.getloadavg()[0]
        figures[name] = {"load_before": before, **stage()}
        print(name, dump_json(figures[name]), flush=True)
        if args.json:
            write_json(args.json, figures)


if __name__ == "__main__":
    main()
