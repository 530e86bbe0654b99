"""The command as a process: quick help, the compilation cache, and how it ends."""

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jspec.checkpoints.fetch import cache_folder, fetch
from jspec.commands.options import TreeFlags
from jspec.trees import TreeConfig

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ("-m", "jspec", "generate", "--target")
LONG = ("--prompt", "a", "--max-new-tokens", "3000", "--ignore-eos", "--drafter", "none")


def test_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["jspec"] == "jspec.cli:main"


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["generate", "--help"]])
def test_help_and_version_need_no_jax(argv):
    code = (
        "import sys\nfrom jspec.cli import main\n"
        f"code = main({argv})\n"
        "heavy = {'jax', 'flax', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "jspec" in done.stdout


@pytest.mark.parametrize(
    "command", ["generate", "bench", "batch", "export", "tune-tree", "plan", "fetch"]
)
def test_help_has_examples(jspec_run, command):
    shown = jspec_run(command, "--help")
    assert f"Examples:\n  jspec {command} " in shown
    assert f"\n  {command} " in jspec_run("--help")


def test_help_names_the_defaults_of_trees(jspec_run):
    shown = " ".join(jspec_run("generate", "--help").replace("│", " ").split())
    for flag in ("num_steps", "topk", "num_nodes"):
        assert getattr(TreeFlags(), flag) is None  # so TreeConfig decides
        text = shown.split(f"--{flag.replace('_', '-')} INT")[1]
        assert f"(default: {getattr(TreeConfig(), flag)}" in text.split("--")[0]


def test_errors_go_to_stderr(spawn):
    process = spawn(*GENERATE, "nowhere", "--prompt", "a")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("jspec: error: no model 'nowhere'")
    assert err.count("\n") == 1


COUNTING = """
import sys
from collections import Counter
import jax
events = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.split("/")[-1]]))
from jspec.cli import main
code = main(sys.argv[1:])
print(events["cache_hits"], events["cache_misses"])
sys.exit(code)
"""


def test_second_process_starts_from_the_compilation_cache(spawn, model, tmp_path):
    def run():
        flags = ("--prompt", "a", "--json", "--drafter", "none")
        process = spawn("-c", COUNTING, *GENERATE[2:], model, *flags, cache=tmp_path)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        entry, counts = out.splitlines()
        return json.loads(entry)["token_ids"], *map(int, counts.split())

    first, _, misses = run()
    assert misses > 5
    assert (tmp_path / "compilation").is_dir()
    second, hits, misses = run()
    assert second == first
    assert misses == 0
    assert hits > 5


def test_interrupt_is_quiet(spawn, model):
    process = spawn(*GENERATE, model, *LONG)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")


def test_closed_pipe_is_quiet(spawn, model):
    process = spawn(*GENERATE, model, *LONG)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


def test_real_model(jspec_run, spawn):
    try:
        path = fetch("smollm2-135m", progress=False)
    except ValueError as error:
        pytest.skip(f"smollm2-135m cannot be fetched: {error}")
    assert jspec_run("fetch", "smollm2-135m").splitlines()[0] == str(path)
    # In its own process, as the compilation cache is a setting of the whole process.
    question = ("--prompt", "What is the capital of France?", "--max-new-tokens", "8", "--json")
    process = spawn(*GENERATE, "smollm2-135m", *question, cache=cache_folder())
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Paris" in json.loads(out)["text"]
