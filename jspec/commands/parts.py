"""From flags to engines and prompts; what can be refused early is refused before a model loads."""

from collections.abc import Sequence

from jspec.cache_dirs import enable_compilation_cache
from jspec.commands.options import ChatFlags, ModelFlags, SamplingFlags, TreeFlags
from jspec.commands.prompts import Request
from jspec.engine import Engine
from jspec.sampling import SamplingParams
from jspec.targets import Target, load_target
from jspec.trees import TreeConfig


def tree_from(model: ModelFlags, tree: TreeFlags) -> TreeConfig | None:
    """The tree that was asked for; None without a drafter.

    Raises:
        ValueError: a tree that cannot exist, or one without a drafter.
    """
    if model.drafter != "none":
        return TreeConfig(**tree.given())
    if tree.given():
        flags = " ".join(f"--{name.replace('_', '-')}" for name in tree.given())
        raise ValueError(f"{flags} needs a drafter; leave it out for plain decoding.")
    return None


def sampling_from(flags: SamplingFlags) -> SamplingParams:
    """The sampling that was asked for.

    Raises:
        ValueError: a value outside its range.
    """
    return SamplingParams(**vars(flags))


def target_from(model: ModelFlags) -> Target:
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
