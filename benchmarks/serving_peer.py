"""Batch throughput beside vLLM on the CPU, interleaved in one run.

python benchmarks/serving_peer.py --target FOLDER --vllm-python ENV/bin/python [--json OUT]

FOLDER: safetensors with tokenizer, which both read. ENV: an environment with vLLM's CPU build. Both
get the same token ids, greedy, float32, a fixed number of tokens each, all at once; compilation and
warm-up do not count. Each repeat asks both for everything, one after the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOPICS = ("rivers", "bread", "trains", "the moon", "glass", "bees", "chess", "salt")


def peer(folder: str) -> None:
    """The other process: prompts as a line of JSON, then a line of figures for every line read."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    prompts, new_tokens = json.loads(sys.stdin.readline())
    llm = LLM(folder, dtype="float32", max_model_len=1024, enforce_eager=True)
    asked = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    llm.generate(given, asked, use_tqdm=False)
    print("READY", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        outputs = llm.generate(given, asked, use_tqdm=False)
        seconds = time.perf_counter() - start
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        print("RUN", json.dumps([seconds, texts]), flush=True)


class Peer:
    """vLLM in a process of its own."""

    def __init__(self, python: Path, folder: Path, prompts: list[list[int]], new_tokens: int):
        quiet = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
        }
        self._process = subprocess.Popen(
            [str(python), "-P", __file__, "--peer", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | quiet,
        )
        self._tell(json.dumps([prompts, new_tokens]))
        self._read("READY")

    def run(self) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of every answer."""
        self._tell("go")
        seconds, texts = json.loads(self._read("RUN"))
        return seconds, texts

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise ValueError(f"the other process ended with code {self._process.wait()}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", type=Path)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer(options.peer)
        return
    if options.target is None or options.vllm_python is None:
        parser.error("--target and --vllm-python are needed")

    import jspec
    import serve
    from jspec.commands.figures import dump_json, write_json

    target = jspec.load_target(options.target, dtype="float32")
    prompts = [
        target.tokenizer.encode_chat(
            [{"role": "user", "content": f"Write {3 + n % 4} sentences about {TOPICS[n % 8]}."}]
        )
        for n in range(options.requests)
    ]
    asked = jspec.SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=True)
    engine = jspec.Engine(target, options.drafter)
    capacity = max(map(len, prompts)) + options.new_tokens
    other = Peer(options.vllm_python, options.target, prompts, options.new_tokens)
    ours: list[float] = []
    theirs: list[float] = []
    same = 0
    with serve.Server(engine, slots=options.requests, capacity=capacity) as server:

        def run() -> tuple[float, list[list[int]]]:
            start = time.perf_counter()
            handles = [server.submit(ids, asked, incremental=False) for ids in prompts]
            texts = [list(handle.result().token_ids) for handle in handles]
            return time.perf_counter() - start, texts

        run()
        for _ in range(options.repeats):
            seconds, texts = run()
            ours.append(seconds)
            seconds, others = other.run()
            theirs.append(seconds)
            same = sum(a == b for a, b in zip(texts, others))
    other.close()
    tokens = options.requests * options.new_tokens
    figures: dict[str, Any] = {
        "requests": options.requests,
        "new_tokens": options.new_tokens,
        "drafter": options.drafter,
        "jspec_tokens_per_second": [tokens / x for x in ours],
        "vllm_tokens_per_second": [tokens / x for x in theirs],
        "ratio": statistics.median(b / a for a, b in zip(ours, theirs)),
        "same_texts": same,
    }
    print(dump_json(figures))
    if options.json is not None:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
