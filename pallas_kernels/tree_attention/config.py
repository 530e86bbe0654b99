"""Block sizes of the tree-attention kernel and the rule that chooses them."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeAttentionConfig:
    """How one tree-attention launch is cut up.

    Attributes:
        block_rows: query rows (nodes x grouped heads) per program; a power of two from 16.
        block_k: prefix columns per loop step; a power of two from 16.
        num_warps: warps per program: 1, 2, 4, 8 or 16.
        num_stages: software pipeline depth of the prefix loop.
        splits: programs that share one request's prefix; their results merge by log-sum-exp.
    """

    block_rows: int
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 2
    splits: int = 1

    def __post_init__(self) -> None:
        for name in ("block_rows", "block_k"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} is {value}, expected a power of two of at least 16")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps is {self.num_warps}, expected 1, 2, 4, 8 or 16")
        for name in ("num_stages", "splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
