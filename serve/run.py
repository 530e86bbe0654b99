"""`jspec batch`: from flags to servers, with a progress bar and a summary."""

import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jspec.commands.figures import check_writable, write_json
from jspec.commands.parts import drafter_from, rule_from, sampling_from, target_from, tree_from
from jspec.commands.prompts import Request
from jspec.commands.show import PlainConsole
from jspec.engine import Engine, Prompt
from serve.devices import replicate
from serve.job import Job, Tally, count_lines, read_lines
from serve.journal import Journal
from serve.lines import LineRequest
from serve.options import Batch
from serve.server import Counters, Server

SOME_FAILED = 1
"""Exit code: the job is complete, and some lines have error records."""


def run(options: Batch) -> int:
    """Answer a file of requests.

    Returns:
        0; 1 where some lines have error records; 128 + the signal that stopped the job.
    """
    files = options.files
    chat = options.chat.wanted()
    tree, defaults = tree_from(options.model, options.tree), vars(sampling_from(options.sampling))
    if files.metrics_json is not None:
        check_writable(files.metrics_json)
    total = count_lines(files.input)
    journal = Journal(files.output, resume=files.resume)
    try:
        servers = _servers(options, tree)
        tokenizer = servers[0].engine.target.tokenizer
        if chat and not tokenizer.has_chat_template:
            raise ValueError("--chat: the model has no chat template; drop --chat.")
        chat = tokenizer.has_chat_template if chat is None else chat
        print(f"jspec: memory planned: {servers[0].plan}", file=sys.stderr)
        with _progress(total, servers) as show:
            job = Job(
                servers,
                journal,
                defaults,
                lambda request: as_prompt(request, chat),
                ordered=files.ordered,
                progress=show,
            )
            tally = _run(job, read_lines(files.input))
    finally:
        journal.close()
    figures = _figures(tally, servers, journal)
    print(_summary(figures, job.stopped), file=sys.stderr)
    if files.metrics_json is not None:
        write_json(files.metrics_json, figures)
    if job.stopped is not None:
        return 128 + int(job.stopped)
    return SOME_FAILED if tally.failed or journal.failed else 0


def _run(job: Job, lines: Iterator[tuple[int, bytes]]) -> Tally:
    try:
        return job.run(lines)
    except RuntimeError as error:
        raise ValueError(
            f"a server broke: {error}; what is answered is on disk, and --resume does the rest."
        ) from error


def as_prompt(request: LineRequest, chat: bool) -> Prompt:
    """What the engine takes.

    Args:
        request: a line.
        chat: whether a plain prompt of jspec's own form is a message of the user.

    Raises:
        ValueError: messages without a chat template.
    """
    content = request.prompt
    if request.form == "completion" or (isinstance(content, list) and type(content[0]) is int):
        return content
    place = f"line {request.number}"
    return Request(id=request.name, content=content, place=place).as_prompt(
        chat or request.form == "chat"
    )


def _servers(options: Batch, tree) -> list[Server]:
    serving = options.serving
    rule = rule_from(options.model, options.verify)
    target = target_from(options.model)
    engine = Engine(
        target,
        drafter_from(options.model),
        tree=tree,
        implementation="xla" if serving.tensor_parallel > 1 else None,
        verification=rule,
        draft_temperature=options.verify.draft_temperature,
        simulate_accept_length=options.model.simulate_accept_length,
    )
    replicas = replicate(
        engine,
        data_parallel=serving.data_parallel,
        tensor_parallel=serving.tensor_parallel,
    )
    limit = None if serving.memory_limit is None else serving.memory_limit * 2**20
    return [
        Server(
            replica.engine,
            slots=serving.slots,
            capacity=serving.capacity,
            rounds=serving.rounds,
            memory_limit=limit,
            replica=replica,
        )
        for replica in replicas
    ]


class _progress:
    """A bar on stderr where that is a terminal: ETA, tokens/s, τ, occupancy."""

    def __init__(self, total: int | None, servers: list[Server]):
        self._servers = servers
        self._bar = Progress(
            BarColumn(),
            TextColumn("{task.completed} of {task.total}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
            console=PlainConsole(file=sys.stderr),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("requests", total=total, said="")
        self._next = 0.0

    def __enter__(self):
        self._bar.start()
        return self._show

    def __exit__(self, kind, error, trace) -> None:
        self._bar.stop()

    def _show(self, tally: Tally) -> None:
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + 0.2
        rate = tally.completion_tokens / max(tally.seconds, 1e-9)
        said = (
            f"{rate:.1f} tokens/s, τ {_figure(tally.accept_length)}, "
            f"slots {_figure(100 * _occupancy(self._servers))} %"
        )
        self._bar.update(self._task, completed=tally.done, said=said)


def _occupancy(servers: list[Server]) -> float:
    room = sum(server.counters.pieces * server.slots for server in servers)
    return sum(server.counters.seated for server in servers) / room if room else math.nan


def _figures(tally: Tally, servers: list[Server], journal: Journal) -> dict[str, Any]:
    seconds = tally.seconds
    total: list[Counters] = [server.counters for server in servers]
    return {
        "answered": tally.answered,
        "failed": tally.failed,
        "skipped": tally.skipped,
        "failed_before": journal.failed,
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "seconds": seconds,
        "tokens_per_second": tally.completion_tokens / seconds,
        "accept_length": tally.accept_length,
        "occupancy": _occupancy(servers),
        "pieces": sum(counters.pieces for counters in total),
        "replicas": len(servers),
        "slots": servers[0].slots,
        "capacity": servers[0].max_tokens,
        "planned_bytes": {**vars(servers[0].plan), "total": servers[0].plan.total},
        "traces": dict(servers[0].engine.traces),
    }


def _summary(figures: dict[str, Any], stopped: int | None) -> str:
    said = (
        f"jspec: {figures['answered']} answered, {figures['failed']} failed, "
        f"{figures['skipped']} skipped in {figures['seconds']:.1f} s: "
        f"{figures['completion_tokens']} tokens, {figures['tokens_per_second']:.1f} tokens/s, "
        f"τ {_figure(figures['accept_length'])}, "
        f"slots {_figure(100 * figures['occupancy'])} % taken"
    )
    return said if stopped is None else f"{said}; stopped early: --resume does the rest"


def _figure(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.2f}"
