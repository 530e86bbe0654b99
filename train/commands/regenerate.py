"""`jspec data regenerate`: the target's own answers to a file's prompts."""

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import jspec
from jspec.cache_dirs import enable_compilation_cache
from train.data.records import Record, read_records
from train.options import Regenerate


def run(options: Regenerate) -> int:
    """Append one answered record after another to the file."""
    enable_compilation_cache()
    records = []
    for record in read_records(options.data):
        if options.limit is not None and len(records) >= options.limit:
            break
        if record.messages and question(record):
            records.append(record)
    if not records:
        raise ValueError(f"{options.data} holds no conversations with a question to answer")
    done = answered(options.out)
    waiting = [record for record in records if record.id not in done]
    console = Console(stderr=True)
    console.print(
        f"{len(records):,} questions, {len(records) - len(waiting):,} answered already",
        highlight=False,
    )
    if not waiting:
        return 0
    target = jspec.load_target(options.target)
    drafter = None if options.drafter == "none" else jspec.load_drafter(options.drafter, target)
    engine = jspec.Engine(target, drafter, batch_size=options.batch_size)
    began, tokens = time.perf_counter(), 0
    with (
        options.out.open("a", encoding="utf-8") as file,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("answers", total=len(waiting))
        for start in range(0, len(waiting), options.batch_size):
            group = waiting[start : start + options.batch_size]
            lines = answer(engine, group, options)
            tokens += sum(len(line["token_ids"]) for line in lines)
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
            progress.advance(task, len(group))
    seconds = time.perf_counter() - began
    console.print(f"{tokens:,} tokens, {tokens / seconds:.1f} tokens/s", highlight=False)
    return 0


def answer(
    engine: jspec.Engine, records: list[Record], options: Regenerate
) -> list[dict[str, Any]]:
    """Records with the target's answers; one that does not fit the context is left out."""
    longest = engine.target.config.max_context
    usable, prompts = [], []
    for record in records:
        try:
            ids = engine.encode(question(record))
        except ValueError:  # too long, or the template refuses it
            continue
        if len(ids) + options.max_new_tokens <= longest:
            usable.append(record)
            prompts.append(ids)
    if not prompts:
        return []
    sampling = [
        jspec.SamplingParams(
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            # Of the record, not of its place: what is answered in another batch is the same.
            seed=zlib.crc32(f"{options.seed} {record.id}".encode()) >> 1,
        )
        for record in usable
    ]
    lines = []
    for record, output in zip(usable, engine.generate(prompts, sampling), strict=True):
        said = {"role": "assistant", "content": output.text}
        lines.append(
            {
                "id": record.id,
                "messages": [*question(record), said],
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "temperature": options.temperature,
            }
        )
    return lines


def question(record: Record) -> list[dict[str, str]]:
    """Everything before a record's last answer, from the first message that is not an answer."""
    messages = list(record.messages or ())
    while messages and messages[0]["role"] == "assistant":
        messages.pop(0)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def answered(path: Path) -> set[str]:
    """Ids in an output file; a last line that broke off is cut away, to be answered again."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    return {str(json.loads(line)["id"]) for line in data[:whole].splitlines() if line.strip()}
