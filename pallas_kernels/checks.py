"""Argument checks with errors that state what came, what was expected and how to fix it."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def shape(op: str, name: str, array: Any, expected: Sequence[int | str]) -> None:
    """Raises ValueError unless `array.shape` matches; strings stand for any size."""
    got = tuple(array.shape)
    fits = len(got) == len(expected) and all(
        isinstance(want, str) or want == have for have, want in zip(got, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, expected))
        raise ValueError(f"{op}: {name} has shape {got}, expected [{wanted}]")


def dtype(op: str, name: str, array: Any, expected: Any) -> None:
    """Raises ValueError unless the array has exactly this dtype."""
    if array.dtype != jnp.dtype(expected):
        want = jnp.dtype(expected).name
        raise ValueError(
            f"{op}: {name} has dtype {array.dtype}, expected {want}; "
            f"convert it with {name}.astype(jnp.{want})"
        )


def words(nodes: int) -> int:
    """Mask words of 32 bits that hold one bit per node."""
    return -(-nodes // 32)
