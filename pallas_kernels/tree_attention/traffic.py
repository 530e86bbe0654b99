"""How many bytes a tree-attention call has to move, from its shapes alone."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes one call reads and writes if every operand passes the memory bus once.

    Attributes:
        prefix: K and V of the committed columns; the part that grows with the context.
        tree: K and V of the tree's nodes.
        queries: queries read and outputs written.
        mask: ancestor words read, `Tq * W * 4` a slot, whatever the context length.
        partials: float32 partial results written and read back where the prefix is split.
    """

    prefix: int
    tree: int
    queries: int
    mask: int
    partials: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.prefix + self.tree + self.queries + self.mask + self.partials


def bytes_moved(
    *,
    batch: int,
    queries: int,
    nodes: int,
    committed: int,
    heads: int,
    kv_heads: int,
    dim: int,
    itemsize: int,
    splits: int = 1,
) -> Traffic:
    """The traffic of one call.

    Args:
        batch: slots.
        queries: Tq.
        nodes: Tk.
        committed: prefix columns summed over the slots.
        heads: H.
        kv_heads: K.
        dim: D.
        itemsize: bytes per element of q, K and V.
        splits: parts of each prefix; one part leaves no partial results.
    """
    rows = batch * queries * heads
    return Traffic(
        prefix=2 * committed * kv_heads * dim * itemsize,
        tree=2 * batch * nodes * kv_heads * dim * itemsize,
        queries=2 * rows * dim * itemsize,
        mask=batch * queries * -(-nodes // 32) * 4,
        partials=0 if splits == 1 else 2 * splits * rows * (dim + 2) * 4,
    )
