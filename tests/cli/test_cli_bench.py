"""`jspec bench` on a tiny model: the figures are there, and they agree with one another."""

import json

import pytest


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ("abcabcabcabc", "no repetition", "xyxyxyxy", "once more")
    path.write_text("\n".join(json.dumps({"id": t[:2], "prompt": t}) for t in texts))
    return str(path)


@pytest.fixture
def bench(jspec_run, model, prompts, tmp_path):
    def run(*flags: str) -> tuple[dict, str]:
        out = tmp_path / "out.json"
        shown = jspec_run(
            "bench", "--target", model, "--prompts", prompts, "--no-compilation-cache",
            "--ignore-eos", "--json", str(out), *flags,
        )  # fmt: skip
        assert [path.name for path in tmp_path.iterdir()] == ["out.json"]  # nothing half-written
        return json.loads(out.read_text()), shown

    return run


def _check_arithmetic(figures):
    plain, speculative = figures["plain"], figures["speculative"]
    ratio = speculative["tokens_per_second"] / plain["tokens_per_second"]
    assert figures["speedup"] == pytest.approx(ratio)
    stages = figures["round_ms"]
    assert list(stages) == ["draft", "verify", "accept", "commit", "extend", "round"]
    passes = stages["draft"] + stages["verify"] + stages["extend"]
    per_round = speculative["decoded_tokens"] / speculative["rounds"]
    plain_ms = plain["round_ms"]["round"] * plain["rounds"] / plain["decoded_tokens"]
    # A model this small may be lost in the noise of calling it, and then there is no figure.
    if passes and plain_ms:
        assert figures["ideal_speedup"] == pytest.approx(per_round * plain_ms / passes)
        assert figures["efficiency"] == pytest.approx(figures["speedup"] / figures["ideal_speedup"])
    if stages["round"]:
        assert figures["machinery_share"] == pytest.approx(1 - passes / stages["round"])


def test_one_at_a_time(bench):
    figures, shown = bench("--max-new-tokens", "16", "--repeats", "2")
    _check_arithmetic(figures)
    assert (figures["identical"], figures["compared"]) == (4, 4)
    assert figures["identical_tokens"] == figures["compared_tokens"] == 4 * 16
    speculative = figures["speculative"]
    assert figures["plain"]["rounds"] == figures["plain"]["decoded_tokens"] == 4 * 15
    assert speculative["accept_length"] == pytest.approx(4 * 15 / speculative["rounds"])
    assert len(speculative["acceptance_by_depth"]) == 5
    # The n-gram drafter abstains at times; both kinds of rounds are counted and timed.
    counts, times = speculative["rounds_by_width"], speculative["verify_ms_by_width"]
    assert list(counts) == list(times) == ["1", "8"]
    assert sum(counts.values()) == speculative["rounds"]
    mean = sum(counts[width] * times[width] for width in counts) / speculative["rounds"]
    assert figures["round_ms"]["verify"] == pytest.approx(mean)
    assert [entry["ids"] for entry in figures["prompts"]] == [["ab"], ["no"], ["xy"], ["on"]]
    assert figures["peak_memory_bytes"]["process"] > 1 << 20
    assert figures["settings"]["num_nodes"] == 8
    assert figures["machine"]["jax"]
    for word in ("plain", "speculative", "speedup", "identical: 4 of 4 texts", "machinery"):
        assert word in shown


def test_simulated_and_side_by_side(bench):
    flags = ("--max-new-tokens", "16", "--repeats", "1", "--batch", "3")
    figures, shown = bench(*flags, "--simulate-accept-length", "2.5", "--num-nodes", "6")
    _check_arithmetic(figures)
    assert figures["simulated"] is True
    assert figures["compared"] == 0
    assert "not real text" in shown
    speculative = figures["speculative"]
    assert speculative["accept_length"] == pytest.approx(2.5)
    assert speculative["rounds_by_width"] == {"6": 12}  # two groups of 6 rounds
    assert speculative["decoded_tokens"] == 4 * 15
    assert figures["plain"]["rounds"] == 2 * 15
    assert [entry["ids"] for entry in figures["prompts"]] == [["ab", "no", "xy"], ["on"]]


def test_nothing_to_decode_is_null(bench):
    figures, shown = bench("--max-new-tokens", "1", "--repeats", "1", "--limit", "1")
    assert figures["speedup"] is None
    assert figures["speculative"]["accept_length"] is None
    assert "n/a" in shown


def test_built_in_prompts_and_json_on_stdout(jspec_run, model):
    out = jspec_run(
        "bench", "--target", model, "--no-compilation-cache", "--limit", "1", "--repeats", "1",
        "--max-new-tokens", "1", "--json", "-",
    )  # fmt: skip
    assert json.loads(out)["settings"]["prompts"] == "built-in"
