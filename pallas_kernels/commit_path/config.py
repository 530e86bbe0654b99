"""Launch shape of the path-commit kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitPathConfig:
    """One program moves one row of a few caches.

    Attributes:
        num_warps: warps per program: 1, 2, 4, 8 or 16.
        arrays_per_program: caches one program writes; the others are spread over the grid.
    """

    num_warps: int = 1
    arrays_per_program: int = 4

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps is {self.num_warps}, expected 1, 2, 4, 8 or 16")
        if self.arrays_per_program < 1:
            raise ValueError(
                f"arrays_per_program is {self.arrays_per_program}, expected at least 1"
            )
