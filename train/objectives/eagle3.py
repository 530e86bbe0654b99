"""EAGLE-3: K draft steps unrolled in training, so that a head learns from its own states.

Row t of step k reads the state that step k - 1 carried from row t (step 0: the target's fused
features of position t) and the true token t + 1 + k, and predicts token t + 2 + k, which the target
predicted at position t + 1 + k. That position is the *teacher row* everything is ordered by.

Reference: https://arxiv.org/abs/2503.01840. Losses as in SafeAILab's and SpecForge's code
(`divergence="ce", mean="rows", drop_out_of_vocab=True`) or speculators' (`"kl"`, `"supervised"`,
False); tests/train compares with numbers recorded from each.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.eagle3 import Eagle3
from jspec.targets.rope import rotation
from train.config import Eagle3Objective
from train.objectives.attention import unrolled_attention
from train.objectives.chunks import sum_chunks
from train.objectives.divergences import (
    acceptance_rate,
    hard_cross_entropy,
    kl_divergence,
    mix_of_lk_lambda,
    soft_cross_entropy,
)
from train.objectives.teacher import DraftRows, Teacher, align, shifted


class Eagle3Batch(NamedTuple):
    """One step's input on the device.

    Attributes:
        tokens: [B, T].
        positions: in its text, for the rotation.
        documents: texts sharing a sequence; -1 padding.
        supervised: [B, T], whether draft row t counts at step 0 (at step k, row t + k does).
        rows: positions of the R rows that later steps run at; T for none.
        features: the target's, [B, T, Et] each.
        teacher: the target's view of each position.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    documents: Int[Array, "B T"]
    supervised: Bool[Array, "B T"]
    rows: Int[Array, "B R"]
    features: tuple[Float[Array, "B T Et"], ...]
    teacher: Teacher


def eagle3_loss(
    model: Eagle3,
    batch: Eagle3Batch,
    teacher_head: Float[Array, "Vd E"],
    token_map: Int[Array, "Vd"],
    objective: Eagle3Objective,
) -> tuple[Float[Array, ""], DraftRows]:
    """Loss of a batch, and what every draft row did.

    Args:
        model: the head.
        batch: with the frozen target's features.
        teacher_head: rows of the target's head for the draft vocabulary.
        token_map: target ids of the draft vocabulary, ascending.
        objective: which loss.
    """
    student = unroll(model, batch, objective.num_steps)
    texts = jnp.zeros_like(batch.documents) if objective.cross_texts else batch.documents
    slots, active = align(batch.supervised, texts, batch.rows, objective.num_steps)
    known = jnp.isin(batch.teacher.top, token_map)
    counted = active & known[None] if objective.drop_out_of_vocab else active
    run = partial(
        sum_chunks,
        student=student,
        frozen={"head": teacher_head, "map": token_map},
        slots=slots,
        used=active.any(axis=0),
        chunk=max(1, objective.chunk // batch.tokens.shape[0]),
    )
    teacher = batch.teacher._asdict()
    weights = _weights(objective, run, model, teacher, active, counted)
    total, seen = run(partial(_chunk_loss, objective), model.head[...], teacher=teacher | weights)
    return total, DraftRows(active=active, counted=counted, **seen)


def _weights(objective: Eagle3Objective, run, model: Eagle3, teacher, active, counted):
    """What each row's divergence and acceptance weigh in the total, [B, T, K] each."""
    decay = objective.decay ** jnp.arange(objective.num_steps, dtype=jnp.float32)
    rows = jnp.asarray(active[0].size, jnp.float32)
    if objective.mean == "supervised":
        # Dropped rows stay in the denominator, as in the references.
        rows = active.sum(axis=(1, 2), dtype=jnp.float32) + 1e-5
    one, kept = decay / rows, decay / (counted.sum(axis=(1, 2), dtype=jnp.float32) + 1e-6)
    if objective.divergence == "lk_alpha":
        one = jnp.zeros_like(decay)
    elif objective.divergence == "lk_lambda":
        none = jnp.zeros((*active.shape[1:], objective.num_steps), jnp.float32)
        look = partial(_chunk_loss, objective)
        fixed = jax.lax.stop_gradient(model.head[...])
        _, seen = run(look, fixed, teacher=teacher | {"far": none, "lk": none})
        accepted = jnp.where(counted, seen["overlap"], 0.0).sum(axis=(1, 2)) * kept / decay
        mix = mix_of_lk_lambda(accepted, objective.kl_scale, objective.kl_decay)
        mix = jax.lax.stop_gradient(mix)
        one, kept = one * mix, kept * (1.0 - mix)
    else:
        kept = jnp.zeros_like(decay)
    whole = counted.astype(jnp.float32).transpose(1, 2, 0)
    return {"far": whole * one[None, None], "lk": whole * kept[None, None]}


def _chunk_loss(objective: Eagle3Objective, head, states, rows, frozen):
    """A `ChunkLoss`."""
    far_weight, lk_weight = rows["far"].transpose(2, 0, 1), rows["lk"].transpose(2, 0, 1)
    logits = _project("kbce,ve->kbcv", states, head)
    target = _project("bce,ve->bcv", rows["hidden"], frozen["head"])[None]
    log_q = jax.nn.log_softmax(logits, axis=-1)
    kind = {"kl": kl_divergence, "hard_ce": hard_cross_entropy}.get(
        objective.divergence, soft_cross_entropy
    )
    p = jnp.exp(target - rows["total"][None, ..., None])  # of the whole vocabulary
    alpha = acceptance_rate(p, log_q)
    loss = far_weight * kind(target, log_q)
    if objective.divergence == "lk_alpha":
        loss = loss - lk_weight * jnp.log(jnp.maximum(alpha, 1e-30))
    elif objective.divergence == "lk_lambda":
        loss = loss + lk_weight * (1.0 - alpha)
    said = frozen["map"][jnp.argmax(logits, axis=-1)]
    seen = {
        "loss": loss,
        "hit": (said == rows["top"][None]).astype(jnp.float32),
        "overlap": alpha,
        "outside": jnp.broadcast_to(1.0 - p.sum(axis=-1), loss.shape),
    }
    return loss.sum(), seen


def unroll(model: Eagle3, batch: Eagle3Batch, steps: int) -> Float[Array, "K B R E"]:
    """What the head's projection reads after each step, at the batch's R rows."""
    width = batch.tokens.shape[1]
    every = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), batch.tokens.shape)
    rows = jnp.minimum(batch.rows, width - 1)
    position, at = batch.positions, every
    carried = model.fuse_features(batch.features)
    layers = [model.first, *model.layers]
    keys: list[list[tuple[Array, Array]]] = [[] for _ in layers]
    states = []
    for step in range(steps):
        if step == 1:  # from here on only the rows that predict something
            position, at = (jnp.take_along_axis(x, rows, axis=1) for x in (position, at))
            carried = jnp.take_along_axis(carried, rows[..., None], axis=1)
        with jax.named_scope(f"draft_step_{step}"):
            token = jnp.take_along_axis(shifted(batch.tokens, 1 + step), at, axis=1)
            rope = rotation(model.config.decoder.rope, position + step)
            x = carried
            for index, layer in enumerate(layers):
                if index == 0:
                    read, x = layer.inputs(model.embed(token), x)
                else:
                    read = layer.input_norm(x)
                q, k, v = layer.attention.project(read, rope)
                keys[index].append((k, v))
                (first_k, first_v), *own = keys[index]
                mixed = unrolled_attention(
                    q,
                    first_k,
                    first_v,
                    [k for k, _ in own],
                    [v for _, v in own],
                    at,
                    batch.documents,
                )
                x = x + layer.attention.o_proj(mixed.reshape(*mixed.shape[:2], -1))
                x = x + layer.mlp(layer.post_attention_norm(x))
            normed = model.norm(x)
            carried = normed if model.config.norm_output else x
            if step == 0:
                normed = jnp.take_along_axis(normed, rows[..., None], axis=1)
            states.append(normed)
    return jnp.stack(states)


def _project(form: str, states, head) -> Float[Array, "*B V"]:
    return jnp.einsum(form, states, head, preferred_element_type=jnp.float32)
