"""Batch throughput of the server: `python benchmarks/serving.py [--target MODEL] [--json OUT]`.

For every number of slots, plain and speculative: tokens per second of all requests together
(prefill included, compilation not), τ, occupancy, and the share of the time in which the device
had nothing to do because the host had not enqueued it yet. `--many N` instead sends N short
requests and reports memory, free slots and recompilations before and after.
"""

import argparse
import resource
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

import jspec
import serve
from jspec.commands.figures import dump_json, write_json
from jspec.drafters.shipped import default_drafter
from serve.slots import Report, SlotTable

TOPICS = ("rivers", "bread", "trains", "the moon", "glass", "bees", "chess", "salt")


class IdleClock:
    """Times the gaps between the end of one piece and the moment the next was enqueued.

    A thread waits for every piece and notes when it ended; a piece that had not ended when the next
    one was enqueued left no gap.
    """

    def __init__(self, table: SlotTable):
        self.idle, self._run = 0.0, table.run
        self._watcher = ThreadPoolExecutor(1)
        self._end: Future[float] | None = None
        table.run = self._timed  # type: ignore[method-assign]

    def _timed(self, rounds: int, *, sampled: bool) -> Report:
        report = self._run(rounds, sampled=sampled)
        enqueued = time.perf_counter()
        if self._end is not None and self._end.done():
            self.idle += max(0.0, enqueued - self._end.result())
        self._end = self._watcher.submit(_end_of, report.lengths)
        return report


def _end_of(array: jax.Array) -> float:
    """When it was there."""
    array.block_until_ready()
    return time.perf_counter()


def throughput(engine: jspec.Engine, slots: int, prompts: list, new_tokens: int) -> dict[str, Any]:
    """One server, warmed up with the same prompts."""
    asked = jspec.SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    longest = max(len(engine.encode(prompt)) for prompt in prompts)
    with serve.Server(engine, slots=slots, capacity=longest + new_tokens) as server:
        for prompt in prompts:
            server.submit(prompt, asked, incremental=False)
        while not server.idle or server.counters.requests < len(prompts):
            time.sleep(0.05)
        clock, before = IdleClock(server._table), vars(server.counters).copy()
        start = time.perf_counter()
        handles = [server.submit(prompt, asked, incremental=False) for prompt in prompts]
        outputs = [handle.result() for handle in handles]
        seconds = time.perf_counter() - start
    done = {name: value - before[name] for name, value in vars(server.counters).items()}
    tokens = sum(len(output.token_ids) for output in outputs)
    return {
        "tokens_per_second": tokens / seconds,
        "accept_length": (tokens - len(outputs)) / max(1, done["rounds"]),
        "occupancy": done["seated"] / (done["pieces"] * slots),
        "device_idle_share": clock.idle / seconds,
    }


def many(engine: jspec.Engine, count: int) -> dict[str, Any]:
    """Short requests: what grows, what stays taken, what recompiles."""
    asked = jspec.SamplingParams(max_new_tokens=4)
    figures: dict[str, Any] = {"requests": count}
    with serve.Server(engine, slots=16, capacity=128) as server:
        for wave, size in enumerate((count // 10, count - count // 10)):
            handles = [server.submit([1 + i % 30], asked, incremental=False) for i in range(size)]
            for handle in handles:
                handle.result()
            del handles
            figures[f"wave_{wave}"] = {
                "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "live_arrays": len(jax.live_arrays()),
                "traces": sum(engine.traces.values()),
                "idle": server.idle,
            }
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8, 24])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--many", type=int, help="send this many short requests instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target = jspec.load_target(options.target)
    figures: dict[str, Any] = {"target": options.target}
    if options.many:
        figures["many"] = many(jspec.Engine(target), options.many)
    else:
        prompts = [
            target.tokenizer.encode(f"Write {3 + n % 4} sentences about {TOPICS[n % len(TOPICS)]}.")
            for n in range(options.requests)
        ]
        head = jspec.load_drafter(default_drafter(options.target), target, probe=False)
        ngram = jspec.load_drafter("ngram", target)
        ways = {
            "plain": (None, None),
            "ngram, chain of 3": (ngram, jspec.TreeConfig(num_steps=3, topk=1)),
            f"{head.name}, chain of 1": (head, jspec.TreeConfig(num_steps=1, topk=1)),
            f"{head.name}, chain of 3": (head, jspec.TreeConfig(num_steps=3, topk=1)),
            f"{head.name}, 8 nodes": (head, jspec.TreeConfig(num_steps=5, topk=4, num_nodes=8)),
        }
        for slots in options.slots:
            for name, (drafter, tree) in ways.items():
                engine = jspec.Engine(target, drafter, tree=tree)
                key = f"{name}, {slots} slots"
                figures[key] = throughput(engine, slots, prompts, options.new_tokens)
                print(key, figures[key], flush=True)
    print(dump_json(figures))
    if options.json is not None:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
