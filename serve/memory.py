"""What a server will hold, counted before anything is allocated."""

import math
import os
from dataclasses import dataclass

import jax

from jspec.engine import Engine
from jspec.engine.prefill import MAX_CHUNK, empty_state
from jspec.engine.requests import Form, tabulate

_TOKENS_AT_ONCE = 2048
"""Prompt tokens of one prefill pass: enough for any device to be busy with."""


def admission_size(slots: int, width: int) -> int:
    """How many requests with prompts up to `width` may be prefilled together."""
    return max(1, min(slots, _TOKENS_AT_ONCE // width, 16))


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device.

    Attributes:
        weights: of target and drafter; what they share is counted once.
        cache: the target's keys and values of all slots.
        drafter: the drafter's state of all slots.
        tables: tokens, requests, logs, and what penalties and log-probabilities need.
        admission: the state that newcomers are prefilled in, at its largest.
        passes: an upper estimate of what one pass needs beside that.
    """

    weights: int
    cache: int
    drafter: int
    tables: int
    admission: int
    passes: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in vars(self).items())
        return f"{self.total / 2**20:.1f} MiB ({parts})"

    def check(self, limit: int) -> None:
        """Refuse what does not fit.

        Raises:
            ValueError: with the numbers.
        """
        if self.total > limit:
            raise ValueError(
                f"the job needs {self}, but memory_limit is {limit / 2**20:.1f} MiB; lower slots "
                "or capacity, or take a smaller model or dtype."
            )


def plan_memory(
    engine: Engine, slots: int, capacity: int, form: Form, *, split: int = 1
) -> MemoryPlan:
    """Count what a server needs.

    Args:
        engine: that it runs.
        slots: B.
        capacity: S.
        form: the widest tables that requests may ask for.
        split: devices that weights and cache are split over.
    """

    def sizes(count: int, tokens: int) -> tuple[int, int, int]:
        """Of cache, drafter's state and tables."""

        def parts():
            requests, prompts = tabulate(engine, [], count, tokens, form)
            state = empty_state(
                engine.round,
                requests,
                prompts,
                capacity=tokens,
                max_rounds=tokens,
                logprobs=form.logprobs,
            )
            return [jax.tree.leaves(part) for part in (state.cache, state.drafter, state)]

        cache, drafter, everything = map(_bytes, jax.eval_shape(parts))
        return cache, drafter, everything - cache - drafter

    cache, drafter, tables = sizes(slots, capacity)
    weights = {id(leaf): _bytes(leaf) for leaf in jax.tree.leaves(engine.params)}
    short = max(sum(sizes(admission_size(slots, width), width)) for width in (128, MAX_CHUNK))
    return MemoryPlan(
        weights=sum(weights.values()) // split,
        cache=cache // split,
        drafter=drafter,
        tables=tables,
        admission=max(short, sum(sizes(1, capacity)) if capacity > MAX_CHUNK else 0),
        passes=_pass_bytes(engine, slots, capacity),
    )


def default_limit() -> int:
    """What the device says it has, or all of the machine's memory where it does not."""
    stats = jax.local_devices()[0].memory_stats() or {}
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(stats.get("bytes_limit", physical))


def _pass_bytes(engine: Engine, slots: int, capacity: int) -> int:
    """Logits, what walks over them; activations and scores of one layer; new rows.

    A walk holds one array of the size of the logits at most, and a few rows of every slot.
    """
    config, size = engine.target.config, engine.target.dtype.itemsize
    rows = slots * engine.round.num_nodes

    def layers(rows: int, seen: int) -> int:
        wide = 2 * config.intermediate_size + 8 * config.hidden_size
        return rows * (wide * size + config.num_heads * seen * 4)

    kept = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
    prompt = admission_size(slots, MAX_CHUNK) * MAX_CHUNK
    walked = (2 * rows + 8 * slots) * config.vocab_size * 4
    verify = walked + rows * kept + layers(rows, capacity)
    prefill = prompt * kept + layers(prompt, MAX_CHUNK)
    longest = layers(MAX_CHUNK, capacity + MAX_CHUNK) if capacity > MAX_CHUNK else 0
    return max(verify, prefill, longest)


def _bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
