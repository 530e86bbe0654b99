"""Launch shape of the tree-building kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeBuildConfig:
    """One program builds one tree.

    Attributes:
        num_warps: warps per program: 1, 2, 4, 8 or 16.
    """

    num_warps: int = 4

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps is {self.num_warps}, expected 1, 2, 4, 8 or 16")
