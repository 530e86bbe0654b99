"""`jspec generate` on a tiny model."""

import json
import math
import re
from io import StringIO
from types import SimpleNamespace

import pytest
from tiny_models import tiny_target

from jspec.commands.generate import Clock
from jspec.commands.options import ModelFlags, VerifyFlags
from jspec.commands.parts import rule_from
from jspec.commands.show import TextWriter, summary
from jspec.engine import Engine
from jspec.engine.text import Piece
from jspec.verify import BlockVerification, Thresholds, TypicalAcceptance

LAST_LINE = re.compile(
    r"(\d+) tokens?, (\d+\.\d) tokens/s while decoding, τ (\d\.\d\d), (\d+) rounds?"
)
FIELDS = {
    "id",
    "prompt",
    "text",
    "token_ids",
    "finish_reason",
    "accept_length",
    "accept_lengths",
    "acceptance_by_depth",
    "rounds",
    "tokens_per_second",
    "drafted",
    "correct",
    "drafter",
    "rule",
    "simulated",
}
PROMPT = ("--prompt", "abcabcabcabc")


@pytest.fixture
def generate(jspec_run, model):
    def run(*flags: str, target: str = model) -> str:
        return jspec_run("generate", "--target", target, "--no-compilation-cache", *flags)

    return run


def test_text_is_marked_and_ends_with_one_line(generate):
    flags = ("--max-new-tokens", "16", "--ignore-eos")
    shown = generate(*PROMPT, *flags)
    plain = json.loads(generate(*PROMPT, *flags, "--drafter", "none", "--json"))
    text, last = shown.rstrip("\n").rsplit("\n", 1)
    tokens, _, accept_length, rounds = LAST_LINE.fullmatch(last).groups()
    assert int(tokens) == len(plain["token_ids"]) == 16
    assert float(accept_length) == pytest.approx(15 / int(rounds), abs=0.01)
    assert int(rounds) < 15
    assert "[" in text
    assert plain["drafter"] == "none"
    assert plain["accept_length"] == 1.0


def test_json_has_every_field_once_per_prompt(generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": "a", "prompt": "aaaa"}, {"turns": ["bb", "cc"]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    out = generate("--prompts", str(path), "--json", "--max-new-tokens", "12", "--ignore-eos")
    entries = [json.loads(line) for line in out.splitlines()]
    assert [set(entry) for entry in entries] == [FIELDS, FIELDS]
    assert [entry["id"] for entry in entries] == ["a", 2]
    assert [entry["prompt"] for entry in entries] == ["aaaa", "bb"]
    for entry in entries:
        assert len(entry["token_ids"]) == 12
        assert entry["finish_reason"] == "length"
        assert sum(entry["accept_lengths"]) == 11
        assert entry["rounds"] == len(entry["accept_lengths"])
        assert len(entry["acceptance_by_depth"]) == 5
        assert entry["rule"] == "target-sampling"
        assert entry["simulated"] is False


def test_json_has_null_where_there_is_no_figure(generate):
    out = generate(*PROMPT, "--json", "--max-new-tokens", "1", "--drafter", "none")
    assert "NaN" not in out
    entry = json.loads(out)
    assert entry["accept_length"] is None
    assert entry["tokens_per_second"] is None
    assert entry["acceptance_by_depth"] == []


def test_trees_are_drawn_and_several_prompts_have_headings(generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "one", "prompt": "abababab"}\n{"id": "two", "prompt": "xyxyxy"}')
    out = generate("--prompts", str(path), "--show-tree", "--max-new-tokens", "6", "--no-chat")
    assert re.search(r"^── one ──$", out, re.M)
    assert re.search(r"^── two ──$", out, re.M)
    assert re.search(
        r"^round 1: \d of \d drafted tokens? accepted, bonus|^round 1: nothing", out, re.M
    )
    assert "★" in out
    assert len(LAST_LINE.findall(out)) + out.count("too short to time") == 2


def test_simulated_text_says_so_everywhere(generate):
    flags = (*PROMPT, "--simulate-accept-length", "2.5", "--max-new-tokens", "16")
    shown = generate(*flags).splitlines()
    assert "not real text" in shown[0]
    assert "not real text" in shown[-1]
    assert "τ 2.50" in shown[-1]
    entry = json.loads(generate(*flags, "--json"))
    assert entry["simulated"] is True
    assert entry["rule"] == "simulated"
    assert entry["accept_length"] == pytest.approx(2.5)


def test_chat_is_the_default_where_there_is_a_template(generate, base_model):
    flags = (
        "--prompt",
        "Hi",
        "--json",
        "--max-new-tokens",
        "4",
        "--drafter",
        "none",
        "--ignore-eos",
    )
    default, chat, text = (
        json.loads(generate(*flags, *more))["token_ids"]
        for more in ((), ("--chat",), ("--no-chat",))
    )
    assert default == chat
    assert default != text
    assert json.loads(generate(*flags, target=base_model))["token_ids"]


def test_sampling_flags(generate):
    flags = (
        *(*PROMPT, "--json", "--max-new-tokens", "12", "--no-chat", "--temperature", "0.8"),
        *("--seed", "3", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"),
        *("--repetition-penalty", "1.2", "--presence-penalty", "0.1", "--logit-bias", "5:-inf"),
        *("--frequency-penalty", "0.2", "--logit-bias", "7:1.5"),
    )
    drafted = json.loads(generate(*flags, "--logprobs", "2"))
    plain = json.loads(generate(*flags, "--drafter", "none"))
    assert drafted["token_ids"] == plain["token_ids"]
    assert "logprobs" not in plain
    assert len(drafted["logprobs"]) == len(drafted["top_logprobs"]) == 12
    assert all(len(top) == 2 and top[0][1] >= top[1][1] for top in drafted["top_logprobs"])
    assert drafted["rule"] == "target-sampling"


def test_rules_from_flags():
    model = ModelFlags(target="x")
    assert rule_from(model, VerifyFlags()) is None
    block = rule_from(model, VerifyFlags(verification="block", draft_temperature=0.7))
    assert block == BlockVerification()
    lossy = VerifyFlags(verification="typical", typical_delta=0.2)
    assert rule_from(model, lossy) == TypicalAcceptance(delta=0.2)
    lossy = VerifyFlags(verification="thresholds", threshold_acc=0.5)
    assert rule_from(model, lossy) == Thresholds(acc=0.5)


def test_stop_strings(generate):
    flags = (*PROMPT, "--json", "--max-new-tokens", "16", "--no-chat")
    whole = json.loads(generate(*flags))["text"]
    stop = whole[5:7]
    cut = json.loads(generate(*flags, "--stop", "\u2603", "--stop", stop))
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


@pytest.fixture
def tiny_engine():
    return Engine(tiny_target())


PIECES = [Piece("a", False), Piece("b", True), Piece("c", True), Piece("\x1b[2J", False)]


@pytest.mark.parametrize(
    ("mark", "shown"),
    [
        ("auto", "a[bc]\ufffd[2J"),
        ("brackets", "a[bc]\ufffd[2J"),
        ("none", "abc\ufffd[2J"),
        ("color", "a\x1b[4;32mbc\x1b[0m\ufffd[2J"),
    ],
)
def test_marks(mark, shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = StringIO()
    TextWriter(mark, stream).pieces(PIECES)
    assert stream.getvalue() == shown


def test_long_text_is_not_wrapped():
    stream = StringIO()
    TextWriter("none", stream).pieces([Piece("word " * 100, False)])
    assert stream.getvalue() == "word " * 100


def test_summary_without_figures():
    assert summary(1, math.nan, math.nan, 0) == "1 token, too short to time, τ n/a, 0 rounds"
    assert summary(9, 12.34, 2.0, 1) == "9 tokens, 12.3 tokens/s while decoding, τ 2.00, 1 round"


def test_clock_leaves_out_compiling_and_first_rounds(monkeypatch, tiny_engine):
    now = iter([float(n) for n in range(100)])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    engine = tiny_engine

    def updates():
        lone, drafted = [object(), None], [object(), object()]
        for view, compiles in (
            (None, True),  # the prompt's own pass
            (lone, True),
            (lone, False),  # the first that counts
            (drafted, False),  # this pass width runs for the first time
            (drafted, False),
            (lone, False),
        ):
            engine.traces["rounds"] += compiles
            yield SimpleNamespace(
                round=view and SimpleNamespace(nodes=view), token_ids=[1] * (view is not None) * 2
            )

    clock = Clock()
    assert len(list(clock.time(engine, updates()))) == 6
    assert (clock.tokens, clock.seconds) == (6, 3.0)
    clock.restart()
    assert math.isnan(clock.tokens_per_second)
