"""What a request may ask of sampling."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    Logits are changed in transformers' order: bias and bans, repetition penalty, presence and
    frequency penalty, forced tokens, temperature, top-k, top-p, min-p. Every parameter means the
    same with and without a drafter.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        max_new_tokens: at most this many tokens are generated.
        seed: of the request's noise; the same seed gives the same text whatever the batch. None
            draws a fresh one.
        stop: strings that end the text; the text is cut before the first of them.
        stop_token_ids: tokens that end the text, beside the model's own end tokens.
        ignore_eos: do not stop at the model's own end tokens.
        top_k: draw from the k likeliest tokens, and from what ties with the k-th; 0 is off.
        top_p: draw from the likeliest tokens until they hold this much probability, the one that
            crosses it and what ties with it included; 1 is off.
        min_p: draw from tokens at least this probable relative to the likeliest; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or
            output; 1 is off, above 1 discourages.
        presence_penalty: subtracted from logits of tokens in the output.
        frequency_penalty: subtracted as often as the token is in the output.
        logit_bias: added to the logits of these tokens; -inf bans one.
        banned_token_ids: never generated.
        forced_token_ids: token that must stand at a place of the output, 0 for the first.
        logprobs: report every token's log-probability under the unchanged logits, and those of
            this many likeliest tokens at its place; None reports nothing.
        num_steps: draft at most this many levels below the root, 0 for none; None takes all of
            the tree. Changes how many rounds a text takes, never which text it is when greedy.
    """

    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_token_ids: tuple[int, ...] | list[int] = ()
    forced_token_ids: Mapping[int, int] = field(default_factory=dict)
    logprobs: int | None = None
    num_steps: int | None = None

    def __post_init__(self):
        expect = self._expect
        expect("temperature", 0.0 <= self.temperature < float("inf"), "a finite number, 0 or more")
        expect("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        seed = self.seed
        expect("seed", seed is None or 0 <= seed < 2**63, "0 to 2**63 - 1, or None")
        expect("top_k", self.top_k >= 0, "0 (off) or more")
        expect("top_p", 0.0 < self.top_p <= 1.0, "a number above 0, at most 1 (off)")
        expect("min_p", 0.0 <= self.min_p <= 1.0, "a number from 0 (off) to 1")
        penalty = self.repetition_penalty
        expect("repetition_penalty", isfinite(penalty) and penalty > 0, "a finite number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            expect(name, isfinite(getattr(self, name)), "a finite number")
        expect("logprobs", self.logprobs is None or self.logprobs >= 0, "0 or more, or None")
        steps = self.num_steps
        expect("num_steps", steps is None or steps >= 0, "0 (no draft) or more, or None")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(stop):
            raise ValueError("stop contains an empty string, which would end every text at once.")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "banned_token_ids", tuple(self.banned_token_ids))
        self._check_bias()

    def _expect(self, name: str, fits: bool, what: str) -> None:
        if not fits:
            raise ValueError(f"{name}={getattr(self, name)}; expected {what}.")

    def _check_bias(self) -> None:
        bias = dict(self.logit_bias or {})
        for token, value in bias.items():
            if isnan(value) or value == float("inf"):
                raise ValueError(
                    f"logit_bias of token {token} is {value}; expected a finite number, or -inf to "
                    "ban it. To force a token use forced_token_ids."
                )
        banned = {token for token, value in bias.items() if value == -float("inf")}
        forced = {int(place): int(token) for place, token in (self.forced_token_ids or {}).items()}
        for place, token in forced.items():
            if place < 0:
                raise ValueError(f"forced_token_ids: place {place}; expected 0 or more.")
            if token in banned or token in self.banned_token_ids:
                raise ValueError(f"token {token} is both banned and forced; drop one of them.")
        object.__setattr__(self, "logit_bias", bias)
        object.__setattr__(self, "forced_token_ids", forced)

    @property
    def token_ids(self) -> set[int]:
        """Every token that a bias, a ban or a forced place names."""
        return {*self.logit_bias, *self.banned_token_ids, *self.forced_token_ids.values()}
