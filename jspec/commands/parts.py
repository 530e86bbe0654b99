"""From flags to engines and prompts; what can be refused early is refused before a model loads."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from jspec.cache_dirs import enable_compilation_cache
from jspec.commands.options import (
    ChatFlags,
    ModelFlags,
    SamplingFlags,
    TargetFlags,
    TreeFlags,
    VerifyFlags,
)
from jspec.commands.prompts import Request
from jspec.drafters.shipped import default_drafter
from jspec.engine import Engine
from jspec.sampling import SamplingParams
from jspec.targets import Target, load_target
from jspec.trees import StaticTree, TreeConfig, TreeSpec, from_choices
from jspec.verify import RULES, Rule, Thresholds, TypicalAcceptance


def tree_from(model: ModelFlags, tree: TreeFlags) -> TreeSpec | None:
    """The tree that was asked for; None without a drafter, or where the drafter may choose.

    Raises:
        ValueError: a tree that cannot exist, or one without a drafter.
    """
    given = tree.given()
    if not given:
        return None
    if model.drafter == "none":
        raise ValueError(f"{_flags(given)} needs a drafter; leave it out for plain decoding.")
    if tree.tree is None:
        return TreeConfig(**given)
    given.pop("tree")
    if given:
        raise ValueError(f"--tree gives the whole shape; leave out {_flags(given)}.")
    return read_tree(tree.tree)


def read_tree(path: Path) -> StaticTree:
    """A static tree from a JSON list of nodes, each the list of ranks that leads to it.

    Raises:
        ValueError: a file that cannot be read or holds something else, or a tree that cannot exist.
    """
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ValueError(
            f"cannot read {path}: {reason}; expected a list of nodes such as [[0], [1], [0, 0]]."
        ) from error
    whole = isinstance(choices, list) and all(
        isinstance(node, list) and all(type(rank) is int for rank in node) for node in choices
    )
    if not whole:
        raise ValueError(f"{path}: expected a list of nodes such as [[0], [1], [0, 0]].")
    try:
        return from_choices(choices)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _flags(given: Iterable[str]) -> str:
    return " ".join(f"--{name.replace('_', '-')}" for name in given)


def sampling_from(flags: SamplingFlags) -> SamplingParams:
    """The sampling that was asked for.

    Raises:
        ValueError: a value outside its range.
    """
    bias = {}
    for entry in flags.logit_bias:
        token, colon, value = entry.partition(":")
        try:
            bias[int(token)] = float(value if colon else "")
        except ValueError:
            raise ValueError(
                f"--logit-bias {entry}: expected a token id and a number, such as 17:-2.5."
            ) from None
    return SamplingParams(**{**vars(flags), "logit_bias": bias})


def rule_from(model: ModelFlags, flags: VerifyFlags) -> Rule | None:
    """The verification rule that was asked for; None for the one that suits the draft.

    Raises:
        ValueError: a rule's setting without the rule, a value outside its range, or no drafter.
    """
    given = flags.given()
    if given and model.drafter == "none":
        raise ValueError(f"{_flags(given)} needs a drafter; leave it out for plain decoding.")
    settings = {}
    for flag, (rule, name) in {
        "threshold_single": (Thresholds, "single"),
        "threshold_acc": (Thresholds, "acc"),
        "typical_epsilon": (TypicalAcceptance, "epsilon"),
        "typical_delta": (TypicalAcceptance, "delta"),
    }.items():
        if flag not in given:
            continue
        if flags.verification != rule.name:
            raise ValueError(f"{_flags([flag])} is a setting of --verification {rule.name}.")
        settings[name] = given[flag]
    return None if flags.verification is None else RULES[flags.verification](**settings)


def drafter_from(model: ModelFlags) -> str:
    """Name of the drafter: the one asked for, else the one that suits the target."""
    return default_drafter(model.target) if model.drafter is None else model.drafter


def target_from(model: TargetFlags) -> Target:
    """Load the target, with the compilation cache in place unless it is not wanted."""
    if model.compilation_cache:
        enable_compilation_cache()
    return load_target(model.target, dtype=model.dtype)


def encode_all(engine: Engine, requests: Sequence[Request], flags: ChatFlags) -> list[list[int]]:
    """Token ids of every prompt.

    Raises:
        ValueError: a prompt that cannot be used, with its place; nothing was generated.
    """
    wanted = flags.wanted()
    tokenizer = engine.target.tokenizer
    if wanted and not tokenizer.has_chat_template:
        raise ValueError(
            f"--chat: the tokenizer of {engine.target.name} has no chat template; drop --chat, or "
            "use an instruction-tuned model."
        )
    chat = tokenizer.has_chat_template if wanted is None else wanted
    ids = []
    for request in requests:
        prompt = request.as_prompt(chat)
        try:
            ids.append(engine.encode(prompt))
        except ValueError as error:
            raise ValueError(f"{request.place}: {error}") from error
    return ids
