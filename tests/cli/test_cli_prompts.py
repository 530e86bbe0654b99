"""Prompt files: what a line may hold, and what is said about one that cannot be used."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from jspec.commands.prompts import read_prompts


def _file(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def test_the_three_kinds(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = _file(
        tmp_path,
        {"prompt": "Hello", "id": "first"},
        "",
        {"messages": chat},
        {"question_id": 81, "category": "writing", "turns": ["Compose", "Rewrite"]},
    )
    requests = read_prompts(path)
    assert [r.id for r in requests] == ["first", 3, 81]
    assert [r.content for r in requests] == ["Hello", chat, "Compose"]
    assert requests[1].place == f"{path}:3"
    assert requests[0].as_prompt(chat=False) == "Hello"
    assert requests[0].as_prompt(chat=True) == [{"role": "user", "content": "Hello"}]
    assert requests[1].as_prompt(chat=True) == chat


def test_limit_stops_reading(tmp_path):
    path = _file(tmp_path, {"prompt": "a"}, {"prompt": "b"}, "broken")
    assert [r.content for r in read_prompts(path, 2)] == ["a", "b"]


def test_windows_line_ends_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [r.content for r in read_prompts(path)] == ["a", "b"]


def test_characters_that_only_look_like_line_ends(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert [r.content for r in read_prompts(path)] == ["a\u2028b"]


def test_stdin(tmp_path, monkeypatch):
    data = io.BytesIO(b'{"prompt": "from a pipe"}\nnot json')
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data))
    with pytest.raises(ValueError, match=r"<stdin>:2: broken JSON"):
        read_prompts(type(tmp_path)("-"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{'prompt': 'a'}", "broken JSON"),
        ('{"prompt": "a"', "broken JSON"),
        ("[" * 100_000, "broken JSON"),
        ('["a"]', "expected a JSON object, got a list"),
        ("3", "expected a JSON object, got a number"),
        ("{}", "exactly one of prompt, messages, turns, got none of them"),
        ({"text": "a"}, "exactly one of prompt, messages, turns, got none of them"),
        ({"prompt": "a", "turns": ["b"]}, "got prompt and turns"),
        ({"prompt": 3}, "`prompt` to be a string with text, got a number"),
        ({"prompt": ""}, "`prompt` to be a string with text, got an empty one"),
        ({"prompt": None}, "`prompt` to be a string with text, got null"),
        ({"turns": "a"}, "`turns` to be a list of strings"),
        ({"turns": []}, "`turns` to be a list of strings"),
        ({"turns": [["a"]]}, "`turns[0]` to be a string with text, got a list"),
        ({"messages": "a"}, "`messages` to be a list"),
        ({"messages": ["a"]}, "`messages[0]`: expected role and content, got a string"),
        ({"messages": [{"role": "user"}]}, "expected `content` to be a string, got nothing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "expected `content` to be a string, got a list",
        ),
        ({"prompt": "a", "id": 1.5}, "expected `id` to be a string or an integer, got a number"),
        ({"prompt": "a", "id": True}, "expected `id` to be a string or an integer, got a boolean"),
    ],
)
def test_broken_lines_are_named(tmp_path, line, says):
    path = _file(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert says in str(caught.value)


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\x80\x00\xff')
    with pytest.raises(ValueError, match=r"p\.jsonl:2 is not UTF-8 text; expected a JSONL file"):
        read_prompts(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_files_without_prompts(tmp_path, content):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(path)
