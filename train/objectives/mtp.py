"""Multi-token prediction: one module run again and again, beside a frozen target or with it.

Row t of step k reads the state that step k - 1 carried from row t (step 0: the target's hidden
state of position t) and the true token t + 1 + k, and predicts token t + 2 + k. It attends to what
it would find when serving: the rows of step 0 up to its own, which are made from true states, and
its own earlier guesses.

References:
    DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2: one step, target and module
    together, L = L_main + λ·L_mtp with λ = 0.3, then 0.1; embedding and head are shared.
    FastMTP, https://arxiv.org/abs/2509.18362: one module run for K = 3 steps, weights 0.6^k.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.mtp import MTP
from jspec.targets.rope import rotation
from train.config import MTPObjective
from train.objectives.attention import unrolled_attention
from train.objectives.chunks import sum_chunks
from train.objectives.divergences import acceptance_rate, soft_cross_entropy
from train.objectives.teacher import DraftRows, align, shifted, supervised_rows


class MTPBatch(NamedTuple):
    """One step's input on the device.

    Attributes:
        tokens: [B, T].
        positions: in its text, for the rotation.
        documents: texts sharing a sequence; -1 padding.
        mask: supervised tokens.
        rows: positions of the R rows that later steps run at; T for none. Every one of them where
            the target is trained too.
        hidden: of the target, after its final norm.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    documents: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    rows: Int[Array, "B R"]
    hidden: Float[Array, "B T E"]


def mtp_loss(
    draft: MTP, batch: MTPBatch, objective: MTPObjective, *, joint: bool
) -> tuple[Float[Array, ""], DraftRows]:
    """Loss of a batch, and what every draft row did.

    The module's loss is Σ_k decay^k · L_k, each L_k a mean over its own rows. A target in training
    has L_main + weight · Σ_k decay^k · L_k / Σ_k decay^k instead.

    Args:
        draft: the module between the target's embedding and head.
        batch: with the target's hidden states.
        objective: weights, number of steps and labels.
        joint: embedding, head and hidden states are trained too.
    """
    steps, width = objective.num_steps, batch.tokens.shape[1]
    student = unroll(draft, batch, steps)
    supervised = supervised_rows(batch.mask, batch.documents)
    slots, active = align(supervised, batch.documents, batch.rows, steps)
    share = objective.decay ** jnp.arange(steps, dtype=jnp.float32)
    scale = 1.0
    if joint:
        scale = objective.weight / share.sum()
        share = jnp.concatenate([jnp.ones((1,), jnp.float32), share * scale])
        text = _next(batch.mask, 1, False) & (_next(batch.documents, 1, -2) == batch.documents)
        every = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), batch.tokens.shape)
        student = jnp.concatenate([batch.hidden[None], student])
        slots = jnp.concatenate([jnp.where(text, every, width)[None], slots])
        active = jnp.concatenate([text[None], active])
    size = jnp.maximum(active.sum(axis=(1, 2), dtype=jnp.float32), 1.0)
    weight = active.astype(jnp.float32) * (share / size)[:, None, None]
    teacher = {"label": shifted(batch.tokens, 1), "weight": weight.transpose(1, 2, 0)}
    total, seen = sum_chunks(
        partial(_chunk_loss, objective, joint),
        [draft.head[...]] if joint else [],
        student,
        teacher if joint else teacher | {"hidden": batch.hidden},
        [] if joint else [draft.head[...]],
        slots,
        active.any(axis=0),
        chunk=max(1, objective.chunk // batch.tokens.shape[0]),
    )
    first = int(joint)
    rows = {name: x[first:] for name, x in seen.items()}
    rows["loss"] = rows["loss"] / scale
    return total, DraftRows(
        active=active[first:],
        counted=active[first:],
        outside=jnp.zeros_like(rows["loss"]),
        text=seen["loss"][0] if joint else None,
        **rows,
    )


def unroll(draft: MTP, batch: MTPBatch, steps: int) -> Float[Array, "K B R E"]:
    """What the head reads after each step, at the batch's R rows."""
    width = batch.tokens.shape[1]
    every = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), batch.tokens.shape)
    rows = jnp.minimum(batch.rows, width - 1)
    position, at, carried = batch.positions, every, batch.hidden
    module, block = draft.module, draft.module.block
    cached: list[tuple[Array, Array]] = []
    states = []
    for step in range(steps):
        if step == 1:  # from here on only the rows that predict something
            position, at = (jnp.take_along_axis(x, rows, axis=1) for x in (position, at))
            carried = jnp.take_along_axis(carried, rows[..., None], axis=1)
        with jax.named_scope(f"draft_step_{step}"):
            token = jnp.take_along_axis(shifted(batch.tokens, 1 + step), at, axis=1)
            x = module.inputs(carried, draft.embed(token), position + step)
            rope = rotation(module.config.rope, position + step)
            q, k, v = block.attention.project(block.input_norm(x), rope)
            cached.append((k, v))
            (first_k, first_v), *own = cached
            mixed = unrolled_attention(
                q,
                first_k,
                first_v,
                [k for k, _ in own],
                [v for _, v in own],
                at,
                batch.documents,
            )
            x = x + block.attention.o_proj(mixed.reshape(*mixed.shape[:2], -1))
            x = x + block.mlp(block.post_attention_norm(x))
            carried = module.carried(x)
        normed = module.normed(carried)
        if step == 0:
            normed = jnp.take_along_axis(normed, rows[..., None], axis=1)
        states.append(normed)
    return jnp.stack(states)


def _chunk_loss(objective: MTPObjective, joint: bool, heads, states, rows, fixed_heads):
    """A `ChunkLoss`; in joint training the first of the states is the target's own."""
    (head,) = [*heads, *fixed_heads]
    logits = _project("kbce,ve->kbcv", states, head)
    target = logits[:1] if joint else _project("bce,ve->bcv", rows["hidden"], head)[None]
    target = jax.lax.stop_gradient(target)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    label = jnp.broadcast_to(rows["label"][None, ..., None], (*log_q.shape[:-1], 1))
    far = -jnp.take_along_axis(log_q, label, axis=-1)[..., 0]
    if objective.labels == "soft":
        soft = soft_cross_entropy(target, log_q)
        far = jnp.concatenate([far[:1], soft[1:]]) if joint else soft
    loss = rows["weight"].transpose(2, 0, 1) * far
    hit = jnp.argmax(logits, axis=-1) == jnp.argmax(target, axis=-1)
    seen = {
        "loss": loss,
        "hit": hit.astype(jnp.float32),
        "overlap": acceptance_rate(jax.nn.softmax(target, axis=-1), log_q),
    }
    return loss.sum(), seen


def _next(x: Array, places: int, empty) -> Array:
    return jnp.pad(x[:, places:], ((0, 0), (0, places)), constant_values=empty)


def _project(form: str, states, head) -> Float[Array, "*B V"]:
    return jnp.einsum(form, states, head, preferred_element_type=jnp.float32)
