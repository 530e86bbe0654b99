"""Medusa: head k learns the token k + 2 places on from one hidden state of the target.

Medusa-1: the target is frozen. Labels are the data's tokens, as in the paper, or the target's own
distribution, which teaches more from the same text.

Reference: https://arxiv.org/abs/2401.10774, section 2.2; loss Σ_k decay^k · CE_k, decay 0.8.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.medusa import MedusaHeads
from train.config import MedusaObjective
from train.objectives.chunks import sum_chunks
from train.objectives.divergences import acceptance_rate, soft_cross_entropy
from train.objectives.teacher import DraftRows, Teacher, align


def medusa_loss(
    heads: MedusaHeads,
    tokens: Int[Array, "B T"],
    documents: Int[Array, "B T"],
    supervised: Bool[Array, "B T"],
    teacher: Teacher,
    teacher_head: Float[Array, "Vd E"],
    token_map: Int[Array, "Vd"],
    objective: MedusaObjective,
) -> tuple[Float[Array, ""], DraftRows]:
    """Loss of a batch, and what every head did at every row.

    Args:
        heads: all of them.
        tokens, documents, supervised: of the batch; supervised says which row of head 0 counts.
        teacher: the target's view of each position; its `hidden` is what the heads read.
        teacher_head: rows of the target's head for the draft vocabulary.
        token_map: target ids of the draft vocabulary, ascending.
        objective: weights and labels.
    """
    width, count = tokens.shape[1], len(heads.blocks)
    student = jnp.stack(states(heads, teacher.hidden))
    every = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    slots, active = align(supervised, documents, every, count)
    label = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    sought = label if objective.labels == "hard" else teacher.top
    known = jnp.isin(sought, token_map)
    counted = active & known[None]
    per_head = objective.decay ** jnp.arange(count, dtype=jnp.float32)
    size = active.sum(axis=(1, 2), dtype=jnp.float32) + 1e-5
    weight = counted.astype(jnp.float32) * (per_head / size)[:, None, None]
    total, seen = sum_chunks(
        partial(_chunk_loss, objective.labels == "hard"),
        [projection[...] for projection in heads.projections],
        student,
        {
            **teacher._asdict(),
            "weight": weight.transpose(1, 2, 0),
            # Draft id of the label; any id where it has none, which then has no weight.
            "label": jnp.minimum(jnp.searchsorted(token_map, label), len(token_map) - 1),
        },
        {"head": teacher_head, "map": token_map},
        slots,
        active.any(axis=0),
        chunk=max(1, objective.chunk // tokens.shape[0]),
    )
    return total, DraftRows(active=active, counted=counted, **seen)


def states(heads: MedusaHeads, hidden: Float[Array, "B T E"]) -> list[Float[Array, "B T E"]]:
    """What each head's projection reads."""
    found = []
    for blocks in heads.blocks:
        x = hidden
        for block in blocks:
            x = x + jax.nn.silu(block(x))
        found.append(x)
    return found


def _chunk_loss(hard: bool, projections, states, rows, frozen):
    """A `ChunkLoss`."""

    def project(form, x, head):
        return jnp.einsum(form, x, head, preferred_element_type=jnp.float32)

    if len(projections) == 1:
        logits = project("kbce,ve->kbcv", states, projections[0])
    else:
        logits = jnp.stack([project("bce,ve->bcv", x, w) for x, w in zip(states, projections)])
    target = project("bce,ve->bcv", rows["hidden"], frozen["head"])[None]
    log_q = jax.nn.log_softmax(logits, axis=-1)
    if hard:
        label = jnp.broadcast_to(rows["label"][None, ..., None], (*log_q.shape[:-1], 1))
        far = -jnp.take_along_axis(log_q, label, axis=-1)[..., 0]
    else:
        far = soft_cross_entropy(target, log_q)
    loss = rows["weight"].transpose(2, 0, 1) * far
    said = frozen["map"][jnp.argmax(logits, axis=-1)]
    p = jnp.exp(target - rows["total"][None, ..., None])
    seen = {
        "loss": loss,
        "hit": (said == rows["top"][None]).astype(jnp.float32),
        "overlap": acceptance_rate(p, log_q),
        "outside": jnp.broadcast_to(1.0 - p.sum(axis=-1), loss.shape),
    }
    return loss.sum(), seen
