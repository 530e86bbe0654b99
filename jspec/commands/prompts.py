"""Prompts from flags and JSONL files; an unusable line is named, with what was expected."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

# Repetition from a lot to none: where prompt lookup shines, and where it must not cost anything.
BUILT_IN = (
    "Repeat the following list three times: red apple, green pear, blue plum, yellow banana.",
    "Fix the typo and return the whole function:\n\n"
    "def add(first, second):\n    retrun first + second\n",
    "Summarise in two sentences: The harbour was built in 1850. The harbour brought trade to the "
    "town, and the trade brought people. When the railway came in 1890, trade left the harbour and "
    "the people left the town.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
)

_KINDS = ("prompt", "messages", "turns")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt.

    Attributes:
        id: from the file, else its line number.
        content: text, or chat messages.
        place: where it stands, for error messages.
    """

    id: str | int
    content: str | list[dict[str, str]]
    place: str

    def as_prompt(self, chat: bool) -> str | list[dict[str, str]]:
        """What the engine takes: text as it is, or messages for the chat template.

        Raises:
            ValueError: messages, but no chat is wanted or possible.
        """
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}] if chat else self.content
        if not chat:
            raise ValueError(
                f"{self.place}: `messages` need a chat template; drop --no-chat or use an "
                "instruction-tuned model, or give `prompt` instead."
            )
        return self.content


def one_prompt(text: str) -> Request:
    """A prompt from the command line."""
    if not text:
        raise ValueError("--prompt is empty; give at least one character.")
    return Request(id=0, content=text, place="--prompt")


def read_prompts(path: Path, limit: int | None = None) -> list[Request]:
    """The prompts of a JSONL file, blank lines left out.

    Args:
        path: the file; `-` is stdin.
        limit: how many to read.

    Raises:
        ValueError: file and line, and what was expected there.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}; expected at least 1.")
    name, text = _text(path)
    # Not splitlines: a JSON string may hold other characters that it takes for line ends.
    lines = ((i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip())
    requests = [_request(f"{name}:{i}", i, line) for i, line in islice(lines, limit)]
    if not requests:
        raise ValueError(f"{name} holds no prompts; expected one JSON object a line.")
    return requests


def read_or_built_in(path: Path | None, limit: int | None) -> list[Request]:
    """The prompts of a file, or the built-in ones where none is named.

    Raises:
        ValueError: as `read_prompts`.
    """
    if path is not None:
        return read_prompts(path, limit)
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}; expected at least 1.")
    built_in = [
        Request(id=f"built-in-{i}", content=text, place=f"built-in prompt {i}")
        for i, text in enumerate(BUILT_IN, start=1)
    ]
    return built_in[:limit]


def _text(path: Path) -> tuple[str, str]:
    if str(path) == "-":
        name, data = "<stdin>", sys.stdin.buffer.read()
    else:
        name = str(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"cannot read {name}: {error.strerror}; expected a JSONL file of prompts."
            ) from error
    try:
        return name, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name}:{line} is not UTF-8 text; expected a JSONL file of prompts."
        ) from error


def _request(place: str, line_number: int, line: str) -> Request:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "too deeply nested")
        raise ValueError(
            f'{place}: broken JSON ({reason}); expected one object a line, such as {{"prompt": '
            '"Hello"}.'
        ) from error
    if not isinstance(entry, dict):
        raise ValueError(f"{place}: expected a JSON object, got {_kind(entry)}.")
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        raise ValueError(
            f"{place}: expected exactly one of {', '.join(_KINDS)}, got "
            f"{' and '.join(kinds) or 'none of them'}."
        )
    name = entry.get("id", entry.get("question_id", line_number))
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise ValueError(f"{place}: expected `id` to be a string or an integer, got {_kind(name)}.")
    return Request(id=name, content=_content(place, kinds[0], entry[kinds[0]]), place=place)


def _content(place: str, kind: str, value: Any) -> str | list[dict[str, str]]:
    if kind == "turns":
        if not isinstance(value, list) or not value:
            raise ValueError(f"{place}: expected `turns` to be a list of strings with one or more.")
        kind, value = "turns[0]", value[0]
    if kind != "messages":
        if not isinstance(value, str) or not value:
            got = "an empty one" if value == "" else _kind(value)
            raise ValueError(f"{place}: expected `{kind}` to be a string with text, got {got}.")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}: expected `messages` to be a list with one or more messages.")
    return [_message(f"{place}: `messages[{i}]`", message) for i, message in enumerate(value)]


def _message(place: str, message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place}: expected role and content, got {_kind(message)}.")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            got = _kind(message[key]) if key in message else "nothing"
            raise ValueError(f"{place}: expected `{key}` to be a string, got {got}.")
    return {"role": message["role"], "content": message["content"]}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
