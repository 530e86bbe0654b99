"""`jspec batch`: every line answered once, in its own form, whatever happens on the way."""

import gzip
import io
import json
import os
import random
import signal
import sys
import time

import pytest

import jspec
from jspec.cli import main
from serve.answers import dump, refusal
from serve.journal import Journal
from serve.lines import LineError, parse_line

FLAGS = ("--drafter", "ngram", "--slots", "3", "--capacity", "128", "--max-new-tokens", "9")
DEFAULTS = {"max_new_tokens": 9}


def chat_line(name, **body):
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path, lines):
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def malformed() -> list[tuple[bytes, str]]:
    """(line, field that its error names)."""
    made: list[tuple[bytes, str]] = [
        (b"\xff\xfe{}", "line"),
        (b'{"prompt": "\xc3\x28"}', "line"),
        (b"{", "line"),
        (b"nonsense", "line"),
        (b"[]", "line"),
        (b"null", "line"),
        (b'"text"', "line"),
        (b"12", "line"),
        (b"[" * 100_000, "line"),
        (b'{"prompt":' * 50_000, "line"),
        (b'{"prompt": "a", "prompt": "b"}', "prompt"),
        (b'{"prompt": "a", "\\ud801": 1}', "\ud801"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": Infinity}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "max_new_tokens": ' + b"9" * 5000 + b"}", "max_new_tokens"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"id": "\\udfff", "prompt": "a"}', "id"),
        (b"{}", "prompt"),
        (b'{"prompt": "a", "messages": []}', "prompt"),
        (b'{"prompt": "a", "forced_token_ids": {"x": 1}}', "forced_token_ids"),
    ]
    odd = [None, True, "1", [], {}, "", -1, 2**31, 1.5, float("nan")]
    wrong = {
        "prompt": [None, True, 1, [], {}, "", 1.5, ["a"], [1.5], [-1], [10**6], [[1]]],
        "messages": [None, True, 1, "a", [], {}, ["a"], [None], [{}], [[]]],
        "id": [None, True, "", [], {}, 1.5],
        "max_new_tokens": [*odd, 0],
        "temperature": [None, True, "1", [], {}, -0.1, float("-inf"), 10**30 * 10**9],
        "top_k": odd,
        "top_p": [None, True, "1", [], {}, 0, -1, 1.1],
        "min_p": [None, False, "1", [], {}, -0.1, 2],
        "seed": [True, "1", [], {}, -1, 2**63, 1.5],
        "stop": [None, True, 1, {}, "", [""], [1]],
        "stop_token_ids": [None, True, 1, "a", {}, ["a"], [1.5], [True], [2**40]],
        "ignore_eos": [None, 1, "true", [], {}],
        "repetition_penalty": [None, True, "1", [], {}, 0, -1],
        "presence_penalty": [None, True, "1", [], {}, float("inf")],
        "frequency_penalty": [None, True, "1", [], {}, float("inf")],
        "logit_bias": [None, True, 1, [], {"a": 1}, {"-1": 1}, {"1": "a"}, {"1": float("nan")}],
        "banned_token_ids": [None, True, 1, "a", {}, ["a"]],
        "logprobs": [True, "1", [], {}, -1, 21, 2**31],
        "num_steps": [True, "1", [], {}, -1],
        "best_effort": [1],
        "n": [2],
    }
    for field, values in wrong.items():
        for value in values:
            line = {field: value} if field in ("prompt", "messages") else {"prompt": "a"}
            made.append((json.dumps({**line, field: value}).encode(), field))
    for role in (None, 1, "", "tool", "User", "robot", [], {}, True, "developer", "function"):
        messages = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
        made.append((json.dumps({"messages": messages}).encode(), "messages[1].role"))
    for content in (None, 1, "", [], {}):
        messages = [{"role": "user", "content": content}]
        made.append((json.dumps({"messages": messages}).encode(), "messages[0].content"))
    made += [
        (json.dumps(line).encode(), field)
        for line, field in [
            ({"custom_id": "a"}, "method"),
            ({**chat_line("a"), "custom_id": 1}, "custom_id"),
            ({**chat_line("a"), "method": "GET"}, "method"),
            ({**chat_line("a"), "url": "/v1/embeddings"}, "url"),
            ({**chat_line("a"), "body": None}, "body"),
            ({**chat_line("a"), "extra": 1}, "extra"),
            (chat_line("a", model=None), "body.model"),
            (chat_line("a", n=2), "body.n"),
            (chat_line("a", stream=True), "body.stream"),
            (chat_line("a", tools=[]), "body.tools"),
            (chat_line("a", prompt="x"), "body.prompt"),
            (chat_line("a", max_tokens=1, max_completion_tokens=1), "body.max_tokens"),
            (chat_line("a", max_tokens=0), "body.max_tokens"),
            (chat_line("a", max_completion_tokens=-3), "body.max_completion_tokens"),
            (chat_line("a", top_logprobs=2), "body.top_logprobs"),
            (chat_line("a", logprobs=3), "body.logprobs"),
            (
                chat_line("a", messages=[{"role": "user", "content": "a", "x": 1}]),
                "body.messages[0].x",
            ),
            (chat_line("a", temperature="hot"), "body.temperature"),
        ]
    ]
    return made


def test_malformed_lines_name_their_field(model, tmp_path, capsys):
    cases = malformed()
    assert len(cases) >= 200
    good = [{"id": "first", "prompt": "Hi"}, {"id": "last", "prompt": "Hi"}]
    lines = [good[0], *(line for line, _ in cases), good[1], {"id": "last", "prompt": "again"}]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    code = main(["batch", "--target", model, *FLAGS, "--input", str(source), "--output", str(out)])
    said = capsys.readouterr()
    assert code == 1, said.err
    records = {}
    for record in read(out):
        number = record.get("line") or record["error"]["line"]
        assert number not in records
        records[number] = record
    assert sorted(records) == list(range(1, len(lines) + 1))
    assert records[1]["text"] == records[len(lines) - 1]["text"]
    for number, (line, field) in enumerate(cases, start=2):
        error = records[number]["error"]
        assert error["field"].startswith(field) or field.startswith(error["field"]), (line, error)
        assert error["message"]
        assert error["line"] == number
    assert records[len(lines)]["error"]["field"] == "id"
    assert f"2 answered, {len(cases) + 1} failed" in said.err


def test_both_forms_equal_generate(model, tmp_path, capsys, monkeypatch):
    lines = [
        {"id": 7, "prompt": [5, 6, 7]},
        chat_line("c", seed=3, temperature=0.8, max_tokens=12),
        {"prompt": "no id", "num_steps": 0},
        chat_line("d", logprobs=True, top_logprobs=2),
        {"id": "m", "messages": [{"role": "user", "content": "Hi"}], "stop": "x"},
        {
            "custom_id": "t",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": "abc", "max_tokens": 3},
        },
    ]
    raw = "\n\n".join(map(json.dumps, lines)).encode()
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + raw))
    out, figures = tmp_path / "out.jsonl", tmp_path / "figures.json"
    words = ["batch", "--target", model, *FLAGS, "--ordered"]
    code = main(
        [
            *words,
            "--input",
            str(tmp_path / "in.jsonl.gz"),
            "--output",
            str(out),
            "--metrics-json",
            str(figures),
        ]
    )
    assert code == 0, capsys.readouterr().err
    got = read(out)
    target = jspec.load_target(model)
    engine = jspec.Engine(target, "ngram", batch_size=6)
    user = [{"role": "user", "content": "Hi"}]
    noted = [{"role": "user", "content": "no id"}]
    want = engine.generate(
        [[5, 6, 7], user, noted, user, user, "abc"],
        [
            jspec.SamplingParams(max_new_tokens=9),
            jspec.SamplingParams(max_new_tokens=12, seed=3, temperature=0.8),
            jspec.SamplingParams(max_new_tokens=9, num_steps=0),
            jspec.SamplingParams(max_new_tokens=9, logprobs=2),
            jspec.SamplingParams(max_new_tokens=9, stop="x"),
            jspec.SamplingParams(max_new_tokens=3),
        ],
    )
    texts = [got[0]["text"], None, got[2]["text"], None, got[4]["text"], None]
    for place in (1, 3, 5):
        response = got[place]["response"]
        assert response["status_code"] == 200
        choice = response["body"]["choices"][0]
        texts[place] = choice["text"] if place == 5 else choice["message"]["content"]
        assert choice["finish_reason"] == want[place].finish_reason
        assert response["body"]["usage"]["completion_tokens"] == len(want[place].token_ids)
    assert texts == [output.text for output in want]
    assert [got[0]["id"], got[2]["id"], got[4]["id"]] == [7, 5, "m"]  # blank lines are counted
    assert got[2]["stats"]["drafted"] == 0
    assert got[0]["stats"]["accept_length"] == pytest.approx(want[0].stats.accept_length)
    content = got[3]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(want[3].logprobs, abs=1e-4)
    assert json.loads(figures.read_text())["answered"] == 6

    # The same again, from a pipe: nothing is left to do.
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    capsys.readouterr()
    assert main([*words, "--input", "-", "--output", str(out), "--resume"]) == 0
    assert "0 answered, 0 failed, 6 skipped" in capsys.readouterr().err
    assert read(out) == got


def test_refusals_stop_the_job(model, tmp_path, jspec_fails):
    source, out = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    words = ["batch", "--target", model, *FLAGS, "--output", str(out), "--input"]
    assert "cannot read" in jspec_fails(*words, str(tmp_path / "none.jsonl"))
    assert "memory_limit is 0.0 MiB" in jspec_fails(*words, str(source), "--memory-limit", "0")
    assert "needs 64 devices" in jspec_fails(*words, str(source), "--data-parallel", "64")
    assert "max_new_tokens=0" in jspec_fails(*words, str(source), "--max-new-tokens", "0")
    out.write_text('{"text": "of something else"}\n')
    assert "--resume" in jspec_fails(*words, str(source))
    assert "no answer of this command" in jspec_fails(*words, str(source), "--resume")
    assert out.read_text() == '{"text": "of something else"}\n'


def test_a_torn_line_is_cut_off(tmp_path):
    records = [{"id": n, "line": n, "text": "é"} for n in range(1, 4)]
    whole = b"".join(map(dump, records))
    failed = dump(refusal(LineError("prompt", "empty", "x"), 4, openai=True))
    path = tmp_path / "out.jsonl"
    last = len(whole)
    for cut in range(1, len(failed)):
        path.write_bytes(whole + failed[:cut])
        journal = Journal(path, resume=True)
        assert journal.answered == {1: 1, 2: 2, 3: 3}
        assert path.stat().st_size == last
        journal.close()
    journal = Journal(path, resume=True)
    with pytest.raises(ValueError, match="another job"):
        Journal(path, resume=True)
    journal.write([refusal(LineError("prompt", "empty", "x"), 4, openai=True)])
    journal.close()
    again = Journal(path, resume=True)
    assert again.answered[4] == "x"
    assert again.failed == 1
    again.close()


def test_defaults_come_from_the_flags():
    request = parse_line(b'{"prompt": "a"}', 3, DEFAULTS)
    assert request.name == request.number == 3
    assert request.sampling == jspec.SamplingParams(max_new_tokens=9)
    body = json.dumps(chat_line("a", max_tokens=2, stop=["x"], logit_bias={"5": -1})).encode()
    asked = parse_line(body, 1, DEFAULTS).sampling
    assert asked == jspec.SamplingParams(max_new_tokens=2, stop=("x",), logit_bias={5: -1.0})


def test_killed_and_stopped_jobs_are_resumed(model, tmp_path, spawn):
    rng = random.Random(11)
    lines = [
        {"id": f"r{n}", "prompt": [2 + n % 200], "max_new_tokens": 40 + n % 9, "seed": n}
        | ({"temperature": 0.9} if n % 3 == 0 else {})
        for n in range(90)
    ]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    words = ["-m", "serve.batch", "--target", model, *FLAGS, "--input", str(source)]
    words += ["--output", str(out), "--resume"]
    for kind in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        before = out.stat().st_size if out.exists() else 0
        process = spawn(*words)
        while process.poll() is None and (not out.exists() or out.stat().st_size <= before):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        if process.poll() is None:
            os.kill(process.pid, kind)
        _, said = process.communicate(timeout=300)
        assert process.returncode in (-signal.SIGKILL, 143, 0), said
    final = spawn(*words)
    _, said = final.communicate(timeout=300)
    assert final.returncode == 0, said
    records = read(out)
    assert sorted(record["id"] for record in records) == sorted(line["id"] for line in lines)
    engine = jspec.Engine(jspec.load_target(model), "ngram", batch_size=90)
    asked = [
        jspec.SamplingParams(
            max_new_tokens=line["max_new_tokens"],
            seed=line["seed"],
            temperature=line.get("temperature", 0.0),
        )
        for line in lines
    ]
    wanted = engine.generate([line["prompt"] for line in lines], asked)
    expected = {line["id"]: want.token_ids for line, want in zip(lines, wanted)}
    assert {record["id"]: record["token_ids"] for record in records} == expected
