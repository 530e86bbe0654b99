"""`jspec train` and `jspec data` from the command line, on a tiny model."""

import json

import pytest

from jspec.cli import main
from train.commands.regenerate import answered


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.json"
    path.write_text(json.dumps([
        {"id": f"c{i}", "conversations": [
            {"from": "human", "value": f"say {i}"}, {"from": "gpt", "value": "so " * (2 + i % 3)}]}
        for i in range(12)
    ]))  # fmt: skip
    return str(path)


def test_overview_and_help(jspec_run):
    assert "train" in jspec_run("--help")
    assert "eagle3" in jspec_run("train", "--help")
    assert "regenerate" in jspec_run("data", "--help")
    assert "--draft-vocab-size" in jspec_run("train", "eagle3", "--help")


def test_inspect(jspec_run, model, chats):
    shown = jspec_run("data", "inspect", "--target", model, "--data", chats, "--sample", "1")
    assert "examples" in shown
    assert "⟦so so so <|im_end|>⟧" in shown


def test_what_is_refused(capsys, model, chats, tmp_path):
    for words, says in (
        (("train",), "expected a command: eagle3"),
        (("train", "eagle9"), "no command 'eagle9'"),
        (("data", "inspect", "--target", model, "--data", "none.json"), "no data file none.json"),
        (("data", "inspect", "--target", model, "--data", chats, "--sample", "99"), "no sample 99"),
    ):
        assert main([*words]) == 2
        assert says in capsys.readouterr().err


def test_regenerate_goes_on_where_it_was(jspec_run, model, chats, tmp_path):
    out = tmp_path / "answers.jsonl"
    words = ("data", "regenerate", "--target", model, "--data", chats, "--out", str(out),
             "--max-new-tokens", "6", "--batch-size", "4")  # fmt: skip
    jspec_run(*words, "--limit", "8")
    whole = out.read_text()
    lines = whole.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"c{i}" for i in range(8)]
    entry = json.loads(lines[0])
    assert entry["messages"][0] == {"role": "user", "content": "say 0"}
    assert len(entry["token_ids"]) == 6 or entry["finish_reason"] == "stop"
    # A run that died in the middle of a line.
    out.write_text(whole[: len(whole) // 2])
    assert 0 < len(answered(out)) < 8
    assert out.read_text().endswith("\n")
    jspec_run(*words, "--limit", "8")
    again = {json.loads(line)["id"]: line for line in out.read_text().splitlines()}
    assert again == {json.loads(line)["id"]: line for line in lines}


def test_train_and_measure(jspec_run, model, chats, tmp_path):
    common = ("--target", model, "--data", chats, "--no-compilation-cache")
    out = tmp_path / "run"
    size = ("--draft-vocab-size", "64", "--num-heads", "2")
    run = ("--out", str(out), "--steps", "3", "--eval-every", "2", "--quiet", *size)
    shown = jspec_run("train", "medusa", *common, *run, "--max-length", "64",
                      "--batch-tokens", "128", "--dry-run")  # fmt: skip
    assert "trained parameters" in shown
    assert not out.exists()
    jspec_run("train", "medusa", *common, *run, "--max-length", "64", "--batch-tokens", "128",
              "--validation", "0.2")  # fmt: skip
    assert (out / "head/config.json").exists()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "say"}\n{"prompt": "more"}\n')
    told = tmp_path / "told.json"
    jspec_run("train", "eval", "--target", model, "--drafter", str(out / "head"),
              "--prompts", str(prompts), "--num-steps", "2", "--topk", "1", "--num-nodes", "3",
              "--max-new-tokens", "8", "--json", str(told))  # fmt: skip
    figures = json.loads(told.read_text())["prompts"]
    assert figures["texts"] == 2
    assert 1 <= figures["tau"] <= 3
    assert len(figures["acceptance"]) == 2
