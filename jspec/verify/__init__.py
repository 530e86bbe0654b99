"""Verification rules: which drafted tokens are kept, and what follows them. A file each."""

from jspec.verify.block import BlockVerification
from jspec.verify.choose import RULES, choose_rule
from jspec.verify.rejection import RejectionSampling
from jspec.verify.rule import Rule, Slots
from jspec.verify.target_sampling import Greedy, TargetSampling
from jspec.verify.thresholds import Thresholds
from jspec.verify.typical import TypicalAcceptance

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
    "choose_rule",
]
