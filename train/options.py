"""The options of `jspec train` and `jspec data`, command by command.

The docstring of each training command is one that was run, and what came of it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, arg

from train.config import (
    DataConfig,
    Eagle1HeadConfig,
    Eagle3HeadConfig,
    MedusaHeadConfig,
    MTPHeadConfig,
    OptimizerConfig,
    RunConfig,
)

Switch = Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """The frozen model.

    Attributes:
        target: an alias (smollm2-135m), a folder of safetensors, a GGUF file, or a hub id.
        dry_run: say what would be done (shapes, parameters, memory, time), and stop.
        compilation_cache: keep compiled programs in the user's cache folder.
    """

    target: Annotated[str, arg(metavar="MODEL")]
    dry_run: Switch = False
    compilation_cache: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainEagle3:
    """Train an EAGLE-3 head.

    jspec train eagle3 --target smollm2-135m --data answers.jsonl.gz --out runs/eagle3
      --features runs/features --epochs 3 --num-steps 3 --learning-rate 1.5e-3
      --draft-vocab-size 8192

    940,095 tokens of the target's own answers, 1,398 steps, 38 minutes on two AVX512 cores after 30
    for the features: acceptance .56/.58/.61 by depth on held-out conversations, tau 2.08 as a chain
    of 3. By half of the first epoch a peak of 5e-4 had reached .32/.30/.30, and 1.5e-3 .35/.33/.32.
    """

    model: TargetFlags
    data: DataConfig
    run: RunConfig
    head: Eagle3HeadConfig = field(default_factory=Eagle3HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True, kw_only=True)
class TrainEagle1:
    """Train an EAGLE-1 head, which also serves as EAGLE-2.

    jspec train eagle1 --target smollm2-135m --data answers.jsonl.gz --out runs/eagle1
      --features runs/features --epochs 2
    """

    model: TargetFlags
    data: DataConfig
    run: RunConfig
    head: Eagle1HeadConfig = field(default_factory=Eagle1HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True, kw_only=True)
class TrainMedusa:
    """Train Medusa heads on a frozen target (Medusa-1).

    jspec train medusa --target smollm2-135m --data answers.jsonl.gz --out runs/medusa
      --features runs/features --epochs 1 --learning-rate 1e-3 --num-heads 3

    The same answers, 466 steps: acceptance .30/.25/.32 by depth on held-out conversations.
    """

    model: TargetFlags
    data: DataConfig
    run: RunConfig
    head: MedusaHeadConfig = field(default_factory=MedusaHeadConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-3))


@dataclass(frozen=True, kw_only=True)
class TrainMTP:
    """Train a prediction module that is run recurrently, with or without its target.

    jspec train mtp --target first --data corpus.jsonl --out run --joint --start random
    """

    model: TargetFlags
    data: DataConfig
    run: RunConfig
    head: MTPHeadConfig = field(default_factory=MTPHeadConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-4))


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Look at data as a training run would see it.

    Attributes:
        target: whose tokenizer and chat template are used.
        data: a data file.
        max_length: longer examples lose their end.
        limit: only this many records.
        last_turn_only: of several answers supervise only the last.
        sample: number of the example to show decoded.
    """

    target: Annotated[str, arg(metavar="MODEL")]
    data: str
    max_length: int = 2048
    limit: int | None = None
    last_turn_only: Switch = False
    sample: int = 0


@dataclass(frozen=True, kw_only=True)
class Features:
    """Write the target's hidden states for a data file.

    Attributes:
        feature_layers: target layers whose output is stored; default those of EAGLE-3 heads.
    """

    model: TargetFlags
    data: DataConfig
    feature_layers: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Regenerate:
    """Let the target answer the prompts of a data file.

    Attributes:
        target: who answers.
        data: whose prompts: everything before each record's last answer.
        out: JSONL, one record a line, appended to and flushed to disk; ids that are there already
            are skipped, so that a run that died goes on.
        drafter: to speed it up; the answers are the target's own either way.
        temperature: 0 is greedy.
        max_new_tokens: of an answer.
        batch_size: answers written side by side.
        limit: only this many records.
        seed: of the sampling noise.
    """

    target: Annotated[str, arg(metavar="MODEL")]
    data: str
    out: Path
    drafter: str = "none"
    temperature: float = 0.0
    max_new_tokens: int = 256
    batch_size: int = 8
    limit: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a head in the real engine.

    Attributes:
        target: the model that decides.
        drafter: the head, as for `jspec generate`.
        prompts: JSONL as for `jspec generate`; several files are reported one by one.
        limit: only this many prompts of each.
        max_new_tokens: of an answer.
        temperature: 0 is greedy.
        num_steps: levels of the tree below the root.
        topk: children kept a node.
        num_nodes: nodes verified a round, the root included.
        batch_size: prompts side by side.
        json: write the figures to this file too.
    """

    target: Annotated[str, arg(metavar="MODEL")]
    drafter: str
    prompts: tuple[Path, ...]
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    num_steps: int = 5
    topk: int = 4
    num_nodes: int = 8
    batch_size: int = 1
    json: Path | None = None
