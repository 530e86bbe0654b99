"""The frozen target as a teacher, and which draft row meets which of its rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jspec.targets import Target
from pallas_kernels.masks import from_qlen_only


class Teacher(NamedTuple):
    """What the target says at each position.

    Attributes:
        hidden: after the final norm.
        top: its likeliest token, of the whole vocabulary.
        total: log of the sum of its exponentiated logits, over the whole vocabulary.
    """

    hidden: Float[Array, "B T E"]
    top: Int[Array, "B T"]
    total: Float[Array, "B T"]


class DraftRows(NamedTuple):
    """What each draft step did at each teacher row, [K, B, T]; 0 where it is not active.

    Attributes:
        active: a draft row of this step meets a supervised teacher row.
        counted: it is also in the loss.
        loss: its share in the total; summed over rows, step k's loss times decay^k.
        hit: the draft's likeliest token is the target's.
        overlap: Σ min(p, q), the rate at which sampled drafts are accepted.
        outside: target probability outside the draft vocabulary.
        text: the target's own share in the total, [B, T], where it is trained too.
    """

    active: Bool[Array, "K B T"]
    counted: Bool[Array, "K B T"]
    loss: Float[Array, "K B T"]
    hit: Float[Array, "K B T"]
    overlap: Float[Array, "K B T"]
    outside: Float[Array, "K B T"]
    text: Float[Array, "B T"] | None = None


def look(
    target: Target,
    params: PyTree,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    documents: Int[Array, "B T"],
    used: Bool[Array, "B T"],
    *,
    feature_layers: tuple[int, ...] = (),
    packed: bool,
    chunk: int = 128,
) -> tuple[tuple[Float[Array, "B T Et"], ...], Teacher]:
    """Run the frozen target.

    Args:
        target: its module.
        params: its arrays.
        tokens, positions, documents: a batch.
        used: rows whose `top` and `total` are wanted; others get 0.
        feature_layers: outputs to return.
        packed: several texts share a sequence and must not see each other.
        chunk: rows whose logits are held at a time, in all sequences together.
    """
    batch, width = tokens.shape
    bits = from_qlen_only(seen_by(documents)) if packed else None
    with jax.named_scope("target"):
        out = target.forward(params, tokens, positions, None, bits, feature_layers=feature_layers)
    chunk = max(1, min(chunk // batch, width))
    order = jnp.argsort(~used, axis=1, stable=True).astype(jnp.int32)
    order = jnp.pad(order, ((0, 0), (0, -width % chunk)), constant_values=width)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def visit(number, seen):
        top, total = seen
        at = jax.lax.dynamic_slice_in_dim(order, number * chunk, chunk, axis=1)
        hidden = jnp.take_along_axis(out.hidden, jnp.minimum(at, width - 1)[..., None], axis=1)
        logits = target.logits(params, hidden)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (
            top.at[index, at].set(best, mode="drop"),
            total.at[index, at].set(jax.nn.logsumexp(logits, axis=-1), mode="drop"),
        )

    visits = (used.sum(axis=1, dtype=jnp.int32).max() + chunk - 1) // chunk
    start = (jnp.zeros((batch, width), jnp.int32), jnp.zeros((batch, width), jnp.float32))
    with jax.named_scope("target_head"):
        top, total = jax.lax.fori_loop(0, visits, visit, start)
    return jax.lax.stop_gradient((out.features, Teacher(out.hidden, top, total)))


def seen_by(documents: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Whether row i sees row j: at or before it, in the same text."""
    place = jnp.arange(documents.shape[1], dtype=jnp.int32)
    before = place[None, :] <= place[:, None]
    return (documents[:, :, None] == documents[:, None, :]) & before[None]


def align(
    supervised: Bool[Array, "B T"],
    documents: Int[Array, "B T"],
    rows: Int[Array, "B R"],
    steps: int,
) -> tuple[Int[Array, "K B T"], Bool[Array, "K B T"]]:
    """Which draft row meets each teacher row: at step k, row s - 1 - k meets teacher row s.

    Args:
        supervised: of draft rows at step 0; teacher row s is supervised where row s - 1 is.
        documents: a draft row meets only teacher rows of its own text.
        rows: positions that have a draft row, T for none.
        steps: K.

    Returns:
        Index into `rows` (R for none), and whether there is one at a supervised teacher row.
    """
    batch, width = supervised.shape
    count = rows.shape[1]
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    slot = jnp.full((batch, width), count, jnp.int32)
    slot = slot.at[index, rows].set(jnp.arange(count, dtype=jnp.int32)[None], mode="drop")
    wanted = jnp.pad(supervised[:, :-1], ((0, 0), (1, 0)))
    slots, active = [], []
    for step in range(steps):
        back = min(1 + step, width)
        here = jnp.pad(slot[:, : width - back], ((0, 0), (back, 0)), constant_values=count)
        theirs = jnp.pad(documents[:, : width - back], ((0, 0), (back, 0)), constant_values=-2)
        meets = wanted & (here < count) & (theirs == documents) & (documents >= 0)
        slots.append(jnp.where(meets, here, count))
        active.append(meets)
    return jnp.stack(slots), jnp.stack(active)


def supervised_rows(mask: Bool[Array, "B T"], documents: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Draft rows that predict a supervised token: row t predicts token t + 2 of its text."""

    def ahead(x, empty):
        return jnp.pad(x[:, 2:], ((0, 0), (0, 2)), constant_values=empty)

    return ahead(mask, False) & (ahead(documents, -2) == documents)


def shifted(x: Int[Array, "B T"], places: int) -> Int[Array, "B T"]:
    """Row t gets entry t + places; 0 beyond the end."""
    return jnp.pad(x[:, places:], ((0, 0), (0, min(places, x.shape[1]))))
