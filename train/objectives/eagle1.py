"""EAGLE-1: regress the target's next hidden state, and let the target's own head judge it.

Row t reads the target's post-norm hidden state of t and the token t + 1, and predicts the hidden
state of t + 1. Loss: smooth L1 between the two, and soft cross-entropy of what the target's head
says to each. Noise on what is read makes the head robust to its own errors, in place of unrolling.

Reference: https://arxiv.org/abs/2401.15077, section 4.2; published weights 1 and 0.1, noise
U(-0.1, 0.1) · 512 / length (SafeAILab's eagle/train).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.eagle import Eagle
from pallas_kernels.masks import from_qlen_only
from train.config import Eagle1Objective
from train.objectives.chunks import sum_chunks
from train.objectives.divergences import acceptance_rate, soft_cross_entropy
from train.objectives.teacher import DraftRows, Teacher, align, seen_by


class Eagle1Batch(NamedTuple):
    """One step's input on the device.

    Attributes:
        tokens: [B, T].
        positions: in its text, for the rotation.
        documents: texts sharing a sequence; -1 padding.
        supervised: [B, T], whether draft row t counts.
        hidden: what the head reads; noise is added to it.
        teacher: the target's view of each position, clean.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    documents: Int[Array, "B T"]
    supervised: Bool[Array, "B T"]
    hidden: Float[Array, "B T E"]
    teacher: Teacher


class Eagle1Losses(NamedTuple):
    """The parts of the loss: `regression` and `classification`, not weighted."""

    regression: Float[Array, ""]
    classification: Float[Array, ""]


def eagle1_loss(
    model: Eagle, batch: Eagle1Batch, objective: Eagle1Objective
) -> tuple[Float[Array, ""], tuple[Eagle1Losses, DraftRows]]:
    """Loss of a batch, its parts, and what every draft row did (K = 1).

    Args:
        model: the head; its own `head` is the target's, and frozen.
        batch: with the frozen target's hidden states.
        objective: weights.
    """
    width = batch.tokens.shape[1]
    following = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
    bits = from_qlen_only(seen_by(batch.documents))
    predicted, _ = model(following, batch.hidden, batch.positions, None, bits)
    every = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), batch.tokens.shape)
    slots, active = align(batch.supervised, batch.documents, every, 1)
    weight = active[0].astype(jnp.float32) / (active.sum(dtype=jnp.float32) + 1e-5)
    total, seen = sum_chunks(
        partial(_chunk_loss, objective),
        {},
        predicted[None],
        {**batch.teacher._asdict(), "weight": weight},
        jax.lax.stop_gradient(model.head[...]),
        slots,
        active[0],
        chunk=max(1, objective.chunk // batch.tokens.shape[0]),
    )
    parts = Eagle1Losses(seen.pop("regression").sum(), seen.pop("classification").sum())
    return total, (parts, DraftRows(active=active, counted=active, **seen))


def noisy(hidden: Float[Array, "B T E"], amplitude: float, key) -> Float[Array, "B T E"]:
    """Uniform noise of the given width, scaled as if sequences were 512 long."""
    wide = amplitude * 512 / hidden.shape[1]
    return hidden + jax.random.uniform(key, hidden.shape, hidden.dtype, -0.5 * wide, 0.5 * wide)


def _chunk_loss(objective: Eagle1Objective, params, states, rows, head):
    """A `ChunkLoss`."""

    def project(x):
        return jnp.einsum("...e,ve->...v", x, head, preferred_element_type=jnp.float32)

    weight = rows["weight"][None]
    apart = states.astype(jnp.float32) - rows["hidden"][None].astype(jnp.float32)
    far = jnp.abs(apart)
    regression = weight * jnp.where(far < 1, 0.5 * apart * apart, far - 0.5).mean(axis=-1)
    target, logits = project(rows["hidden"])[None], project(states)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    classification = weight * soft_cross_entropy(target, log_q)
    loss = objective.regression * regression + objective.classification * classification
    top = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    p = jnp.exp(target - rows["total"][None, ..., None])
    seen = {
        "loss": loss,
        "regression": regression,
        "classification": classification,
        "hit": (top == rows["top"][None]).astype(jnp.float32),
        "overlap": acceptance_rate(p, log_q),
        "outside": jnp.zeros_like(loss),
    }
    return loss.sum(), seen
