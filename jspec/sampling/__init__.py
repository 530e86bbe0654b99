"""What a request may ask of sampling, and the functions that turn logits into tokens.

Plain and speculative decoding share them.
"""

from jspec.sampling.history import History, branch_tokens
from jspec.sampling.logprobs import LogprobLog
from jspec.sampling.node_logits import NodeLogits
from jspec.sampling.noise import draft_keys, token_uniforms, verdict_uniforms
from jspec.sampling.params import SamplingParams
from jspec.sampling.processing import (
    Shaping,
    asked_columns,
    check_tokens,
    forced_width,
    process_logits,
)
from jspec.sampling.tokens import (
    NO_TOKEN,
    choose_tokens,
    draw,
    likeliest,
    probabilities,
    weights,
)

__all__ = [
    "NO_TOKEN",
    "History",
    "LogprobLog",
    "NodeLogits",
    "SamplingParams",
    "Shaping",
    "asked_columns",
    "branch_tokens",
    "check_tokens",
    "choose_tokens",
    "draft_keys",
    "draw",
    "forced_width",
    "likeliest",
    "probabilities",
    "process_logits",
    "token_uniforms",
    "verdict_uniforms",
    "weights",
]
