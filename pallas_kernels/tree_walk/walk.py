"""What a walk returns."""

from typing import NamedTuple

from jaxtyping import Array, Int32


class Walk(NamedTuple):
    """The accepted path of every slot.

    Attributes:
        path: [B, P] int32 node ids, the root first; the tail repeats the last accepted node.
        length: [B] int32, accepted nodes counting the root, so at least 1.
        bonus: [B] int32, the target's token after the last accepted node.
    """

    path: Int32[Array, "B P"]
    length: Int32[Array, " B"]
    bonus: Int32[Array, " B"]
