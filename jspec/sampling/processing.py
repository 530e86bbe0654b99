"""The one function that changes logits, for plain and speculative decoding alike.

Order and definitions are transformers': bias and bans, repetition penalty, (presence and frequency
penalty, which it lacks, as OpenAI and vLLM define them,) forced tokens, temperature, top-k, top-p,
min-p. What no slot of a batch asks for is not part of the compiled program.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.sampling.filters import keep_threshold
from jspec.sampling.history import History
from jspec.sampling.params import SamplingParams

_COLUMNS: dict[str, tuple[str, int | float]] = {
    "top_k": ("top_k", 0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "repetition": ("repetition_penalty", 1.0),
    "presence": ("presence_penalty", 0.0),
    "frequency": ("frequency_penalty", 0.0),
}
"""Columns with a number a slot: the parameter, and its value where it is off."""

BIAS = "bias"


def asked_columns(asked: Sequence[SamplingParams]) -> frozenset[str]:
    """The columns of `Shaping` that these requests need, forced tokens apart."""
    found = {
        column
        for column, (name, off) in _COLUMNS.items()
        if any(getattr(params, name) != off for params in asked)
    }
    if any(params.logit_bias or params.banned_token_ids for params in asked):
        found.add(BIAS)
    return frozenset(found)


def forced_width(asked: Sequence[SamplingParams]) -> int:
    """A: widths are rounded up, so that few programs serve many requests."""
    return 4 * -(-max((len(params.forced_token_ids) for params in asked), default=0) // 4)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shaping:
    """What each slot asks of its logits beside the temperature; None where no slot asks.

    Attributes:
        top_k: [B] int32, 0 is off.
        top_p: [B] float32, 1 is off.
        min_p: [B] float32, 0 is off.
        repetition: penalty, [B] float32, 1 is off.
        presence, frequency: penalties, [B] float32, 0 is off.
        bias: added to the logits, [B, V] float32, -inf for banned tokens.
        forced_places: places of the output, [B, A] int32, padded with -1.
        forced_tokens: what must stand there, [B, A] int32.
    """

    top_k: Int[Array, "B"] | None = None
    top_p: Float[Array, "B"] | None = None
    min_p: Float[Array, "B"] | None = None
    repetition: Float[Array, "B"] | None = None
    presence: Float[Array, "B"] | None = None
    frequency: Float[Array, "B"] | None = None
    bias: Float[Array, "B V"] | None = None
    forced_places: Int[Array, "B A"] | None = None
    forced_tokens: Int[Array, "B A"] | None = None

    @property
    def looks_back(self) -> bool:
        """Whether logits depend on the tokens before them."""
        penalties = (self.repetition, self.presence, self.frequency)
        return any(penalty is not None for penalty in penalties)

    @classmethod
    def of(
        cls,
        asked: Sequence[SamplingParams],
        slots: int,
        vocabulary: int,
        *,
        columns: frozenset[str] = frozenset(),
        forced: int = 0,
    ) -> "Shaping":
        """Of the first slots' parameters; the other slots ask nothing.

        Args:
            asked: at most `slots` of them.
            slots: B.
            vocabulary: V.
            columns: wanted also where nobody asks, so that the shapes of one table fit another.
            forced: A at least.

        Raises:
            ValueError: a token outside the vocabulary.
        """
        check_tokens(asked, vocabulary)
        columns = columns | asked_columns(asked)
        numbers: dict[str, Array] = {}
        for column, (name, off) in _COLUMNS.items():
            if column in columns:
                most = vocabulary if column == "top_k" else np.inf
                values = [min(getattr(params, name), most) for params in asked]
                dtype = np.int32 if isinstance(off, int) else np.float32
                values += [off] * (slots - len(values))
                numbers[column] = jnp.asarray(np.asarray(values, dtype))
        places, tokens = _forced(asked, slots, max(forced, forced_width(asked)))
        return cls(
            **numbers,
            bias=_bias(asked, slots, vocabulary) if BIAS in columns else None,
            forced_places=places,
            forced_tokens=tokens,
        )


def process_logits(
    logits: Float[Array, "B T V"],
    shaping: Shaping,
    temperature: Float[Array, "B"],
    places: Int[Array, "B T"],
    history: History | None,
    branch: Int[Array, "B T A"] | None,
    *,
    sampled: bool,
) -> Float[Array, "B T V"]:
    """Logits as they are drawn from; -inf for what cannot be drawn.

    Args:
        logits: float32, of the target; of node t, over the token that follows it.
        shaping: what the slots ask.
        temperature: 0 for greedy slots, whose logits are not scaled or filtered.
        places: in the output, of the tokens to come, 0 for the first.
        history: prompt and committed output; None where nothing looks back.
        branch: uncommitted tokens before each place, padded with -1; None where there are none.
        sampled: whether any slot samples. If so, rows are shifted so that their largest is 0.
    """
    shaped = logits
    if shaping.looks_back or shaping.bias is not None:
        shaped = _penalise(logits, shaping, history, branch)
    if shaping.forced_places is not None and shaping.forced_tokens is not None:
        here = shaping.forced_places[:, None, :] == places[:, :, None]
        token = jnp.where(here, shaping.forced_tokens[:, None, :], -1).max(axis=-1)[:, :, None]
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None, :]
        shaped = jnp.where(token < 0, shaped, jnp.where(ids == token, 0.0, -jnp.inf))
    if not sampled:
        return shaped
    draws = temperature > 0
    largest = jnp.max(shaped, axis=-1, keepdims=True)
    # Shifted first and divided then: nothing overflows, however cold. A smaller divisor than a
    # normal float would be read as zero.
    scale = jnp.where(draws, jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny), 1.0)
    possible = jnp.isfinite(largest)
    scaled = jnp.where(possible, (shaped - largest) / scale[:, None, None], -jnp.inf)
    if shaping.top_k is None and shaping.top_p is None and shaping.min_p is None:
        return scaled
    threshold = keep_threshold(scaled, shaping.top_k, shaping.top_p, shaping.min_p)
    return jnp.where((scaled >= threshold) | ~draws[:, None, None], scaled, -jnp.inf)


def _penalise(
    logits: Float[Array, "B T V"],
    shaping: Shaping,
    history: History | None,
    branch: Int[Array, "B T A"] | None,
) -> Float[Array, "B T V"]:
    """Bias and penalties, element by element, so that nothing of the size of the logits is stored.

    A token's count is that of its slot, and one for every node of the branch that holds it.
    """
    if shaping.bias is not None:
        logits = logits + shaping.bias[:, None, :]
    if history is None or not shaping.looks_back:
        return logits
    count = history.output[:, None, :]
    if branch is not None:
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None, :]
        for above in range(branch.shape[-1]):
            count = count + (branch[:, :, above, None] == ids).astype(jnp.int32)

    if shaping.repetition is not None:
        penalty = shaping.repetition[:, None, None]
        penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
        logits = jnp.where(history.prompt[:, None, :] | (count > 0), penalised, logits)
    if shaping.frequency is not None:
        logits = logits - shaping.frequency[:, None, None] * count.astype(jnp.float32)
    if shaping.presence is not None:
        logits = logits - shaping.presence[:, None, None] * (count > 0).astype(jnp.float32)
    return logits


def check_tokens(asked: Sequence[SamplingParams], vocabulary: int) -> None:
    """Refuse tokens that do not exist.

    Raises:
        ValueError: a token outside the vocabulary.
    """
    for params in asked:
        outside = [token for token in params.token_ids if not 0 <= token < vocabulary]
        if outside:
            raise ValueError(
                f"token {outside[0]} of logit_bias, banned_token_ids or forced_token_ids is "
                f"outside the vocabulary; expected 0 to {vocabulary - 1}."
            )


def _bias(asked: Sequence[SamplingParams], slots: int, vocabulary: int) -> Array:
    bias = np.zeros((slots, vocabulary), np.float32)
    for row, params in zip(bias, asked):
        for token, value in params.logit_bias.items():
            row[token] = value
        row[list(params.banned_token_ids)] = -np.inf
    return jnp.asarray(bias)


def _forced(
    asked: Sequence[SamplingParams], slots: int, width: int
) -> tuple[Array | None, Array | None]:
    if not width:
        return None, None
    places, tokens = np.full((2, slots, width), -1, np.int32)
    for row, params in enumerate(asked):
        for column, (place, token) in enumerate(params.forced_token_ids.items()):
            places[row, column], tokens[row, column] = place, token
    return jnp.asarray(places), jnp.asarray(tokens)
