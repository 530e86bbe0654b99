"""Acceptance as training sees it: sums on the device, figures on the host.

Definitions, for greedy chains: *accuracy* at depth k is how often the draft's likeliest token at
step k is the target's (of its whole vocabulary), the earlier tokens being right; *acceptance* is
the same among rows whose earlier guesses were all right, which is what serving counts; tau is
1 + Σ_k Π_{i<=k} acceptance_i, tokens a round of a chain of K drafts, bonus included.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from train.objectives.teacher import DraftRows

Sums = dict[str, Array]
"""Additive over batches: [K] each."""


def acceptance_sums(rows: DraftRows, decay: float) -> Sums:
    """What a batch adds.

    Args:
        rows: of the batch.
        decay: of the objective, taken out of the losses again.
    """
    steps = rows.active.shape[0]
    active = rows.active.astype(jnp.float32)
    undone = decay ** -jnp.arange(steps, dtype=jnp.float32)
    tried, right = [], []
    reached = _by_draft_row(rows.active[0], 0)
    for step in range(steps):
        here = reached & _by_draft_row(rows.active[step], step)
        reached = here & (_by_draft_row(rows.hit[step], step) > 0)
        tried.append(here.sum(dtype=jnp.float32))
        right.append(reached.sum(dtype=jnp.float32))
    sums = {
        "loss": rows.loss.sum(axis=(1, 2)) * undone,
        "rows": active.sum(axis=(1, 2)),
        "hits": (rows.hit * active).sum(axis=(1, 2)),
        "overlap": (rows.overlap * active).sum(axis=(1, 2)),
        "outside": (rows.outside * active).sum(axis=(1, 2)),
        "dropped": (rows.active & ~rows.counted).sum(axis=(1, 2)).astype(jnp.float32),
        "tried": jnp.stack(tried),
        "right": jnp.stack(right),
        "batches": jnp.ones((steps,), jnp.float32),
    }
    if rows.text is not None:
        sums["text"] = jnp.broadcast_to(rows.text.sum(), (steps,))
    return sums


def figures(sums: Mapping[str, np.ndarray]) -> dict[str, float | list[float]]:
    """Readable figures from sums over one or more batches.

    Returns:
        Lists by depth: `loss`, `accuracy`, `acceptance` (conditional), `min_pq`, and the scalars
        `tau`, `out_of_vocab` (rows dropped), `mass_outside` the draft vocabulary, `rows`; where
        the target is trained too, its `text_loss`.
    """
    rows = np.maximum(sums["rows"], 1)
    acceptance = sums["right"] / np.maximum(sums["tried"], 1)
    seen = {
        "loss_by_depth": _listed(sums["loss"] / np.maximum(sums["batches"], 1)),
        "accuracy": _listed(sums["hits"] / rows),
        "acceptance": _listed(acceptance),
        "min_pq": _listed(sums["overlap"] / rows),
        "tau": float(1 + np.cumprod(acceptance).sum()),
        "out_of_vocab": float(sums["dropped"][0] / rows[0]),
        "mass_outside": float(sums["outside"][0] / rows[0]),
        "rows": float(sums["rows"][0]),
    }
    if "text" in sums:
        seen["text_loss"] = float(sums["text"][0] / max(sums["batches"][0], 1))
    return seen


def _by_draft_row(x: Float[Array, "B T"] | Array, step: int):
    """From the order of teacher rows to that of draft rows: row t meets t + 1 + step."""
    back = min(1 + step, x.shape[1])
    return jnp.pad(x[:, back:], ((0, 0), (0, back)))


def _listed(x: np.ndarray) -> list[float]:
    return [round(float(value), 6) for value in x]
