"""Ancestor bits in the encodings other engines use.

The engine itself keeps bits over tree columns; these conversions exist for parity and for
reading recorded masks. Node order and bit order are the same everywhere: column j is node j.

Source: SGLang's FULL_MASK, QLEN_ONLY and QLEN_ONLY_BITPACKING tree masks.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt8, UInt32

PACKED_DTYPES = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def to_qlen_only(ancestors: UInt32[Array, "B T W"]) -> Bool[Array, "B T T"]:
    """Tree columns only: [B, T, T] bool, True where column j is row i or above it."""
    nodes = ancestors.shape[1]
    column = jnp.arange(nodes, dtype=jnp.uint32)
    return ((ancestors[:, :, column // 32] >> (column % 32)[None, None, :]) & 1) == 1


def from_qlen_only(mask: Bool[Array, "B T T"]) -> UInt32[Array, "B T W"]:
    """The inverse of `to_qlen_only`; also takes masks built elsewhere."""
    batch, rows, columns = mask.shape
    words = -(-columns // 32)
    padded = jnp.pad(mask, ((0, 0), (0, 0), (0, 32 * words - columns)))
    bits = padded.reshape(batch, rows, words, 32).astype(jnp.uint32)
    # Distinct powers of two: adding them is or-ing them.
    shifts = jnp.arange(32, dtype=jnp.uint32)[None, None, None, :]
    return (bits << shifts).sum(axis=-1, dtype=jnp.uint32)


def to_full(ancestors: UInt32[Array, "B T W"], lengths: Int[Array, " B"]) -> Bool[np.ndarray, " X"]:
    """Prefix and tree columns: per slot T rows of `lengths[b] + T`, all slots concatenated.

    The result's size depends on the lengths, so this runs on the host, outside jit.
    """
    tree = np.asarray(to_qlen_only(ancestors))
    rows = [
        np.concatenate([np.ones((tree.shape[1], int(length)), bool), mask], axis=1).ravel()
        for mask, length in zip(tree, np.asarray(lengths), strict=True)
    ]
    return np.concatenate(rows) if rows else np.zeros((0,), bool)


def from_full(
    mask: Bool[np.ndarray, " X"], lengths: Int[Array, " B"], nodes: int
) -> UInt32[Array, "B T W"]:
    """The inverse of `to_full`.

    Raises:
        ValueError: a mask whose size does not fit the lengths, or that hides prefix columns,
            which ancestor bits cannot express.
    """
    lengths_host = [int(length) for length in np.asarray(lengths)]
    expected = sum(nodes * (length + nodes) for length in lengths_host)
    if mask.size != expected:
        raise ValueError(
            f"full mask has {mask.size} entries, expected {expected} for lengths "
            f"{lengths_host} and {nodes} nodes"
        )
    trees, start = [], 0
    for length in lengths_host:
        rows = mask[start : start + nodes * (length + nodes)].reshape(nodes, length + nodes)
        if not rows[:, :length].all():
            raise ValueError("full mask hides prefix columns; tree masks show the whole prefix")
        trees.append(rows[:, length:])
        start += rows.size
    return from_qlen_only(jnp.asarray(np.stack(trees)))


def packed_width(nodes: int) -> int:
    """Bits per packed row: the smallest of 8, 16 and 32 that holds one per node.

    Raises:
        NotImplementedError: more than 32 nodes, which the packed encoding does not cover.
    """
    for width in PACKED_DTYPES:
        if nodes <= width:
            return width
    raise NotImplementedError(
        f"packed masks hold at most 32 nodes, got {nodes}; use the ancestor words as they are"
    )


def to_packed(ancestors: UInt32[Array, "B T W"], width: int | None = None) -> Array:
    """One unsigned integer per row: [B, T] uint8, uint16 or uint32, bit j for column j."""
    nodes = ancestors.shape[1]
    width = packed_width(nodes) if width is None else width
    if width not in PACKED_DTYPES or nodes > width:
        raise ValueError(f"width is {width} for {nodes} nodes, expected 8, 16 or 32 and no less")
    return ancestors[:, :, 0].astype(PACKED_DTYPES[width])


def to_packed_bytes(ancestors: UInt32[Array, "B T W"]) -> UInt8[Array, "B T bytes"]:
    """The packed rows as little-endian bytes, 1, 2 or 4 a row: SGLang's layout in memory."""
    count = packed_width(ancestors.shape[1]) // 8
    shifts = 8 * jnp.arange(count, dtype=jnp.uint32)[None, None, :]
    return ((ancestors[:, :, :1] >> shifts) & 0xFF).astype(jnp.uint8)


def from_packed_bytes(packed: UInt8[Array, "B T bytes"]) -> UInt32[Array, "B T W"]:
    """The inverse of `to_packed_bytes`."""
    shifts = 8 * jnp.arange(packed.shape[-1], dtype=jnp.uint32)[None, None, :]
    return (packed.astype(jnp.uint32) << shifts).sum(axis=-1, keepdims=True, dtype=jnp.uint32)
