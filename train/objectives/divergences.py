"""How far a draft distribution is from the target's, a row at a time.

References:
    Soft cross-entropy: EAGLE-3, https://arxiv.org/abs/2503.01840.
    LK losses, which train acceptance itself: https://arxiv.org/abs/2602.23881.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def soft_cross_entropy(
    target_logits: Float[Array, "*B Vd"], draft_log_probs: Float[Array, "*B Vd"]
) -> Float[Array, "*B"]:
    """-Σ p log q, with p normalised over the draft vocabulary."""
    return -(jax.nn.softmax(target_logits, axis=-1) * draft_log_probs).sum(axis=-1)


def hard_cross_entropy(
    target_logits: Float[Array, "*B Vd"], draft_log_probs: Float[Array, "*B Vd"]
) -> Float[Array, "*B"]:
    """-log q of the draft vocabulary's likeliest token under p."""
    best = jnp.argmax(target_logits, axis=-1)[..., None]
    best = jnp.broadcast_to(best, (*draft_log_probs.shape[:-1], 1))
    return -jnp.take_along_axis(draft_log_probs, best, axis=-1)[..., 0]


def kl_divergence(
    target_logits: Float[Array, "*B Vd"], draft_log_probs: Float[Array, "*B Vd"]
) -> Float[Array, "*B"]:
    """Σ p (log p - log q), with p normalised over the draft vocabulary."""
    log_p = jax.nn.log_softmax(target_logits, axis=-1)
    return (jnp.exp(log_p) * (log_p - draft_log_probs)).sum(axis=-1)


def acceptance_rate(
    target_probs: Float[Array, "*B Vd"], draft_log_probs: Float[Array, "*B Vd"]
) -> Float[Array, "*B"]:
    """Σ min(p, q): how often a token drawn from q is accepted.

    Args:
        target_probs: of the draft vocabulary's tokens, normalised over the whole vocabulary.
        draft_log_probs: normalised over the draft vocabulary.
    """
    return jnp.minimum(target_probs, jnp.exp(draft_log_probs)).sum(axis=-1)


def mix_of_lk_lambda(accepted: Float[Array, "K"], scale: float, decay: float) -> Float[Array, "K"]:
    """w of each step: scale · exp(-decay · α)."""
    return scale * jnp.exp(-decay * accepted)
