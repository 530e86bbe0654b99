"""float8 weights with a float32 scale per block, as DeepSeek-V3 is published.

A weight `x.weight` of shape [O, I] in float8_e4m3 comes with `x.weight_scale_inv` of shape
[ceil(O/128), ceil(I/128)]; the value of an entry is its float8 number times its block's scale.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

DEFAULT_BLOCK = (128, 128)


def scale_name(name: str) -> str:
    """The tensor that holds the block scales of weight `name`."""
    return f"{name}_scale_inv"


def block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, from a config's `quantization_config`.

    Raises:
        NotImplementedError: another quantisation; it is named.
        ValueError: a block size that is not two positive integers.
    """
    quantisation = config.get("quantization_config") or {}
    method = quantisation.get("quant_method", "fp8")
    if method != "fp8":
        raise NotImplementedError(
            f"quant_method={method!r} is not supported; expected 'fp8' with block scales, or "
            "weights that are not quantised."
        )
    block = quantisation.get("weight_block_size") or DEFAULT_BLOCK
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ValueError(f"weight_block_size={block!r}; expected two positive integers.")
    return block[0], block[1]


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight."""
    return tuple(-(-size // step) for size, step in zip(shape, block))


def dequantise(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32 values of a block-scaled weight.

    Args:
        weight: [O, I] float8.
        scale: of the shape that `grid` gives.
        block: rows and columns that share a scale.
    """
    rows, columns = weight.shape
    wide = np.repeat(np.repeat(scale.astype(np.float32), block[0], 0)[:rows], block[1], 1)
    return weight.astype(np.float32) * wide[:, :columns]
