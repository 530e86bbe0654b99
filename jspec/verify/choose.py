"""Which rule an engine verifies by."""

from math import isfinite

from jspec.drafters.base import Drafter
from jspec.trees import TreeSpec
from jspec.verify.block import BlockVerification
from jspec.verify.rejection import RejectionSampling
from jspec.verify.rule import Rule, check_draws
from jspec.verify.target_sampling import TargetSampling
from jspec.verify.thresholds import Thresholds
from jspec.verify.typical import TypicalAcceptance

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        TargetSampling,
        RejectionSampling,
        BlockVerification,
        TypicalAcceptance,
        Thresholds,
    )
}
"""By the name that `Engine` takes."""


def choose_rule(
    verification: str | Rule | None,
    draft_temperature: float | None,
    drafter: Drafter | None,
    tree: TreeSpec | None,
) -> Rule:
    """The rule asked for, or the one that suits the draft: rejection if it is drawn.

    Raises:
        ValueError: an unknown rule, or a drafter or tree that cannot feed it, with the reason.
    """
    if drafter is None or tree is None:
        for name, value in (
            ("verification", verification),
            ("draft_temperature", draft_temperature),
        ):
            if value is not None:
                raise ValueError(f"{name}={value} needs a drafter; leave it out.")
        return TargetSampling()
    if draft_temperature is not None:
        if not (isfinite(draft_temperature) and draft_temperature > 0):
            raise ValueError(
                f"draft_temperature={draft_temperature}; expected a finite number above 0, or None "
                "to draft the likeliest children."
            )
        check_draws(drafter, tree, "draft_temperature")
    if verification is None:
        verification = TargetSampling() if draft_temperature is None else RejectionSampling()
    if isinstance(verification, str):
        if verification not in RULES:
            raise ValueError(
                f"verification={verification!r} is unknown; expected one of {', '.join(RULES)}."
            )
        verification = RULES[verification]()
    verification.check(drafter, tree)
    return verification
