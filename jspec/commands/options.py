"""What each command can be asked, as typed flags; light to import, so that help is instant.

Groups of flags are nested dataclasses whose names are not part of the flags. None leaves the choice
to the library, whose default the help repeats.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg


def _default(what: str, metavar: str | None = None) -> Any:
    """How the help names the default of a flag that may be left out."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {what})")


def _hint(metavar: str) -> Any:
    """A flag that may be left out and has no default to name."""
    return arg(metavar=metavar, help_behavior_hint="")


Switch = Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """The model that decides.

    Attributes:
        target: the model that decides: an alias (smollm2-135m), a folder of safetensors, a GGUF
            file, or a hub id such as org/name.
        dtype: of weights, activations and cache: float32 or bfloat16.
        compilation_cache: keep compiled programs in the user's cache folder (JSPEC_CACHE moves
            it), so that the next start does not compile again.
    """

    target: Annotated[str, arg(metavar="MODEL")]
    dtype: Annotated[str | None, _default("float32 on CPU, else bfloat16", "DTYPE")] = None
    compilation_cache: Annotated[bool, _default("on")] = True


@dataclass(frozen=True, kw_only=True)
class ModelFlags(TargetFlags):
    """The two models.

    Attributes:
        drafter: what proposes tokens: a head that jspec ships (smollm2-135m-eagle3); a folder or
            hub id of a draft head (EAGLE-1, EAGLE-2, EAGLE-3, Medusa; the format is recognised) or
            of a small model with the same vocabulary; mtp for the target's own modules; ngram
            looks tokens up in the text so far, none is plain decoding.
        simulate_accept_length: emit this many tokens a round on average, whatever the target says,
            to time the machinery; the output is marked and is not real text.
    """

    drafter: Annotated[str | None, _default("the target's shipped head, else ngram", "NAME")] = None
    simulate_accept_length: Annotated[float | None, _default("off", "FLOAT")] = None


@dataclass(frozen=True, kw_only=True)
class TreeFlags:
    """The draft of one round.

    Attributes:
        num_steps: levels below the root.
        topk: children kept per node; 1 means a chain.
        num_nodes: nodes verified a round, the root included.
        tree: a fixed shape instead, as jspec tune-tree writes it: a JSON list of nodes, each the
            list of ranks that leads to it, such as [[0], [1], [0, 0]].
    """

    num_steps: Annotated[int | None, _default("5, or what the drafter can", "INT")] = None
    topk: Annotated[int | None, _default("4", "INT")] = None
    num_nodes: Annotated[int | None, _default("8, or the whole chain for topk 1", "INT")] = None
    tree: Annotated[Path | None, _hint("FILE")] = None

    def given(self) -> dict[str, Any]:
        """The flags that were set."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How texts go on and where they end.

    Attributes:
        max_new_tokens: at most this many tokens are generated.
        temperature: 0 is greedy.
        top_k: draw from this many likeliest tokens.
        top_p: draw from the likeliest tokens that together hold this much probability.
        min_p: draw from tokens at least this probable relative to the likeliest.
        repetition_penalty: divides (where positive) or multiplies the logits of tokens in prompt or
            output.
        presence_penalty: subtracted from logits of tokens in the output.
        frequency_penalty: subtracted as often as the token is in the output.
        logit_bias: token id and what to add to its logit, such as 17:-2.5; -inf bans the token;
            may be given several times.
        seed: of the sampling noise; the same seed gives the same text, and by target sampling the
            same with and without a drafter.
        ignore_eos: do not stop at the model's own end tokens.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: Annotated[int, _default("off", "INT")] = 0
    top_p: Annotated[float, _default("off", "FLOAT")] = 1.0
    min_p: Annotated[float, _default("off", "FLOAT")] = 0.0
    repetition_penalty: Annotated[float, _default("off", "FLOAT")] = 1.0
    presence_penalty: Annotated[float, _default("off", "FLOAT")] = 0.0
    frequency_penalty: Annotated[float, _default("off", "FLOAT")] = 0.0
    logit_bias: Annotated[UseAppendAction[tuple[str, ...]], _hint("ID:VALUE")] = ()
    seed: Annotated[int | None, _default("a fresh one every time", "INT")] = None
    ignore_eos: Switch = False


@dataclass(frozen=True, kw_only=True)
class TextFlags(SamplingFlags):
    """How texts go on and where they end.

    Attributes:
        stop: cut the text before this string; may be given several times.
        logprobs: with --json: log-probabilities of the text's tokens, and of this many likeliest
            ones in the place of each.
    """

    stop: Annotated[UseAppendAction[tuple[str, ...]], _hint("TEXT")] = ()
    logprobs: Annotated[int | None, _default("none", "INT")] = None


@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """How drafted tokens are accepted where texts are sampled.

    Attributes:
        verification: target-sampling, rejection (for drawn drafts) and block (for drawn chains)
            keep the target's distribution; typical (Medusa's) and thresholds (SGLang's) are lossy.
        draft_temperature: the drafter draws its guesses at this temperature; needs a drafter that
            can, and a chain or a fixed tree.
        threshold_single: of thresholds: accept any child at least this probable.
        threshold_acc: of thresholds: divides the sum of the children's probabilities.
        typical_epsilon: of typical: accept any child more probable than this.
        typical_delta: of typical: lowers that bar where the target is undecided.
    """

    verification: Annotated[
        Literal["target-sampling", "rejection", "block", "typical", "thresholds"] | None,
        _default("rejection with --draft-temperature, else target-sampling", "RULE"),
    ] = None
    draft_temperature: Annotated[float | None, _default("that of the text", "FLOAT")] = None
    threshold_single: Annotated[float | None, _default("1, lossless", "FLOAT")] = None
    threshold_acc: Annotated[float | None, _default("1, lossless", "FLOAT")] = None
    typical_epsilon: Annotated[float | None, _default("0.09", "FLOAT")] = None
    typical_delta: Annotated[float | None, _default("0.3", "FLOAT")] = None

    def given(self) -> dict[str, Any]:
        """The flags that were set."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """Whether prompts go through the chat template; by default wherever the model has one.

    Attributes:
        chat: each prompt is a message of the user.
        no_chat: each prompt is plain text to continue.
    """

    chat: Switch = False
    no_chat: Switch = False

    def wanted(self) -> bool | None:
        """True, False, or None for the model's own way.

        Raises:
            ValueError: both were given.
        """
        if self.chat and self.no_chat:
            raise ValueError("--chat and --no-chat exclude each other; give one of them.")
        return True if self.chat else False if self.no_chat else None


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """What is continued: a text, or every line of a file.

    Attributes:
        prompt: one text.
        prompts: a JSONL file, or - for stdin; a line has `prompt` (text), `messages` (role and
            content) or MT-bench `turns` (the first counts), and perhaps an `id`.
    """

    prompt: Annotated[str | None, _hint("TEXT")] = None
    prompts: Annotated[Path | None, _hint("FILE")] = None


@dataclass(frozen=True, kw_only=True)
class ShowFlags:
    """How it is shown.

    Attributes:
        json: print one JSON object per prompt instead of the text.
        show_tree: draw the tree of every round: accepted path, rejected nodes, scores.
        mark: how accepted draft tokens are shown; auto is color on a terminal, brackets elsewhere.
    """

    json: Switch = False
    show_tree: Switch = False
    mark: Literal["auto", "color", "brackets", "none"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Options of `jspec generate`."""

    model: ModelFlags
    input: PromptFlags = field(default_factory=PromptFlags)
    output: ShowFlags = field(default_factory=ShowFlags)
    chat: ChatFlags = field(default_factory=ChatFlags)
    sampling: TextFlags = field(default_factory=TextFlags)
    verify: VerifyFlags = field(default_factory=VerifyFlags)
    tree: TreeFlags = field(default_factory=TreeFlags)


@dataclass(frozen=True, kw_only=True)
class MeasureFlags:
    """What is measured.

    Attributes:
        prompts: a JSONL file as for `jspec generate`, or - for stdin.
        limit: only this many prompts, the first ones.
        batch: prompts decoded side by side.
        repeats: measured runs of every prompt, each of the two ways.
        json: write the figures to this file, or - for stdout.
    """

    prompts: Annotated[Path | None, _default("four built-in ones", "FILE")] = None
    limit: Annotated[int | None, _default("all", "INT")] = None
    batch: int = 1
    repeats: int = 3
    json: Annotated[Path | None, _default("a table only", "OUT")] = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Options of `jspec bench`."""

    model: ModelFlags
    measure: MeasureFlags = field(default_factory=MeasureFlags)
    chat: ChatFlags = field(default_factory=ChatFlags)
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    verify: VerifyFlags = field(default_factory=VerifyFlags)
    tree: TreeFlags = field(default_factory=TreeFlags)


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Options of `jspec fetch`.

    Attributes:
        alias: short name of a model, such as smollm2-135m.
    """

    alias: Annotated[Positional[str], arg(metavar="ALIAS")]


@dataclass(frozen=True, kw_only=True)
class Export:
    """Options of `jspec export`.

    Attributes:
        drafter: the head: a folder, an alias or a hub id; mtp for the modules in the target's own
            checkpoint.
        target: the model it drafts for; its config is read, and what a format repeats of it.
        to: the format to write.
        out: a folder that does not exist yet.
        embedding: store the target's embedding beside a head written as speculators.
    """

    drafter: Annotated[Positional[str], arg(metavar="DRAFTER")]
    target: Annotated[str, arg(metavar="MODEL")]
    to: Literal[
        "safeailab",
        "specforge",
        "speculators",
        "medusa",
        "vllm-medusa",
        "mtp",
        "mtp-modules",
        "nextn",
    ]
    out: Annotated[Path, arg(metavar="FOLDER")]
    embedding: Annotated[bool, _default("on")] = True


@dataclass(frozen=True, kw_only=True)
class HeadsFlags(TargetFlags):
    """The target and its Medusa heads.

    Attributes:
        drafter: the heads: a folder, an alias or a hub id.
    """

    drafter: Annotated[str, arg(metavar="NAME")]


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """What the heads are judged by, and how large the tree may be.

    Attributes:
        num_nodes: nodes verified a round, the root included.
        ranks: candidates of each head that may become nodes.
        prompts: a JSONL file as for `jspec generate`, or - for stdin; the target continues each
            greedily, and the heads are judged by that.
        limit: only this many prompts, the first ones.
        max_new_tokens: at most this many tokens are generated for each.
        output: write the tree to this file.
    """

    num_nodes: int = 64
    ranks: int = 10
    prompts: Annotated[Path | None, _default("four built-in ones", "FILE")] = None
    limit: Annotated[int | None, _default("all", "INT")] = None
    max_new_tokens: int = 128
    output: Annotated[Path | None, _default("stdout", "OUT")] = None


@dataclass(frozen=True, kw_only=True)
class TuneTree:
    """Options of `jspec tune-tree`."""

    model: HeadsFlags
    search: SearchFlags = field(default_factory=SearchFlags)
    chat: ChatFlags = field(default_factory=ChatFlags)


@dataclass(frozen=True, kw_only=True)
class PlanModels:
    """The two models.

    Attributes:
        target: on paper: a name such as llama-3-8b, qwen3-8b, deepseek-v3 or smollm2-135m (a wrong
            one lists them all), or a folder with a config.json, whose weights are not needed. With
            --measure whatever `jspec generate` takes.
        drafter: on paper: eagle, eagle3, medusa, medusa-shared (one projection for all heads), mtp
            or ngram, their shapes derived from the target's; or a model as for --target that drafts
            by itself. With --measure whatever `jspec generate` takes.
        dtype: of weights and products: float8, bfloat16 or float32; with --measure float32 or
            bfloat16.
        draft_vocab: on paper: rows of the drafter's head.
        compilation_cache: with --measure: as for `jspec generate`.
    """

    target: Annotated[str, arg(metavar="MODEL")]
    drafter: Annotated[str, arg(metavar="NAME")]
    dtype: Annotated[
        str | None, _default("bfloat16; with --measure float32 on CPU, else bfloat16", "DTYPE")
    ] = None
    draft_vocab: Annotated[int | None, _default("32000 for eagle3, else all", "INT")] = None
    compilation_cache: Annotated[bool, _default("on")] = True


@dataclass(frozen=True, kw_only=True)
class PlanHardware:
    """Where it would run, and with how much at a time.

    Attributes:
        hardware: on paper: a100, h100, h200, b200, tpu-v5e, tpu-v5p or tpu-v6e at their
            datasheets' peaks, or this-machine, whose bandwidth and speed are measured first.
        devices: on paper: this many that share the model evenly; communication is taken as free.
        batch: texts side by side.
        context: on paper: tokens of each text so far.
    """

    hardware: Annotated[str | None, _hint("NAME")] = None
    devices: Annotated[int | None, _default("1", "INT")] = None
    batch: int = 1
    context: Annotated[int | None, _default("1024", "INT")] = None


@dataclass(frozen=True, kw_only=True)
class PlanAcceptance:
    """How often guesses are right, on paper; --measure counts it.

    Attributes:
        acceptance: of a chain, by depth: the share of first guesses that are right where those
            before were, such as 0.8,0.75,0.7. No deeper tree is considered. An assumption has to do
            where it is left out.
        siblings: what a tree's further children are worth: of the places where a node's first child
            is wrong, the share where the second, third, … is right, such as 0.35,0.15,0.08. The
            default assumes that each is right about 0.28 of what those before it missed, which is
            what the step from EAGLE's chain to its tree says.
    """

    acceptance: Annotated[str | None, _default("0.7 at each of 8 depths", "B1,B2,...")] = None
    siblings: Annotated[str | None, _default("0.28,0.2,0.15,...", "S1,S2,...")] = None


@dataclass(frozen=True, kw_only=True)
class PlanTrees:
    """Which trees are considered: every combination that can exist.

    Attributes:
        num_steps: levels below the root, such as 3,5.
        topk: children kept per node; 1 means a chain.
        num_nodes: nodes verified a round, the root included; chains have num_steps + 1.
        rows: of the table, the fastest trees; --json has all.
        json: write everything to this file, or - for stdout.
    """

    num_steps: Annotated[str | None, _default("1,2,3,4,5,6,7,8", "N,...")] = None
    topk: Annotated[str | None, _default("1,2,4,8", "K,...")] = None
    num_nodes: Annotated[
        str | None, _default("4,6,8,12,16,24,32,48,64; measured on a CPU to 16", "T,...")
    ] = None
    rows: int = 10
    json: Annotated[Path | None, _default("a table only", "OUT")] = None


@dataclass(frozen=True, kw_only=True)
class PlanMeasure:
    """Measuring instead of reckoning.

    Attributes:
        measure: decode real prompts on this machine: count acceptance, time passes of several
            widths and drafts of several sizes, plan with that, and then run the best tree against
            plain decoding to see whether the plan was right.
        prompts: a JSONL file as for `jspec generate`, or - for stdin.
        limit: only this many prompts, the first ones.
        max_new_tokens: at most this many tokens are generated for each.
        temperature: 0 is greedy.
        repeats: measured runs of every prompt, plain and with the best tree.
    """

    measure: Switch = False
    prompts: Annotated[Path | None, _default("four built-in ones", "FILE")] = None
    limit: Annotated[int | None, _default("all", "INT")] = None
    max_new_tokens: Annotated[int | None, _default("64", "INT")] = None
    temperature: Annotated[float | None, _default("0", "FLOAT")] = None
    repeats: Annotated[int | None, _default("3", "INT")] = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Options of `jspec plan`."""

    model: PlanModels
    place: PlanHardware = field(default_factory=PlanHardware)
    acceptance: PlanAcceptance = field(default_factory=PlanAcceptance)
    trees: PlanTrees = field(default_factory=PlanTrees)
    measure: PlanMeasure = field(default_factory=PlanMeasure)
    chat: ChatFlags = field(default_factory=ChatFlags)
