"""Batch jobs killed at random moments: `python benchmarks/serving_crashes.py [--kills 20]`.

One job answers a file in peace. Another, over the same file, is killed with SIGKILL at random
moments and resumed, until it was killed often enough and is left to finish. Every request has to be
answered once, with the text of the job that was left in peace.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jspec.commands.figures import dump_json, write_json

TOPICS = ("rivers", "bread", "trains", "the moon", "glass", "bees", "chess", "salt")


def job(options: argparse.Namespace, source: Path, out: Path, *more: str) -> subprocess.Popen:
    """`jspec batch` in a process of its own."""
    words = ["--target", options.target, "--drafter", options.drafter, "--slots", "8"]
    words += ["--capacity", "128", "--max-new-tokens", "32", "--input", str(source)]
    return subprocess.Popen(
        [sys.executable, "-m", "serve.batch", *words, "--output", str(out), *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def answers(out: Path) -> list[dict[str, Any]]:
    """Whole lines of an output; a torn last one is no answer."""
    if not out.exists():
        return []
    return [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]


def finish(process: subprocess.Popen) -> None:
    """Wait for a job that must end well."""
    _, said = process.communicate()
    if process.returncode:
        raise ValueError(f"the job ended with {process.returncode}: {said.decode()[-500:]}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        source, peace, out = (
            Path(name) / file for file in ("in.jsonl", "peace.jsonl", "out.jsonl")
        )
        lines = [
            {
                "id": f"r{n}",
                "prompt": f"{n}. Say something about {TOPICS[n % 8]}.",
                "temperature": 0.8 * (n % 2),
                "seed": n,
            }
            for n in range(options.requests)
        ]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        start = time.monotonic()
        finish(job(options, source, peace))
        whole = time.monotonic() - start
        kills, answered, early = 0, [], 0
        while kills < options.kills:
            process = job(options, source, out, "--resume")
            try:
                process.wait(rng.uniform(0.0, 2.5 * whole / options.kills + 8.0))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += 1
                answered.append(len(answers(out)))
                continue
            finish(process)
            early += 1  # done before it could be killed: begin anew
            if early > 5:
                raise ValueError("jobs end before they are killed; ask for more requests")
            out.unlink()
        finish(job(options, source, out, "--resume"))
        expected = {record["id"]: record["text"] for record in answers(peace)}
        found = [(record["id"], record["text"]) for record in answers(out)]
    figures = {
        "requests": options.requests,
        "kills": kills,
        "answered_at_each_kill": answered,
        "answered_once": len(found) == len(dict(found)) == options.requests,
        "same_texts": sum(expected[name] == text for name, text in found),
    }
    print(dump_json(figures))
    if options.json is not None:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
