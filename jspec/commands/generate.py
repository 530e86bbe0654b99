"""`jspec generate`: texts as they are made, or as JSON."""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from jspec.commands.figures import without_nan
from jspec.commands.options import Generate
from jspec.commands.parts import (
    drafter_from,
    encode_all,
    rule_from,
    sampling_from,
    target_from,
    tree_from,
)
from jspec.commands.prompts import Request, one_prompt, read_prompts
from jspec.commands.show import NOT_REAL, TextWriter, summary
from jspec.engine import Engine, Output, Update
from jspec.engine.text import Piece
from jspec.sampling import SamplingParams
from jspec.trees.draw import draw_round


@dataclass
class Clock:
    """Decoding speed: warm rounds only.

    The prompt's own pass does not count, nor a round that compiled, nor the first round of each
    width after that, in which XLA still sets up.

    Attributes:
        tokens: emitted while it ran.
        seconds: it ran.
        warm: pass widths that have run since the last compilation.
    """

    tokens: int = 0
    seconds: float = 0.0
    warm: set[bool] = field(default_factory=set)

    @property
    def tokens_per_second(self) -> float:
        """NaN where nothing could be timed."""
        return self.tokens / self.seconds if self.tokens else math.nan

    def restart(self) -> None:
        """Begin the next text."""
        self.tokens, self.seconds = 0, 0.0

    def time(self, engine: Engine, updates: Iterator[Update]) -> Iterator[Update]:
        """Pass the updates of `engine.stream` on and count them."""
        while True:
            traced, start = engine.traces.total(), time.perf_counter()
            update = next(updates, None)
            seconds = time.perf_counter() - start
            if update is None:
                return
            if engine.traces.total() != traced:
                self.warm.clear()
            if update.round is not None:
                drafted = any(node is not None for node in update.round.nodes[1:])
                if drafted in self.warm and engine.traces.total() == traced:
                    self.seconds += seconds
                    self.tokens += len(update.token_ids)
                self.warm.add(drafted)
            yield update


def run(options: Generate) -> int:
    """Generate for every prompt, in order."""
    output = options.output
    if output.json and output.show_tree:
        raise ValueError("--json and --show-tree exclude each other; give one of them.")
    if options.sampling.logprobs is not None and not output.json:
        raise ValueError("--logprobs are printed by --json; add it.")
    requests = _requests(options)
    options.chat.wanted()
    tree, sampling = tree_from(options.model, options.tree), sampling_from(options.sampling)
    rule = rule_from(options.model, options.verify)
    target = target_from(options.model)
    engine = Engine(
        target,
        drafter_from(options.model),
        tree=tree,
        batch_size=1,
        verification=rule,
        draft_temperature=options.verify.draft_temperature,
        simulate_accept_length=options.model.simulate_accept_length,
    )
    prompts = encode_all(engine, requests, options.chat)
    clock = Clock()
    for index, (request, ids) in enumerate(zip(requests, prompts)):
        clock.restart()
        if output.json:
            print(_json_line(engine, request, ids, sampling, clock), flush=True)
        else:
            writer = TextWriter(output.mark)
            if len(requests) > 1:
                gap = "\n" if index else ""
                writer.line(f"{gap}── {request.id} ──", style="bold")
            _show(engine, ids, sampling, writer, clock, show_tree=output.show_tree)
    return 0


def _requests(options: Generate) -> Sequence[Request]:
    prompt, prompts = options.input.prompt, options.input.prompts
    if (prompt is None) == (prompts is None):
        got = "neither" if prompt is None else "both"
        raise ValueError(f"expected either --prompt TEXT or --prompts FILE, got {got}.")
    return [one_prompt(prompt)] if prompt is not None else read_prompts(prompts)  # type: ignore[arg-type]


def _show(
    engine: Engine,
    ids: list[int],
    sampling: SamplingParams,
    writer: TextWriter,
    clock: Clock,
    *,
    show_tree: bool,
) -> None:
    simulated = engine.round.simulate_accept_length is not None
    if simulated:
        writer.line(f"({NOT_REAL})", style="bold red")
    name = engine.target.tokenizer.token_text
    held: list[Piece] = []
    number = 0
    output: Output | None = None
    for update in clock.time(engine, engine.stream(ids, sampling)):
        output = update.output
        if not show_tree:
            writer.pieces(update.pieces)
            continue
        held += update.pieces
        if update.round is not None:
            number += 1
            heading = Text().append(f"round {number}: ", style="bold")
            writer.line(heading.append_text(draw_round(update.round, name)).append("\n"))
    assert output is not None
    if show_tree:
        writer.pieces(held)
    stats = output.stats
    line = summary(
        len(output.token_ids), clock.tokens_per_second, stats.accept_length, stats.rounds
    )
    ends_line = _ends_with_newline(output.text)
    writer.line(("" if ends_line else "\n") + "\n" + line + (f" ({NOT_REAL})" if simulated else ""))


def _json_line(
    engine: Engine, request: Request, ids: list[int], sampling: SamplingParams, clock: Clock
) -> str:
    output: Output | None = None
    for update in clock.time(engine, engine.stream(ids, sampling)):
        output = update.output
    assert output is not None
    stats = output.stats
    entry: dict[str, Any] = {
        "id": request.id,
        "prompt": request.content,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "accept_length": stats.accept_length,
        "accept_lengths": stats.accept_lengths,
        "acceptance_by_depth": stats.acceptance_by_depth,
        "rounds": stats.rounds,
        "tokens_per_second": clock.tokens_per_second,
        "drafted": stats.drafted,
        "correct": stats.correct,
        "drafter": stats.drafter,
        "rule": stats.rule,
        "simulated": output.simulated,
    }
    if output.logprobs is not None and output.top_logprobs is not None:
        entry["logprobs"] = output.logprobs
        entry["top_logprobs"] = [
            [[token, value] for token, value in top.items()] for top in output.top_logprobs
        ]
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(without_nan(entry), ensure_ascii=not utf8, allow_nan=False)


def _ends_with_newline(text: str | None) -> bool:
    return not text or text.endswith("\n")
