"""Verification rules: which drafted tokens are kept, and what follows them. A file each."""

from jspec.verify.block import BlockVerification
from jspec.verify.rejection import RejectionSampling
from jspec.verify.rule import Rule, Slots, check_draws
from jspec.verify.target_sampling import Greedy, TargetSampling
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

__all__ = [
    "RULES",
    "BlockVerification",
    "Greedy",
    "RejectionSampling",
    "Rule",
    "Slots",
    "TargetSampling",
    "Thresholds",
    "TypicalAcceptance",
    "check_draws",
]
