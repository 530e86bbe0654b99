"""Taking in the prompts: chunk by chunk, in few shapes, until every slot has its root."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.drafters.base import Rows
from jspec.engine.finish import cut_run
from jspec.engine.state import RUNNING, STOPPED, DecodeState, LastRound, Requests, RoundLog
from jspec.engine.step import Round, append_tokens
from jspec.sampling import History, LogprobLog, choose_tokens, process_logits
from jspec.targets import Prefix
from jspec.targets.masks import causal_bits

MAX_CHUNK = 512
"""Prompt tokens a pass; longer prompts take several."""

MIN_CHUNK = 16


def chunk_plan(longest: int) -> list[tuple[int, int]]:
    """(offset, width) of each chunk: full ones, then a power of two that holds the rest."""
    plan = [(start, MAX_CHUNK) for start in range(0, longest - MAX_CHUNK + 1, MAX_CHUNK)]
    done = len(plan) * MAX_CHUNK
    if done < longest:
        width = max(MIN_CHUNK, 1 << (longest - done - 1).bit_length())
        plan.append((done, width))
    return plan


def capacity_bucket(tokens: int) -> int:
    """Cache capacity for `tokens`: few distinct sizes, at most half too large."""
    size = 128
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 and size >= 256 else _next_power(size)
    return size


def _next_power(size: int) -> int:
    return 1 << size.bit_length()


def empty_state(
    round_: Round,
    requests: Requests,
    tokens: Int[Array, "B C"],
    *,
    capacity: int,
    max_rounds: int,
    logprobs: int | None = None,
) -> DecodeState:
    """Empty slots with their prompts waiting in `tokens`; a slot without a prompt is finished.

    Args:
        round_: the static choices.
        requests: what is asked of each slot.
        tokens: prompts, padded to capacity + MAX_CHUNK + 1, so that no slice is ever clamped.
        capacity: S, tokens a slot's cache holds.
        max_rounds: R, rounds the log has room for.
        logprobs: report those of emitted tokens and of this many likeliest ones.
    """
    slots = tokens.shape[0]
    drafter = round_.drafter
    return DecodeState(
        tokens=tokens,
        lengths=jnp.zeros((slots,), jnp.int32),
        cache=round_.target.empty_cache(slots, capacity),
        drafter=() if drafter is None else drafter.init_state(drafter.params, slots, capacity),
        reason=jnp.where(requests.prompt_lengths > 0, RUNNING, STOPPED).astype(jnp.int32),
        requests=requests,
        log=RoundLog.empty(slots, max_rounds),
        last=LastRound.empty(slots, round_.num_nodes, round_.path_width),
        history=(
            History.of_prompts(tokens, requests.prompt_lengths, round_.target.config.vocab_size)
            if requests.shaping.looks_back
            else None
        ),
        logprobs=(None if logprobs is None else LogprobLog.empty(slots, tokens.shape[1], logprobs)),
    )


def prefill_chunk(
    round_: Round,
    params,
    state: DecodeState,
    offset: Int[Array, ""],
    *,
    width: int,
    first: bool,
    sampled: bool,
) -> DecodeState:
    """Commit prompt tokens offset .. offset + width of every slot that has them.

    A slot whose prompt ends in this chunk gets its root: the token the target puts after it.

    Args:
        round_: the static choices.
        offset: committed length of every slot still in its prompt.
        width: of the chunk.
        first: nothing is committed yet, so no cache is read.
        sampled: whether any slot samples.
    """
    target_params, drafter_params = params
    requests = state.requests
    batch = state.tokens.shape[0]
    tokens = jax.lax.dynamic_slice_in_dim(state.tokens, offset, width, axis=1)
    count = jnp.clip(requests.prompt_lengths - offset, 0, width)
    place = jnp.arange(width, dtype=jnp.int32)
    positions = jnp.broadcast_to(offset + place, (batch, width))
    prefix = None if first else Prefix(state.cache, state.lengths)
    passed = round_.target.forward(
        target_params,
        tokens,
        positions,
        prefix,
        None if first else jnp.broadcast_to(causal_bits(width), (batch, width, -(-width // 32))),
        feature_layers=() if round_.drafter is None else round_.drafter.feature_layers,
        implementation=round_.implementation,
    )
    path = jnp.broadcast_to(place, (batch, width))
    cache = state.cache.commit(passed.new, path, count, state.lengths, round_.implementation)

    ends = (count > 0) & (state.lengths + count == requests.prompt_lengths)
    last = jnp.maximum(count - 1, 0)[:, None]
    hidden = jnp.take_along_axis(passed.hidden, last[:, :, None], axis=1)
    logits = round_.target.logits(target_params, hidden)
    lengths = state.lengths + count
    processed = process_logits(
        logits,
        requests.shaping,
        requests.temperature,
        jnp.zeros((batch, 1), jnp.int32),
        state.history,
        None,
        sampled=sampled,
    )
    root = choose_tokens(
        processed,
        requests.temperature,
        requests.keys,
        lengths[:, None],
        sampled=sampled and round_.rule.draws,
    )
    logprobs = state.logprobs
    if logprobs is not None:
        logprobs = logprobs.add(logits, root, lengths, ends.astype(jnp.int32))
    known = append_tokens(state.tokens, lengths, jnp.maximum(root, 0), ends.astype(jnp.int32))
    # The token after the last prompt token fills one place, and may be the end already.
    _, reason = cut_run(
        root, jnp.ones_like(lengths), requests.stop_ids, requests.limits - requests.prompt_lengths
    )

    drafter = state.drafter
    if round_.drafter is not None:
        rows = Rows(
            tokens=tokens,
            next_tokens=jax.lax.dynamic_slice_in_dim(known, offset + 1, width, axis=1),
            start=state.lengths,
            count=count,
            hidden=passed.hidden,
            features=passed.features,
        )
        drafter = round_.drafter.prefill(drafter_params, drafter, rows)
    return dataclasses.replace(
        state,
        tokens=known,
        lengths=lengths,
        cache=cache,
        drafter=drafter,
        reason=jnp.where(ends & (state.reason == RUNNING), reason, state.reason),
        logprobs=logprobs,
    )
