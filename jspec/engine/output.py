"""What a request gets back."""

from dataclasses import dataclass

from jspec.engine.stats import Stats
from jspec.engine.text import Piece
from jspec.trees.view import RoundView


@dataclass(frozen=True, kw_only=True)
class Output:
    """A finished text.

    Attributes:
        prompt_token_ids: what was continued.
        token_ids: what was generated, up to and including the token that ended the text.
        text: without special tokens, cut before a stop string; None where the target has no
            tokenizer.
        finish_reason: `stop` (an end token or a stop string) or `length` (max_new_tokens, or the
            model's context is full).
        stats: of the rounds that made it.
        logprobs: log-probability of every generated token under the target's unchanged logits;
            None unless asked for.
        top_logprobs: in each token's place, the likeliest tokens and theirs, likeliest first;
            None unless asked for.
        simulated: acceptance was simulated for timing; the text is not the target's.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    stats: Stats
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    simulated: bool = False


@dataclass(frozen=True, kw_only=True)
class Update:
    """News of a running text.

    Attributes:
        pieces: text that became certain, in order, marked by who wrote it.
        token_ids: tokens emitted since the last update.
        round: the last round's tree and path; None for the prefill.
        output: the finished text, in the last update only.
    """

    pieces: list[Piece]
    token_ids: list[int]
    round: RoundView | None = None
    output: Output | None = None
