"""What `jspec batch` can be asked, as typed flags; light to import, so that help is instant."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from jspec.commands.options import (
    ChatFlags,
    ModelFlags,
    SamplingFlags,
    Switch,
    TreeFlags,
    VerifyFlags,
)


@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """Where requests come from and where answers go.

    Attributes:
        input: a JSONL file of requests, perhaps gzipped (.gz), or - for stdin.
        output: the JSONL file that answers are appended to; each is on disk before it counts.
        resume: go on with an output that is there: what it answers is skipped.
        ordered: answers in the order of the requests instead of that in which they end.
        metrics_json: write the figures of the run to this file.
    """

    input: Annotated[Path, arg(metavar="FILE")]
    output: Annotated[Path, arg(metavar="OUT")]
    resume: Switch = False
    ordered: Switch = False
    metrics_json: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """How the device is used.

    Attributes:
        slots: requests that run side by side on each replica.
        capacity: tokens a request's prompt and answer may have together.
        rounds: between looks of the host; what a slot is late to end is lost.
        memory_limit: MiB on one device; a plan above it is refused with its numbers.
        data_parallel: replicas, each with all of the weights and slots of its own.
        tensor_parallel: devices that the weights of one replica are split over.
    """

    slots: int = 8
    capacity: int = 2048
    rounds: int = 8
    memory_limit: Annotated[
        int | None, arg(metavar="MIB", help_behavior_hint="(default: what the device has)")
    ] = None
    data_parallel: int = 1
    tensor_parallel: int = 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Options of `jspec batch`."""

    model: ModelFlags
    files: FileFlags
    serving: ServeFlags = field(default_factory=ServeFlags)
    chat: ChatFlags = field(default_factory=ChatFlags)
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    tree: TreeFlags = field(default_factory=TreeFlags)
    verify: VerifyFlags = field(default_factory=VerifyFlags)
