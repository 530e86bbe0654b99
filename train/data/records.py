"""Chat data as it lies on disk: one `Record` after another, whatever the format.

Read as a stream, so that a file larger than memory is no trouble, and a file that breaks off in the
middle of a record still gives every whole one before it.
"""

import gzip
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_HUB = "hub:"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One conversation, text, or token sequence; exactly one of `messages`, `text`, `input_ids`.

    Attributes:
        id: from the file, else its number.
        place: file and position, for messages to people.
        messages: role and content.
        answer_ids: the last message as the target wrote it, token by token. Text does not always
            come back to the same tokens, and an answer cut at its limit has no end token.
        text: plain text, all of it supervised.
        input_ids: tokens.
        loss_mask: which of them are supervised, 0 or 1.
    """

    id: str
    place: str
    messages: tuple[dict[str, str], ...] | None = None
    answer_ids: tuple[int, ...] | None = None
    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] | None = None


def read_records(source: str | Path) -> Iterator[Record]:
    """Stream the records of a data file.

    Args:
        source: a file, compressed if it ends in `.gz`: `.json` (ShareGPT: one list of objects with
            `conversations`), `.jsonl` (objects with `messages`, `conversations`, `text`, or
            `input_ids` and `loss_mask`; `token_ids` beside messages are the last answer's tokens),
            `.txt` (paragraphs apart by an empty line); or `hub:organisation/name[:split]`, which
            needs the `datasets` package.

    Raises:
        ValueError: no such file, an unknown kind, or a record that cannot be used (it is named).

    Warns:
        UserWarning: the file ends mid-record; the message says where.
    """
    name = str(source)
    if name.startswith(_HUB):
        yield from _hub(name.removeprefix(_HUB))
        return
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"no data file {name}; expected a .json, .jsonl or .txt file (or one of them as .gz), "
            f"or {_HUB}organisation/name"
        )
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    readers = {".json": _json_list, ".jsonl": _json_lines, ".txt": _paragraphs}
    if kind not in readers:
        raise ValueError(
            f"{name}: cannot tell what is in a {kind or 'nameless'} file; expected "
            f"{', '.join(readers)}, or one of them with .gz behind it"
        )
    yield from readers[kind](path)


def as_record(entry: Any, number: int, place: str) -> Record:
    """One entry of a data file, checked.

    Raises:
        ValueError: it is none of the known shapes; names `place` and what was expected.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{place}: expected an object, got {type(entry).__name__}")
    name = str(entry.get("id", number))
    if "input_ids" in entry:
        ids, mask = entry["input_ids"], entry.get("loss_mask")
        if mask is None or len(mask) != len(ids) or not set(mask) <= {0, 1}:
            raise ValueError(
                f"{place}: `input_ids` needs a `loss_mask` of {len(ids)} zeros and ones, "
                f"got {'none' if mask is None else f'{len(mask)} entries, {sorted(set(mask))}'}"
            )
        ids, mask = tuple(map(int, ids)), tuple(map(int, mask))
        return Record(id=name, place=place, input_ids=ids, loss_mask=mask)
    for key in ("messages", "conversations"):
        if entry.get(key) is not None:
            messages = tuple(_message(m, f"{place}: {key}[{i}]") for i, m in enumerate(entry[key]))
            answer = entry.get("token_ids")
            return Record(
                id=name,
                place=place,
                messages=messages,
                answer_ids=None if answer is None else tuple(map(int, answer)),
            )
    if isinstance(entry.get("text"), str):
        return Record(id=name, place=place, text=entry["text"])
    raise ValueError(
        f"{place}: expected `messages`, `conversations`, `text`, or `input_ids` with `loss_mask`; "
        f"got {', '.join(map(repr, entry)) or 'an empty object'}"
    )


def _message(message: Any, place: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place}: expected role and content, got {type(message).__name__}")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if role not in _ROLES:
        raise ValueError(f"{place}: role {role!r} is unknown; expected one of {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{place}: expected text, got {type(content).__name__}")
    return {"role": _ROLES[role], "content": content}


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield file  # type: ignore[misc]


def _broken(path: Path, whole: int, where: str) -> None:
    warnings.warn(
        f"{path} breaks off {where}: its {whole} whole records are used; download or write it "
        "again for the rest",
        stacklevel=3,
    )


def _json_list(path: Path) -> Iterator[Record]:
    import ijson

    number = 0
    with _opened(path) as file:
        try:
            for entry in ijson.items(file, "item", use_float=True):
                yield as_record(entry, number, f"{path}[{number}]")
                number += 1
        except (ijson.IncompleteJSONError, EOFError) as error:
            if not _at_end(file, error):
                raise ValueError(
                    f"{path}: broken JSON after record {number - 1} ({_brief(error)}); expected a "
                    "list of conversations"
                ) from error
            _broken(path, number, f"inside record {number}, at byte {_position(file)}")
            return
        except ijson.JSONError as error:
            raise ValueError(
                f"{path}: broken JSON after record {number - 1} ({_brief(error)}); expected a list "
                "of conversations"
            ) from error
    if not number:
        raise ValueError(f"{path} holds no records; expected a list of conversations")


def _at_end(file: IO[bytes], error: Exception) -> bool:
    """Whether a parse error means that the file ran out, not that it is wrong inside.

    The parser reads ahead, so the end of the file alone proves nothing; its message does.
    """
    return (
        isinstance(error, EOFError) or "premature EOF" in str(error) or "Incomplete" in str(error)
    )


def _position(file: IO[bytes]) -> int:
    try:
        return file.seek(0, 2)
    except (EOFError, OSError):  # a compressed stream that itself breaks off
        return file.tell()


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 120 else f"{text[:117]}..."


def _json_lines(path: Path) -> Iterator[Record]:
    number, line_number = 0, 0
    with _opened(path) as file:
        lines = iter(file)
        while True:
            try:
                line = next(lines, None)
            except EOFError:
                _broken(path, number, f"after line {line_number}, in its compressed data")
                return
            if line is None:
                break
            line_number += 1
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):  # only the last line can lack its end
                    _broken(path, number, f"inside line {line_number}")
                    return
                raise ValueError(f"{path}:{line_number}: broken JSON ({_brief(error)})") from error
            yield as_record(entry, number, f"{path}:{line_number}")
            number += 1
    if not number:
        raise ValueError(f"{path} holds no records; expected one JSON object a line")


def _paragraphs(path: Path) -> Iterator[Record]:
    number, begin, lines = 0, 1, []
    with _opened(path) as file:
        for line_number, raw in enumerate(file, start=1):
            line = raw.decode("utf-8")
            if line.strip():
                if not lines:
                    begin = line_number
                lines.append(line)
            elif lines:
                yield Record(id=str(number), place=f"{path}:{begin}", text="".join(lines).strip())
                number, lines = number + 1, []
    if lines:
        yield Record(id=str(number), place=f"{path}:{begin}", text="".join(lines).strip())
    elif not number:
        raise ValueError(f"{path} holds no text")


def _hub(name: str) -> Iterator[Record]:
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError as error:
        raise ValueError(
            f"{_HUB}{name} needs the `datasets` package: pip install datasets, or give a file"
        ) from error
    dataset, _, split = name.partition(":")
    rows: Iterable = datasets.load_dataset(dataset, split=split or "train", streaming=True)
    for number, row in enumerate(rows):
        yield as_record(row, number, f"{_HUB}{name}[{number}]")
