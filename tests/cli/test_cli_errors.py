"""What users get wrong: one line that says what was expected, exit code 2."""

import json

import pytest

T = ("--no-compilation-cache", "--target")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "expected a command: generate, bench, batch, export, tune-tree, plan, fetch"),
        (
            ("translate",),
            "no command 'translate': expected generate, bench, batch, export, tune-tree",
        ),
        (("generate",), "--target"),
        (("generate", "--target", "x", "--colour"), "--colour"),
        (("generate", "--target", "x", "--max-new-tokens", "many"), "--max-new-tokens"),
        (("generate", "--target", "x", "--mark", "bold"), "'auto', 'color', 'brackets', 'none'"),
        (("generate", "--target"), "--target"),
        (("fetch",), "ALIAS"),
        (("fetch", "gpt-5"), "expected smollm2-135m"),
    ],
)
def test_words_that_cannot_be_read(jspec_fails, argv, says):
    assert says in jspec_fails(*argv)


@pytest.mark.parametrize(
    "command", ["generate", "bench", "batch", "export", "tune-tree", "plan", "fetch"]
)
def test_unreadable_words_point_to_the_help(jspec_fails, command):
    assert f"jspec {command} --help" in jspec_fails(command, "--nonsense")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "either --prompt TEXT or --prompts FILE, got neither"),
        (("--prompt", "a", "--prompts", "b.jsonl"), "got both"),
        (("--prompt", ""), "--prompt is empty"),
        (("--prompt", "a", "--chat", "--no-chat"), "exclude each other"),
        (("--prompt", "a", "--json", "--show-tree"), "exclude each other"),
        (("--prompt", "a", "--max-new-tokens", "0"), "expected at least 1"),
        (("--prompt", "a", "--max-new-tokens", "-3"), "expected at least 1"),
        (("--prompt", "a", "--temperature", "-1"), "expected a finite number, 0 or more"),
        (("--prompt", "a", "--temperature", "nan"), "expected a finite number, 0 or more"),
        (("--prompt", "a", "--seed", "-1"), "expected 0 to"),
        (("--prompt", "a", "--stop", ""), "empty string"),
        (("--prompt", "a", "--top-p", "1.5"), "top_p=1.5; expected a number above 0"),
        (("--prompt", "a", "--logit-bias", "three"), "expected a token id and a number"),
        (("--prompt", "a", "--logit-bias", "3:inf"), "token 3 is inf"),
        (("--prompt", "a", "--logprobs", "2"), "--logprobs are printed by --json"),
        (("--prompt", "a", "--threshold-acc", "0.5"), "a setting of --verification thresholds"),
        (("--prompt", "a", "--drafter", "none", "--draft-temperature", "1"), "needs a drafter"),
        (("--prompt", "a", "--num-steps", "0"), "num_steps=0; expected at least 1"),
        (("--prompt", "a", "--topk", "-2"), "topk=-2; expected at least 1"),
        (("--prompt", "a", "--num-nodes", "1"), "expected at least 2"),
        (("--prompt", "a", "--num-steps", "1", "--num-nodes", "9"), "lower num_nodes"),
        (("--prompt", "a", "--topk", "1", "--num-nodes", "3"), "leave num_nodes out"),
        (("--prompt", "a", "--num-steps", "99", "--topk", "9", "--num-nodes", "999"), "128"),
        (("--prompt", "a", "--drafter", "none", "--num-steps", "3"), "--num-steps needs a drafter"),
        (("--prompts", "absent.jsonl"), "cannot read absent.jsonl"),
        (("--prompts", "."), "cannot read ."),
    ],
)
def test_refused_before_a_model_is_looked_for(jspec_fails, flags, says):
    assert says in jspec_fails("generate", "--target", "no such model", *flags)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--drafter", "eagle9"), "'mtp' (and 'none' for plain)"),
        (("--dtype", "float16"), "expected float32 or bfloat16"),
        (("--verification", "rejection"), "the drafter 'ngram' does not draw its children"),
        (("--draft-temperature", "0.7"), "draft_temperature needs a draft that was drawn"),
        (("--logit-bias", "99999:1"), "outside the vocabulary"),
        (("--simulate-accept-length", "40"), "expected 1 to 6"),
        (("--simulate-accept-length", "0.5"), "expected 1 to 6"),
        (("--num-steps", "2", "--num-nodes", "18"), "lower num_nodes"),
    ],
)
def test_refused_by_the_library(jspec_fails, model, flags, says):
    assert says in jspec_fails("generate", *T, model, "--prompt", "a", *flags)


def test_model_that_does_not_exist(jspec_fails):
    assert "expected an alias (smollm2-135m)" in jspec_fails(
        "generate", *T, "nowhere", "--prompt", "a"
    )


def test_architecture_that_is_not_supported(jspec_fails, write_model, tmp_path):
    folder = write_model(tmp_path / "other", architectures=["GPT2LMHeadModel"])
    said = jspec_fails("generate", *T, str(folder), "--prompt", "a")
    assert "'GPT2LMHeadModel' is not supported; expected one of LlamaForCausalLM" in said


def test_prompt_longer_than_the_context(jspec_fails, base_model):
    said = jspec_fails("generate", *T, base_model, "--prompt", "x" * 70)
    assert "--prompt: the prompt has 70 tokens" in said
    assert "shorten" in said


def test_long_prompt_in_a_file_is_named_before_anything_is_generated(
    jspec_fails, base_model, tmp_path
):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "short"}\n' + json.dumps({"prompt": "x" * 70}) + "\n")
    said = jspec_fails("generate", *T, base_model, "--prompts", str(path))
    assert f"{path}:2: the prompt has 70 tokens" in said


def test_chat_without_a_template(jspec_fails, base_model, tmp_path):
    said = jspec_fails("generate", *T, base_model, "--prompt", "a", "--chat")
    assert "no chat template; drop --chat" in said
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    said = jspec_fails("generate", *T, base_model, "--prompts", str(path))
    assert f"{path}:1: `messages` need a chat template" in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--drafter", "none"), "nothing to compare"),
        (("--batch", "0"), "--batch 0; expected at least 1"),
        (("--repeats", "-1"), "--repeats -1; expected at least 1"),
        (("--limit", "0"), "--limit 0; expected at least 1"),
        (("--json", "absent/out.json"), "the folder absent does not exist"),
        (("--json", "."), "is a folder"),
        (("--prompts", "absent.jsonl"), "cannot read absent.jsonl"),
    ],
)
def test_bench_refuses_before_it_measures(jspec_fails, flags, says):
    assert says in jspec_fails("bench", "--target", "no such model", *flags)


def test_debugging_keeps_the_traceback(monkeypatch):
    from jspec.cli import main

    monkeypatch.setenv("JSPEC_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no command"):
        main(["translate"])
