"""Launch shape of the walking kernels."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeWalkConfig:
    """One program walks one tree.

    Attributes:
        num_warps: warps per program: 1, 2, 4, 8 or 16.
        block_v: vocabulary entries per loop step of the sampling walk; a power of two.
    """

    num_warps: int = 1
    block_v: int = 2048

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps is {self.num_warps}, expected 1, 2, 4, 8 or 16")
        if self.block_v < 16 or self.block_v & (self.block_v - 1):
            raise ValueError(f"block_v is {self.block_v}, expected a power of two from 16")
