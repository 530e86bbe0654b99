"""How often each Medusa head is right at each rank, measured on texts the target wrote itself."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jspec.drafters.medusa import Medusa
from jspec.targets.target import Target

_ROWS = 32
"""Places scored at once: heads times vocabulary times this many logits are held."""


def measure_accuracies(
    target: Target,
    drafter: Medusa,
    texts: Sequence[tuple[Sequence[int], int]],
    *,
    ranks: int = 10,
) -> np.ndarray:
    """Share of places where the candidate of rank r of head i was the token that came.

    Args:
        target: wrote the texts, greedily.
        drafter: the heads.
        texts: token ids with how many of them are the prompt, whose own tokens do not count.
        ranks: R candidates a head are looked at.

    Returns:
        [K, R] float64, for `jspec.trees.search.best_tree`.

    Raises:
        ValueError: more ranks than the draft vocabulary has tokens, or texts too short for the last
            head.
    """
    if not 1 <= ranks <= drafter.config.draft_vocab_size:
        raise ValueError(
            f"ranks={ranks}; expected 1 to {drafter.config.draft_vocab_size}, the size of the "
            "draft vocabulary."
        )
    count = jax.jit(lambda *arrays: _count(target, drafter, ranks, *arrays))
    hits = np.zeros((drafter.config.num_heads, ranks))
    places = np.zeros((drafter.config.num_heads, 1))
    for ids, prompt_length in texts:
        width = max(2 * _ROWS, 1 << (len(ids) - 1).bit_length())
        tokens = np.zeros((width,), np.int32)
        tokens[: len(ids)] = ids
        span = jnp.asarray([prompt_length, len(ids)], jnp.int32)
        new_hits, new_places = count(target.params, drafter.params, jnp.asarray(tokens), span)
        hits += np.asarray(new_hits)
        places += np.asarray(new_places)[:, None]
    if not places.all():
        raise ValueError(
            f"the texts have no place where head {int(np.argmin(places))} could be judged: it "
            f"guesses {int(np.argmin(places)) + 2} tokens ahead; generate longer ones."
        )
    return hits / places


def _count(
    target: Target,
    drafter: Medusa,
    ranks: int,
    target_params,
    drafter_params,
    tokens: Int[Array, "S"],
    span: Int[Array, "2"],
) -> tuple[Int[Array, "K R"], Int[Array, "K"]]:
    """Hits by head and rank, and judged places by head, of one padded text."""
    width, heads = tokens.shape[0], drafter.config.num_heads
    positions = jnp.arange(width, dtype=jnp.int32)
    hidden = target.forward(target_params, tokens[None], positions[None]).hidden[0]
    module = nnx.merge(drafter.graphdef, drafter_params)
    token_map = None if drafter.token_map is None else jnp.asarray(drafter.token_map, jnp.int32)

    def candidates(rows):
        ids = jax.lax.top_k(module(rows, heads), ranks)[1]
        return ids if token_map is None else token_map[ids]

    guesses = jax.lax.map(candidates, hidden.reshape(-1, _ROWS, hidden.shape[-1]))
    guesses = guesses.reshape(width, heads, ranks)
    ahead = 2 + jnp.arange(heads, dtype=jnp.int32)[None, :]
    came = tokens[jnp.minimum(positions[:, None] + ahead, width - 1)]
    # The first root is the first generated token; what follows it is drafted.
    judged = (positions[:, None] >= span[0] - 1) & (positions[:, None] + ahead < span[1])
    hit = (guesses == came[:, :, None]) & judged[:, :, None]
    return hit.sum(axis=0, dtype=jnp.int32), judged.sum(axis=0, dtype=jnp.int32)
