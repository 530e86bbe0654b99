"""What a request may ask of sampling, and the one function that turns logits into tokens.

Plain and speculative decoding share it. A token is a pure function of the request's seed, its
position and its logits: noise is keyed by (seed, position), never by slot, round or tree. A draft
chosen without looking at that noise therefore leaves the text unchanged: the tree is walked by
comparing each child with the token that plain decoding would have drawn at its parent (target
sampling), so speculation is exact at every temperature, and the text the same with and without.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        max_new_tokens: at most this many tokens are generated.
        seed: of the request's noise; the same seed gives the same text whatever the batch. None
            draws a fresh one.
        stop: strings that end the text; the text is cut before the first of them.
        stop_token_ids: tokens that end the text, beside the model's own end tokens.
        ignore_eos: do not stop at the model's own end tokens.
        top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias,
            logprobs: not implemented; anything but the default is refused.
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
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    def __post_init__(self):
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature}; expected a finite number, 0 or more."
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}; expected at least 1.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}; expected 0 to 2**63 - 1, or None.")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(stop):
            raise ValueError("stop contains an empty string, which would end every text at once.")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for field in fields(self):
            if field.name in _NOT_IMPLEMENTED and getattr(self, field.name) != field.default:
                raise NotImplementedError(
                    f"{field.name}={getattr(self, field.name)!r} is not implemented; "
                    f"leave it at {field.default!r}."
                )


_KEY_KIND = "threefry2x32"
_DRAFT_STREAM = 0xFFFFFFFF

_NOT_IMPLEMENTED = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
)


def draft_keys(keys: UInt32[Array, "B 2"]) -> UInt32[Array, "B 2"]:
    """Each request's keys for its drafter, in a stream apart from the target's.

    A draft that shared the target's noise would be correlated with what it is checked against, and
    sampling would no longer be exact. The target folds in positions, which are never this value.
    """

    def derive(key):
        typed = jax.random.wrap_key_data(key, impl=_KEY_KIND)
        return jax.random.key_data(jax.random.fold_in(typed, _DRAFT_STREAM))

    return jax.vmap(derive)(keys)


def choose_tokens(
    logits: Float[Array, "B T V"],
    temperature: Float[Array, "B"],
    keys: UInt32[Array, "B 2"],
    positions: Int[Array, "B T"],
    *,
    sampled: bool,
) -> Int[Array, "B T"]:
    """The token that follows each node: the largest logit, or a draw at the slot's temperature.

    A draw is the argmax of logits / temperature + Gumbel noise, which is distributed as the
    softmax (Gumbel-max). The noise of a node is keyed by its request and its position, so nodes of
    equal depth share it; at most one of them is on the accepted path.

    Args:
        logits: float32; of node t, over the token that follows it.
        temperature: 0 for greedy slots; both kinds mix in a batch.
        keys: raw key data, one a request.
        positions: of the tokens to come (committed length + depth + 1).
        sampled: whether any slot samples; a greedy batch compiles without the noise.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not sampled:
        return greedy

    def noise(key, position):
        typed = jax.random.wrap_key_data(key, impl=_KEY_KIND)
        return jax.random.gumbel(jax.random.fold_in(typed, position), logits.shape[-1:])

    per_node = jax.vmap(jax.vmap(noise, (None, 0)))(keys, positions)
    scale = jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    drawn = jnp.argmax(logits / scale + per_node, axis=-1).astype(jnp.int32)
    return jnp.where(temperature[:, None] > 0, drawn, greedy)
