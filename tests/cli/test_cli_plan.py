"""`jspec plan`: on paper without a model, and measured on a tiny one."""

import json

import pytest

PAPER = ("plan", "--target", "llama-3-8b", "--drafter", "eagle3", "--hardware", "h100")
MEASURED = ("plan", "--target", "no such model", "--drafter", "ngram", "--measure")


def test_on_paper(jspec_run, tmp_path):
    out = tmp_path / "plan.json"
    shown = jspec_run(*PAPER, "--context", "0", "--acceptance", "0.8,0.7,0.6", "--json", str(out))
    figures = json.loads(out.read_text())
    settings, best = figures["settings"], figures["best"]
    assert settings["hardware"]["source"]
    assert figures["acceptance"]["by_depth"] == [0.8, 0.7, 0.6]
    assert best == figures["options"][0]
    assert max(one["num_steps"] for one in figures["options"]) == 3
    for one in figures["options"]:
        assert one["speedup"] <= best["speedup"]
        parts = one["draft_seconds"] + one["verify_seconds"] + one["rest_seconds"]
        assert one["round_seconds"] == pytest.approx(parts)
        assert one["tokens_per_second"] == pytest.approx(one["accept_length"] / parts)
        plain = figures["plain_tokens_per_second"]
        assert one["speedup"] == pytest.approx(one["tokens_per_second"] / plain)
    assert figures["plain_tokens_per_second"] == pytest.approx(223.2, abs=0.1)  # 15.01 GB
    ((first, last),) = figures["paying_batches"]
    assert (first, last + 1) == (1, figures["break_even_batch"])
    assert f"best: --num-steps {best['num_steps']} --topk {best['topk']}" in shown
    assert "the ridge is 295: memory-bound" in shown
    assert f"break-even: batch {last + 1}; a tree pays at 1 to {last}" in shown
    assert "assumed" not in shown


def test_rows_and_stdout(jspec_run):
    rows = jspec_run(*PAPER, "--rows", "2", "--topk", "1", "--num-steps", "2,4")
    assert rows.count("\n") == 12
    assert "acceptance is assumed" in rows
    figures = json.loads(jspec_run(*PAPER, "--topk", "1", "--num-steps", "2,4", "--json", "-"))
    assert {one["num_nodes"] for one in figures["options"]} == {3, 5}
    assert figures["acceptance"]["assumed"] is True


def test_batch_devices_and_a_small_model(jspec_run, tmp_path, write_model):
    big = ("--target", "llama-3.3-70b", "--drafter", "llama-3.2-1b", "--hardware", "h200")
    figures = json.loads(jspec_run("plan", *big, "--devices", "2", "--batch", "64", "--json", "-"))
    assert figures["settings"]["hardware"]["name"] == "2 x h200"
    assert figures["settings"]["batch"] == 64
    # Shapes of any folder with a config, whose weights are not read.
    folder = write_model(tmp_path / "own")
    (folder / "model.safetensors").unlink()
    own = ("plan", "--target", str(folder), "--drafter", "medusa", "--hardware", "a100")
    figures = json.loads(jspec_run(*own, "--json", "-"))
    assert max(one["num_steps"] for one in figures["options"]) == 4


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--hardware", "abacus"), "hardware 'abacus'; expected a100, h100"),
        (("--target", "gpt-9"), "no such model 'gpt-9'; expected llama-3-8b"),
        (("--target", "llama-3.3-70b"), "h100 has 80 GB; take more devices"),
        (("--drafter", "eagle9"), "drafter 'eagle9': expected eagle, eagle3"),
        (("--drafter", "qwen3-0.6b"), "take one of its family"),
        (("--dtype", "int4"), "dtype='int4'; expected float8, bfloat16, float32"),
        (("--hardware", "a100", "--dtype", "float8"), "a100 has no float8 figure"),
        (("--devices", "0"), "devices=0; expected at least 1"),
        (("--batch", "0"), "--batch 0; expected at least 1"),
        (("--context", "-1"), "--context -1; expected at least 0"),
        (("--draft-vocab", "0"), "draft_vocab=0; expected 1 to"),
        (("--acceptance", "0.7,x"), "--acceptance 0.7,x; expected numbers separated by commas"),
        (("--acceptance", "0.7,1.7"), "acceptance 1.7 at depth 2; expected 0 to 1"),
        (("--siblings", "0.7,0.7"), "sum to at most 1"),
        (("--siblings", "0.7", "--topk", "4"), "--topk 4; acceptance is known for 2 children"),
        (("--acceptance", "0.7", "--num-steps", "2"), "--num-steps 2; drafter and acceptance"),
        (("--topk", "0"), "--topk 0; expected numbers of at least 1"),
        (("--topk", "2", "--num-nodes", "99", "--num-steps", "1"), "no such tree"),
        (("--rows", "0"), "--rows 0; expected at least 1"),
        (("--json", "absent/out.json"), "the folder absent does not exist"),
        (("--repeats", "2"), "--repeats says how to measure; add --measure"),
        (("--chat",), "--chat and --no-chat are for --measure"),
    ],
)
def test_plans_on_paper_that_cannot_be(jspec_fails, flags, says):
    given = {flag for flag in flags if flag.startswith("--")}
    pairs = zip(PAPER[1::2], PAPER[2::2])
    base = [word for pair in pairs if pair[0] not in given for word in pair]
    assert says in jspec_fails("plan", *base, *flags)


def test_paper_needs_hardware(jspec_fails):
    assert "--hardware NAME is missing" in jspec_fails(*PAPER[:5])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--hardware", "h100"), "--hardware is for plans on paper; leave out --hardware or"),
        (("--acceptance", "0.7"), "--acceptance is for plans on paper"),
        (("--context", "5"), "--context is for plans on paper"),
        (("--repeats", "0"), "--repeats 0; expected at least 1"),
        (("--max-new-tokens", "0"), "--max-new-tokens 0; expected at least 1"),
        (("--temperature", "-1"), "expected a finite number, 0 or more"),
        (("--limit", "0"), "--limit 0; expected at least 1"),
        (("--batch", "9"), "--batch 9 needs as many prompts, there are 4"),
        (("--chat", "--no-chat"), "exclude each other"),
        (("--topk", "2", "--num-steps", "1", "--num-nodes", "9"), "no such tree"),
    ],
)
def test_measuring_refuses_before_a_model_is_looked_for(jspec_fails, flags, says):
    assert says in jspec_fails(*MEASURED, *flags)


def test_measured(jspec_run, model, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "plan.json"
    texts = ("abcabcabcabc", "xyxyxyxyxyxy")
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    shown = jspec_run(
        "plan", "--target", model, "--drafter", "ngram", "--measure", "--no-compilation-cache",
        "--prompts", str(prompts), "--max-new-tokens", "24", "--repeats", "1", "--num-steps", "2",
        "--topk", "1,2", "--num-nodes", "4", "--json", str(out),
    )  # fmt: skip
    figures = json.loads(out.read_text())
    trees = {(one["num_steps"], one["topk"], one["num_nodes"]) for one in figures["options"]}
    assert trees == {(2, 1, 3), (2, 2, 4)}
    known = figures["acceptance"]
    assert len(known["by_depth"]) == 2
    assert 0 < known["draft_rate"] <= 1
    # The same text by the same passes: a chain's τ follows from what was counted on it.
    chain = next(one for one in figures["options"] if one["num_nodes"] == 3)
    assert chain["accept_length"] == pytest.approx(known["chain_accept_length"], rel=0.2)
    assert list(figures["times"]["verify_seconds"]) == ["1", "3", "4"]
    check = figures["check"]
    assert check["measured_speedup"] == figures["bench"]["speedup"]
    assert check["predicted_speedup"] == figures["best"]["speedup"]
    assert check["off"] == pytest.approx(check["predicted_speedup"] / check["measured_speedup"] - 1)
    assert figures["bench"]["identical"] == figures["bench"]["compared"] == 2
    assert "check: predicted" in shown
