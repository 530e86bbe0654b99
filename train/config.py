"""What a training run is told, as small frozen dataclasses; light to import.

Groups of flags on the command line, arguments from Python.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Divergence = Literal["ce", "hard_ce", "kl", "lk_alpha", "lk_lambda"]
"""ce: soft cross-entropy. hard_ce: with the likeliest token alone. kl: has ce's gradient.
lk_alpha: -log of the acceptance rate a = Σ min(p, q). lk_lambda: w·ce + (1 - w)·(1 - a), where w
falls as the step's mean a rises."""

Start = Literal["target", "random"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is learnt from.

    Attributes:
        data: a data file, see `jspec data inspect --help`.
        max_length: longer examples lose their end.
        batch_tokens: of a batch, padding included.
        packing: several examples share a sequence of max_length; otherwise sequences are padded to
            a power of two.
        validation: share of the examples kept for evaluation.
        limit: only this many records.
        last_turn_only: of several answers supervise only the last.
        features: a folder to keep the target's hidden states in; what is missing there is added.
            Without it the target runs at every step.
    """

    data: str
    max_length: int = 1024
    batch_tokens: int = 2048
    packing: bool = True
    validation: float = 0.03
    limit: int | None = None
    last_turn_only: bool = False
    features: Path | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay.

    Attributes:
        learning_rate: at its peak.
        warmup: share of the steps over which it rises.
        final: share of the peak that is left at the end.
        beta1: of AdamW, as are the next three.
        beta2: see beta1.
        eps: see beta1.
        weight_decay: see beta1.
        clip: largest global norm of a gradient; 0 for none.
        accumulate: batches a step.
        ema: decay of a moving average of the weights, which is then evaluated and exported; 0 for
            none.
        max_bad_steps: steps in a row with a loss or gradient that is not finite before the run
            stops; each of them is skipped and counted.
    """

    learning_rate: float = 3e-4
    warmup: float = 0.03
    final: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.5
    accumulate: int = 1
    ema: float = 0.0
    max_bad_steps: int = 10

    def __post_init__(self):
        if self.learning_rate <= 0 or self.accumulate < 1 or not 0 <= self.ema < 1:
            raise ValueError(
                f"learning_rate={self.learning_rate}, accumulate={self.accumulate}, "
                f"ema={self.ema}; expected above 0, at least 1, and 0 <= ema < 1"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long a run is, and what it leaves behind.

    Attributes:
        out: folder of the run: `head` (the best one so far), `metrics.jsonl`, `checkpoints`,
            `run.json`.
        epochs: passes over the data.
        steps: optimiser steps; overrides epochs.
        resume: go on from the newest checkpoint in `out`.
        save_every: steps between checkpoints.
        keep: newest checkpoints kept.
        eval_every: steps between evaluations on the validation side.
        eval_batches: of one evaluation, at most.
        log_every: steps between lines on the terminal; the file gets every step.
        seed: of data order, first weights and noise.
        devices: to spread over, of all processes together; default all.
        fsdp: split the weights over the devices too.
        dtype: to compute in, float32 or bfloat16; default the target's. Weights stay float32.
        tensorboard: write event files as well.
        quiet: nothing on the terminal.
        coordinator: HOST:PORT of process 0, where several processes train together; each is
            started with the same command and its own number.
        processes: how many there are.
        process: number of this one, from 0.
    """

    out: Path
    epochs: float = 1.0
    steps: int | None = None
    resume: bool = False
    save_every: int = 200
    keep: int = 2
    eval_every: int = 200
    eval_batches: int = 16
    log_every: int = 10
    seed: int = 0
    devices: int | None = None
    fsdp: bool = False
    dtype: str | None = None
    tensorboard: bool = False
    quiet: bool = False
    coordinator: str | None = None
    processes: int = 1
    process: int = 0

    def __post_init__(self):
        if (self.coordinator is None) != (self.processes == 1):
            raise ValueError(
                f"processes={self.processes}, coordinator={self.coordinator!r}; several processes "
                "need a coordinator HOST:PORT, and one needs none"
            )
        if not 0 <= self.process < self.processes:
            raise ValueError(
                f"process={self.process}; expected 0 to {self.processes - 1}, one of "
                f"{self.processes} processes"
            )


@dataclass(frozen=True, kw_only=True)
class Eagle3Objective:
    """What an EAGLE-3 head is trained for.

    Attributes:
        num_steps: K, draft steps unrolled; 1 is no training-time test.
        decay: weight of step k is decay^k.
        divergence: of draft from target distribution.
        mean: over supervised rows, or over all B·T rows as the references do.
        drop_out_of_vocab: rows whose likeliest token the head cannot say give no loss.
        cross_texts: also count guesses about the next text packed behind a row's own, as
            speculators does.
        kl_scale: weight of the cross-entropy in lk_lambda, kl_scale · exp(-kl_decay · a).
        kl_decay: see kl_scale.
        chunk: teacher rows whose logits are held at a time, in all sequences together.
    """

    num_steps: int = 5
    decay: float = 0.8
    divergence: Divergence = "ce"
    mean: Literal["supervised", "rows"] = "supervised"
    drop_out_of_vocab: bool = True
    cross_texts: bool = False
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    chunk: int = 128

    def __post_init__(self):
        if self.num_steps < 1 or not 0 < self.decay <= 1:
            raise ValueError(
                f"num_steps={self.num_steps}, decay={self.decay}; expected at least 1, and "
                "0 < decay <= 1"
            )


@dataclass(frozen=True, kw_only=True)
class Eagle3HeadConfig:
    """The head.

    Attributes:
        draft_vocab_size: tokens it can say, the most frequent ones of the answers.
        feature_layers: target layers whose output it reads; default the three usual ones.
        start: from the target's own last layer and head rows, or random.
        objective: what it is trained for.
        export_dtype: of the file.
        format: of the file: specforge, safeailab or speculators.
    """

    draft_vocab_size: int = 8192
    feature_layers: tuple[int, ...] | None = None
    start: Start = "target"
    objective: Eagle3Objective = field(default_factory=Eagle3Objective)
    export_dtype: str = "bfloat16"
    format: Literal["specforge", "safeailab", "speculators"] = "specforge"


@dataclass(frozen=True, kw_only=True)
class Eagle1Objective:
    """What an EAGLE-1 head is trained for.

    Attributes:
        regression: weight of the smooth L1 loss between hidden states.
        classification: weight of the soft cross-entropy of what the target's head says to them.
        noise: width of the uniform noise on hidden states, for sequences of 512.
        chunk: rows whose logits are held at a time, in all sequences together.
    """

    regression: float = 1.0
    classification: float = 0.1
    noise: float = 0.2
    chunk: int = 64


@dataclass(frozen=True, kw_only=True)
class Eagle1HeadConfig:
    """The head: one layer like the target's, whose embedding and head it shares.

    Attributes:
        start: from the target's own last layer, or random.
        objective: what it is trained for.
        export_dtype: of the file, in SafeAILab's layout.
    """

    start: Start = "target"
    objective: Eagle1Objective = field(default_factory=Eagle1Objective)
    export_dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class MedusaObjective:
    """What Medusa heads are trained for.

    Attributes:
        decay: weight of head k is decay^k.
        labels: the data's own tokens (hard), or the target's distribution (soft).
        chunk: rows whose logits are held at a time, in all sequences together.
    """

    decay: float = 0.8
    labels: Literal["hard", "soft"] = "soft"
    chunk: int = 64


@dataclass(frozen=True, kw_only=True)
class MedusaHeadConfig:
    """The heads: residual blocks that start as the identity, and a projection.

    Attributes:
        num_heads: K.
        num_layers: residual blocks a head.
        projection: a matrix for each head (own), one for all (one), or the target's, frozen.
        draft_vocab_size: tokens they can say; all of the target's with projection target.
        objective: what they are trained for.
        export_dtype: of the file.
    """

    num_heads: int = 4
    num_layers: int = 1
    projection: Literal["own", "one", "target"] = "one"
    draft_vocab_size: int = 8192
    objective: MedusaObjective = field(default_factory=MedusaObjective)
    export_dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class MTPObjective:
    """What a prediction module is trained for.

    Attributes:
        num_steps: K, how often the module is run; 1 is DeepSeek-V3's objective.
        decay: step k weighs decay^k.
        weight: of the module's loss beside the target's own, in joint training.
        labels: the data's own tokens (hard), or the target's distribution (soft).
        chunk: rows whose logits are held at a time, in all sequences together.
    """

    num_steps: int = 3
    decay: float = 0.6
    weight: float = 0.3
    labels: Literal["hard", "soft"] = "hard"
    chunk: int = 128

    def __post_init__(self):
        if self.num_steps < 1 or not 0 < self.decay <= 1 or self.weight <= 0:
            raise ValueError(
                f"num_steps={self.num_steps}, decay={self.decay}, weight={self.weight}; expected "
                "at least 1, 0 < decay <= 1, and above 0"
            )


@dataclass(frozen=True, kw_only=True)
class MTPHeadConfig:
    """The module: norms and a projection around one block like the target's.

    Attributes:
        joint: train the target as well; what is written is then another model.
        start: from the module in the target's checkpoint (own), from the target's last layer
            (target), or random.
        objective: what it is trained for.
        export_dtype: of what was trained; default as the target's checkpoint has it.
        format: mtp is the target's checkpoint with the module in it, mtp-modules and nextn are the
            module alone, see `jspec export --help`.
    """

    joint: bool = False
    start: Literal["own", "target", "random"] = "own"
    objective: MTPObjective = field(default_factory=MTPObjective)
    export_dtype: str | None = None
    format: Literal["mtp", "mtp-modules", "nextn"] = "mtp"
