"""One line of input to one request: jspec's own form, or OpenAI's batch form. Strict.

What is wrong with a line is said about a field of it; nothing is ignored or guessed.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jspec.sampling import SamplingParams

ROLES = ("system", "user", "assistant")
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_WHOLE_NUMBERS = 2**31
"""Larger counts are mistakes; seeds may be as large as `SamplingParams` allows."""


class LineError(ValueError):
    """An input line that cannot be served.

    Attributes:
        field: which one is wrong; `line` where the line as a whole is.
        name: the request's id, where it could be read.
    """

    def __init__(self, field: str, message: str, name: str | int | None = None):
        super().__init__(message)
        self.field, self.name = field, name


@dataclass(frozen=True, kw_only=True)
class LineRequest:
    """A request as a file has it.

    Attributes:
        name: `id` or `custom_id`; the line number where a line of jspec's own form has none.
        number: of the line, from 1.
        prompt: text, token ids or messages.
        sampling: how to go on.
        form: of the answer: `native`, `chat` or `completion`.
        model: what an OpenAI line called the model.
    """

    name: str | int
    number: int
    prompt: Any
    sampling: SamplingParams
    form: str
    model: str = ""

    @property
    def prompt_field(self) -> str:
        """Where the prompt stood."""
        messages = isinstance(self.prompt, list) and isinstance(self.prompt[0], Mapping)
        field = "messages" if messages else "prompt"
        return field if self.form == "native" else f"body.{field}"


def parse_line(data: bytes, number: int, defaults: Mapping[str, Any]) -> LineRequest:
    """Read one line.

    Args:
        data: without its line end.
        number: from 1.
        defaults: of `SamplingParams`, for what a line leaves out.

    Raises:
        LineError: what is wrong, and with which field.
    """
    entry = _load(data)
    openai = "custom_id" in entry or "body" in entry or "url" in entry
    name = entry.get("custom_id" if openai else "id", None if openai else number)
    known = name if isinstance(name, str) or type(name) is int else None
    try:
        if openai:
            return _openai(entry, number, defaults)
        return _native(entry, number, defaults)
    except LineError as error:
        error.name = known
        raise


def _native(entry: dict, number: int, defaults: Mapping[str, Any]) -> LineRequest:
    name = entry.pop("id", number)
    if type(name) is not int:
        _text("id", name)
    kinds = [kind for kind in ("prompt", "messages") if kind in entry]
    if len(kinds) != 1:
        raise LineError(
            "prompt", f"expected exactly one of prompt and messages, got {len(kinds) or 'neither'}."
        )
    prompt = _prompt(kinds[0], entry.pop(kinds[0]))
    sampling = _sampling(entry, _NATIVE, {}, defaults, "")
    return LineRequest(name=name, number=number, prompt=prompt, sampling=sampling, form="native")


def _openai(entry: dict, number: int, defaults: Mapping[str, Any]) -> LineRequest:
    for field in entry:
        if field not in ("custom_id", "method", "url", "body"):
            _unknown(field)
    for field in ("custom_id", "method", "url", "body"):
        if field not in entry:
            raise LineError(field, f"expected `{field}`, got nothing.")
    name = _text("custom_id", entry["custom_id"])
    if entry["method"] != "POST":
        raise LineError("method", f"expected POST, got {_shown(entry['method'])}.")
    if entry["url"] not in (_CHAT, _COMPLETIONS):
        raise LineError("url", f"expected {_CHAT} or {_COMPLETIONS}, got {_shown(entry['url'])}.")
    body = entry["body"]
    if not isinstance(body, dict):
        raise LineError("body", f"expected an object, got {_shown(body)}.")
    body, chat = dict(body), entry["url"] == _CHAT
    model = _text("body.model", body.pop("model", None))
    field = "messages" if chat else "prompt"
    if field not in body:
        raise LineError(f"body.{field}", f"expected `{field}`, got nothing.")
    prompt = _prompt(f"body.{field}", body.pop(field))
    for fixed, value in (("n", 1), ("stream", False), ("echo", False), ("best_of", 1)):
        got = body.pop(fixed, None)
        if got is not None and (got != value or type(got) is not type(value)):
            raise LineError(
                f"body.{fixed}", f"only {json.dumps(value)} is served, got {_shown(got)}."
            )
    if body.get("user") is not None:
        _text("body.user", body["user"])
    body.pop("user", None)
    if chat:
        _chat_logprobs(body)
    body = {key: value for key, value in body.items() if value is not None}
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise LineError(
            "body.max_tokens", "max_tokens and max_completion_tokens exclude each other."
        )
    sampling = _sampling(body, _OPENAI, _RENAMED, defaults, "body.")
    return LineRequest(
        name=name,
        number=number,
        prompt=prompt,
        sampling=sampling,
        form="chat" if chat else "completion",
        model=model,
    )


def _chat_logprobs(body: dict) -> None:
    """Two fields of the chat form are one of ours."""
    wanted, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if wanted is not None and not isinstance(wanted, bool):
        raise LineError("body.logprobs", f"expected true or false, got {_shown(wanted)}.")
    if top is not None and not wanted:
        raise LineError("body.top_logprobs", "expected logprobs to be true beside it.")
    if wanted:
        body["logprobs"] = _count("body.top_logprobs", 0 if top is None else top)


def _prompt(field: str, value: Any) -> Any:
    if field.endswith("prompt"):
        if isinstance(value, list):
            if not value:
                raise LineError(field, "expected at least one token id, got an empty list.")
            return _ids(field, value)
        return _text(field, value)
    if not isinstance(value, list) or not value:
        raise LineError(field, f"expected a list of one or more messages, got {_shown(value)}.")
    for place, message in enumerate(value):
        at = f"{field}[{place}]"
        if not isinstance(message, dict):
            raise LineError(at, f"expected role and content, got {_shown(message)}.")
        for key in message:
            if key not in ("role", "content"):
                _unknown(f"{at}.{key}")
        role = message.get("role")
        if role not in ROLES:
            raise LineError(f"{at}.role", f"expected {', '.join(ROLES)}, got {_shown(role)}.")
        _text(f"{at}.content", message.get("content"))
    return value


def _sampling(
    fields: dict,
    checks: Mapping[str, Callable[[str, Any], Any]],
    renamed: Mapping[str, str],
    defaults: Mapping[str, Any],
    prefix: str,
) -> SamplingParams:
    given = dict(defaults)
    for field, value in fields.items():
        if field not in checks:
            _unknown(prefix + field)
        given[renamed.get(field, field)] = checks[field](prefix + field, value)
    try:
        return SamplingParams(**given)
    except ValueError as error:
        said = str(error)
        ours = next((name for name in given if said.startswith(name)), "banned_token_ids")
        theirs = {ours_: field for field, ours_ in renamed.items() if field in fields}
        raise LineError(prefix + theirs.get(ours, ours), said) from error


def _load(data: bytes) -> dict:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError("line", f"not UTF-8 text at byte {error.start + 1} of the line.") from error
    try:
        entry = json.loads(text, parse_int=_int, object_pairs_hook=_once)
    except RecursionError as error:
        raise LineError("line", "too deeply nested; expected one flat JSON object.") from error
    except json.JSONDecodeError as error:
        raise LineError("line", f"broken JSON at column {error.colno}: {error.msg}.") from error
    if not isinstance(entry, dict):
        raise LineError("line", f"expected a JSON object, got {_shown(entry)}.")
    return entry


def _int(digits: str) -> int | float:
    """Integers of thousands of digits are no numbers anybody meant; they fail as infinite."""
    return int(digits) if len(digits) < 40 else math.inf


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for key, value in pairs:
        if key in entry:
            raise LineError(key, f"`{key}` is given twice.")
        entry[key] = value
    return entry


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise LineError(field, f"expected a string with text, got {_shown(value)}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise LineError(field, "holds half of a surrogate pair, which is no character.") from error
    return value


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise LineError(field, f"expected a finite number, got {_shown(value)}.")
    try:
        return float(value)
    except OverflowError as error:
        raise LineError(field, "expected a finite number, got a huge one.") from error


def _whole(field: str, value: Any) -> int:
    if type(value) is not int:
        raise LineError(field, f"expected a whole number, got {_shown(value)}.")
    return value


def _count(field: str, value: Any) -> int:
    if not -_WHOLE_NUMBERS < _whole(field, value) < _WHOLE_NUMBERS:
        raise LineError(field, f"expected a whole number below 2**31, got {value}.")
    return value


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise LineError(field, f"expected true or false, got {_shown(value)}.")
    return value


def _ids(field: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise LineError(field, f"expected a list of token ids, got {_shown(value)}.")
    return [_count(f"{field}[{place}]", token) for place, token in enumerate(value)]


def _stops(field: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [_text(f"{field}[{place}]", stop) for place, stop in enumerate(value)]
    return [_text(field, value)]


def _by_id(check: Callable[[str, Any], Any]) -> Callable[[str, Any], dict[int, Any]]:
    def read(field: str, value: Any) -> dict[int, Any]:
        if not isinstance(value, dict):
            raise LineError(field, f"expected an object, got {_shown(value)}.")
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise LineError(field, f"expected whole numbers as keys, got {_shown(key)}.")
        return {int(key): check(f"{field}.{key}", entry) for key, entry in value.items()}

    return read


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return kind if value else f"an empty {kind.split()[1]}"
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else f"{shown[:36]}…"


def _unknown(field: str) -> NoReturn:
    raise LineError(field, f"unknown field `{field}`; expected one of the format's own.")


_OPENAI: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _count,
    "max_completion_tokens": _count,
    "temperature": _number,
    "top_p": _number,
    "seed": _whole,
    "stop": _stops,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _by_id(_number),
    "logprobs": _count,
    # What other servers accept beside OpenAI's own.
    "top_k": _count,
    "min_p": _number,
    "repetition_penalty": _number,
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
    "num_steps": _count,
}
_RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}

_NATIVE: dict[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": _count,
    "banned_token_ids": _ids,
    "forced_token_ids": _by_id(_count),
    **{field: check for field, check in _OPENAI.items() if field not in _RENAMED},
}
