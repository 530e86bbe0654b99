"""Does a drafter guess anything right? A few built-in prompts tell a useless one from a weak one.

A head that is read the wrong way round loads without an error and never has a guess accepted; the
text stays right, and only slow. So what was loaded can be tried once.
"""

import warnings

from jspec.drafters.base import Drafter
from jspec.targets.target import Target
from jspec.trees import TreeConfig, TreeSpec

USELESS = 0.05
"""Acceptance at depth 1 below which something is wrong: weak heads reach several times that."""

_TEXTS = (
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time there was a little girl who lived",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n",
)
_NEW_TOKENS = 24

_CAUSES = {
    "eagle3": (
        "the target layers it reads are counted by another convention (off by one)",
        "norm_before_residual, norm_output or another switch is not as it was trained",
    ),
    "eagle": ("the bias of fc is missing, or one was added", "it reads other features"),
    "medusa": (
        "the heads were trained with their model (Medusa-2), which has to be the target",
        "token_map is not the one of these heads",
        "the residual blocks lost their bias",
    ),
}
_ANY_CAUSE = (
    "it was trained for another target, or another version of it",
    "rope_theta or rope_scaling of its config is not as it was trained",
    "the target is quantised or rotated, and its hidden states are not what it learned",
    "it was trained on another chat template than plain text comes close to",
)


def probe_acceptance(target: Target, drafter: Drafter, tree: TreeSpec | None = None) -> float:
    """Share of rounds whose guess at depth 1 is the target's own token, over short greedy texts.

    Costs one prefill and at most 24 rounds of three slots, and compiling them.

    Args:
        target: without a tokenizer it continues arbitrary token ids.
        drafter: made for it.
        tree: drafted each round; default one node, so that only the first guess counts.

    Returns:
        0 to 1; NaN where the drafter proposed nothing at all.
    """
    # The engine is built on drafters; only trying one out goes the other way.
    from jspec.engine import Engine
    from jspec.engine.stats import acceptance_by_depth
    from jspec.sampling import SamplingParams

    tree = tree or TreeConfig(num_steps=1, topk=1)
    prompts = _prompts(target)
    engine = Engine(target, drafter, tree=tree, batch_size=len(prompts))
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=_NEW_TOKENS))
    return acceptance_by_depth([output.stats for output in outputs])[0]


def warn_if_useless(target: Target, drafter: Drafter, tree: TreeSpec | None = None) -> float:
    """Measure `probe_acceptance`, and warn with the likely causes where it is near zero.

    Returns:
        What was measured. Nothing is refused: the text is right with any drafter.
    """
    measured = probe_acceptance(target, drafter, tree)
    if measured < USELESS:
        causes = "; ".join((*_CAUSES.get(drafter.name, ()), *_ANY_CAUSE))
        warnings.warn(
            f"{drafter.name} guesses {measured:.1%} of the next tokens of {target.name} right on "
            f"built-in prompts, so it only slows decoding down. Likely causes: {causes}.",
            stacklevel=3,
        )
    return measured


def _prompts(target: Target) -> list[str | list[int]]:
    if target.find_tokenizer() is not None:
        return list(_TEXTS)
    vocab = target.config.vocab_size
    return [[(place * vocab) // 5 % vocab, vocab // 2] for place in range(1, 1 + len(_TEXTS))]
