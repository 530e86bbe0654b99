"""The `jspec` command: chooses a command, and turns what users get wrong into one line.

Nothing heavy is imported before a command runs, so that help and version answer at once.
"""

import contextlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

PIPE_CLOSED = 141
"""128 + SIGPIPE."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One word after `jspec`.

    Attributes:
        options: its dataclass: a name in `jspec.commands.options`, or `module:name`.
        module: whose `run(options)` does it.
        summary: a line in the overview.
        description: the top of its help, with examples.
    """

    options: str
    module: str
    summary: str
    description: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """A word after `jspec` with commands of its own, which live outside of the package.

    Attributes:
        table: `module:name` of its commands.
        summary: a line in the overview.
    """

    table: str
    summary: str


COMMANDS = {
    "generate": Command(
        options="Generate",
        module="jspec.commands.generate",
        summary="continue a prompt, or every prompt of a file",
        description="""\
Continue a prompt, or every prompt of a file.
  The text appears as it is made, with the accepted tokens of the drafter
  marked, and ends with one line: tokens, tokens/s, τ (tokens a round), rounds.
  The speed is that of decoding: the prompt's own pass and rounds that had to
  compile do not count.

Examples:
  jspec generate --target smollm2-135m --prompt "Say 'ice cream' three times."
  jspec generate --target smollm2-135m --prompt "1, 2, 3," --no-chat --show-tree
  jspec generate --target ./model --drafter none --prompts questions.jsonl --json > answers.jsonl
""",
    ),
    "bench": Command(
        options="Bench",
        module="jspec.commands.bench",
        summary="measure plain against speculative decoding",
        description="""\
Measure plain against speculative decoding.
  Every prompt is decoded both ways in turns, after a warm-up that does not
  count. Reported are medians, what an engine without any overhead would reach
  (ideal speedup), and whether both ways wrote the same tokens.

Examples:
  jspec bench --target smollm2-135m --max-new-tokens 64
  jspec bench --target smollm2-135m --prompts questions.jsonl --limit 10 --json result.json
  jspec bench --target ./model --num-steps 3 --topk 1 --simulate-accept-length 2.5
""",
    ),
    "batch": Command(
        options="serve.options:Batch",
        module="serve.run",
        summary="answer a file of requests, as fast as the devices allow",
        description="""\
Answer a file of requests with continuous batching: JSONL in, JSONL out.
  A line is {"id", "prompt" or "messages", sampling …} or a line of OpenAI's
  batch format (custom_id, method, url, body); its answer has the same form.
  What a line leaves out is taken from the flags; num_steps limits its draft, 0
  is none. A line that cannot be served
  gets an error record with its number and field, and the job goes on.
  Answers are appended and on disk before they count; after a crash or Ctrl-C
  --resume does what is missing. python -m serve.batch is the same command.
  Exit code: 0, 1 when some lines have error records, 2 when the job could not
  run, 130 or 143 when a signal stopped it.

Examples:
  jspec batch --target smollm2-135m --input questions.jsonl --output answers.jsonl
  jspec batch --target smollm2-135m --input questions.jsonl --output answers.jsonl --resume
  zcat in.gz | jspec batch --target ./model --drafter none --slots 24 --input - --output out.jsonl
""",
    ),
    "export": Command(
        options="Export",
        module="jspec.commands.export",
        summary="write a draft head in another format",
        description="""\
Write a draft head in another format.
  Formats are safeailab, specforge and speculators for EAGLE heads, medusa and
  vllm-medusa for Medusa heads; for prediction modules mtp (the target's whole
  checkpoint with them), mtp-modules (them alone) and nextn (one alone, as
  SGLang's draft folders have it). Tensors keep their bits; what a format
  cannot say is refused.

Examples:
  jspec export ./head --target smollm2-135m --to speculators --out ./head-for-vllm
  jspec export ./medusa --target ./model --to vllm-medusa --out ./medusa-for-vllm
  jspec export mtp --target ./deepseek --to nextn --out ./deepseek-nextn
""",
    ),
    "tune-tree": Command(
        options="TuneTree",
        module="jspec.commands.tune_tree",
        summary="find the best static tree for Medusa heads",
        description="""\
Find the best static tree for Medusa heads.
  The target continues the prompts greedily; how often each head was right at
  each rank decides which nodes a tree of that size should have. The result is
  a JSON list of nodes for --tree.

Examples:
  jspec tune-tree --target ./model --drafter ./heads --num-nodes 64 --output tree.json
  jspec generate --target ./model --drafter ./heads --tree tree.json --prompt "Hello"
""",
    ),
    "plan": Command(
        options="Plan",
        module="jspec.commands.plan",
        summary="find the tree that would be fastest, on paper or measured",
        description="""\
Find the tree that would be fastest, on paper or measured.
  On paper a pass takes as long as a datasheet's bandwidth and speed allow for
  what its shapes read and multiply; real passes take longer, their ratios are
  about right. What a round emits follows from the acceptance by depth.
  --measure counts and times all of that on this machine instead, and compares
  the speedup it predicts for the best tree with the one that is measured.

Examples:
  jspec plan --target llama-3-8b --drafter eagle3 --hardware h100
  jspec plan --target llama-3-8b --drafter llama-3.2-1b --hardware h100 --acceptance 0.7,0.7,0.7
  jspec plan --target deepseek-v3 --drafter mtp --hardware h200 --devices 8 --dtype float8 \\
      --batch 32
  jspec plan --target smollm2-135m --drafter ngram --measure
""",
    ),
    "fetch": Command(
        options="Fetch",
        module="jspec.commands.fetch",
        summary="download a model by its alias",
        description="""\
Download a model by its alias, once, and print where it is and what it is.

Examples:
  jspec fetch smollm2-135m
""",
    ),
}

GROUPS = {
    "train": Group(table="train.commands:TRAIN", summary="train a draft head, or measure one"),
    "data": Group(table="train.commands:DATA", summary="look at, answer or run training data"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: the words after `jspec`; default those of this process.

    Returns:
        Exit code: 0, 2 for what the user can fix (one line on stderr), 130 after Ctrl-C, 141 when
        the reader of a pipe left.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a narrow encoding must not end a generation
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has no reader either; without this Python complains at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (ValueError, NotImplementedError, OSError) as error:
        if os.environ.get("JSPEC_TRACEBACK"):
            raise
        print(f"jspec: error: {one_line(error)}", file=sys.stderr)
        return 2


def one_line(error: Exception | str) -> str:
    """What an error says, without line breaks."""
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def _run(words: list[str]) -> int:
    if not words:
        known = ", ".join((*COMMANDS, *GROUPS))
        raise ValueError(f"expected a command: {known}; see jspec --help.")
    if words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        from jspec import __version__

        print(f"jspec {__version__}")
        return 0
    if words[0] in GROUPS:
        return _run_in_group(words[0], words[1:])
    if words[0] not in COMMANDS:
        known = ", ".join((*COMMANDS, *GROUPS))
        raise ValueError(f"no command {words[0]!r}: expected {known}; see jspec --help.")
    return _run_command(COMMANDS[words[0]], words[0], words[1:])


def _run_in_group(group: str, words: list[str]) -> int:
    table: dict[str, Command] = _found(GROUPS[group].table)
    if words and words[0] in ("-h", "--help"):
        print("\n".join([f"usage: jspec {group} COMMAND [OPTIONS]", "", *_summaries(table)]))
        return 0
    if not words or words[0] not in table:
        said = f"no command {words[0]!r}" if words else "expected a command"
        raise ValueError(f"{said}: {', '.join(table)}; see jspec {group} --help.")
    return _run_command(table[words[0]], f"{group} {words[0]}", words[1:])


def _run_command(command: Command, name: str, words: list[str]) -> int:
    options = _parse(command, name, words)
    if options is None:
        return 0
    with _speaking_on_stderr():
        return import_module(command.module).run(options)


def _found(place: str) -> Any:
    """What `module:name` stands for."""
    module, name = place.split(":")
    return getattr(import_module(module), name)


def _summaries(table: Mapping[str, Command | Group]) -> list[str]:
    width = max(map(len, table))
    return [f"  {name:<{width}}  {command.summary}" for name, command in table.items()]


@contextlib.contextmanager
def _speaking_on_stderr() -> Iterator[None]:
    """What was found and what looks wrong: a line each, apart from the output."""

    class Stderr(logging.Handler):
        def emit(self, record):
            print(f"jspec: {record.getMessage()}", file=sys.stderr)

    logger = logging.getLogger("jspec")
    logger.handlers = [Stderr()]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    shown = warnings.showwarning

    def show(message, category, filename, lineno, file=None, line=None):
        if category is UserWarning:
            print(f"jspec: warning: {one_line(message)}", file=sys.stderr)
        else:
            shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


def _overview() -> str:
    return "\n".join(
        [
            "usage: jspec COMMAND [OPTIONS]",
            "",
            "Exact speculative decoding in JAX: draft a tree of tokens, verify it in one pass.",
            "",
            *_summaries(COMMANDS | GROUPS),
            "",
            "  jspec COMMAND --help  what a command can do, with examples",
            "  jspec --version",
            "",
            "Examples:",
            "  jspec fetch smollm2-135m",
            '  jspec generate --target smollm2-135m --prompt "Name three rivers in Africa."',
            "  jspec bench --target smollm2-135m --max-new-tokens 64",
        ]
    )


def _parse(command: Command, name: str, words: list[str]) -> Any:
    """The options of a command; None when its help was printed.

    Raises:
        ValueError: they cannot be read; one line instead of the parser's box.
    """
    import tyro

    place = (
        command.options if ":" in command.options else f"jspec.commands.options:{command.options}"
    )
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                _found(place),
                prog=f"jspec {name}",
                description=command.description,
                args=words,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if not stop.code:
            return None
        raise ValueError(_unbox(complaint.getvalue(), name)) from None


def _unbox(box: str, name: str) -> str:
    """The message inside the parser's box: without frame, title, option help and footer.

    The frame is one character wide on every side, and blank where the encoding has no lines.
    """
    said: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]:
        inside = line[1:].rstrip(" │")
        if "helptext" in inside:
            break
        indent = len(inside) - len(inside.lstrip())
        if inside.strip(" ─-╯") and indent <= 5:
            said.append(inside.strip())
    message = " ".join(said) or "the options cannot be read"
    return f"{message.rstrip('.')}; see jspec {name} --help."
