"""Where an accepted run ends: stop tokens and limits, inside the run."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.engine.state import FAILED, LENGTH, RUNNING, STOPPED


def cut_run(
    emitted: Int[Array, "B P"],
    count: Int[Array, "B"],
    stop_ids: Int[Array, "B K"],
    room: Int[Array, "B"],
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Tokens of a run that are kept, and whether the text ends with them.

    The run is read token by token: the first stop token ends the text and is kept; the token that
    fills the last place ends it too. Where no token was possible, the text fails before it.

    Args:
        emitted: tokens of the round in order; negative where none was possible.
        count: how many of them are real, 0 for finished slots.
        stop_ids: padded with -1.
        room: places left, at least 1 for running slots.

    Returns:
        (kept, reason), both [B] int32; reason is RUNNING, STOPPED, LENGTH or FAILED.
    """
    place = jnp.arange(1, emitted.shape[1] + 1, dtype=jnp.int32)[None, :]
    stops = (emitted[:, :, None] == stop_ids[:, None, :]).any(axis=2) & (emitted >= 0)
    never = emitted.shape[1] + 1
    first_stop = jnp.where(stops & (place <= count[:, None]), place, never).min(axis=1)
    missing = (emitted < 0) & (place <= count[:, None])
    first_missing = jnp.where(missing, place, never).min(axis=1)
    kept = jnp.minimum(jnp.minimum(count, first_stop), room)
    failed = first_missing <= kept
    kept = jnp.where(failed, first_missing - 1, kept)
    stopped = first_stop <= kept
    full = kept >= room
    reason = jnp.where(stopped, STOPPED, jnp.where(full, LENGTH, RUNNING))
    return kept, jnp.where(failed, FAILED, reason).astype(jnp.int32)
