"""The attention mask of a tree as a drawing: which columns each row sees."""

from collections.abc import Callable

import numpy as np

from jspec.drawing.svg import (
    FAINT,
    INK,
    LOOKS,
    RULE,
    Number,
    Svg,
    drawing,
    element,
    escape,
    shorten,
    width_of,
    write,
)
from jspec.trees.draw import quoted
from jspec.trees.tree import Tree

_CELL, _MARGIN, _LONGEST = 22, 14, 20


def draw_mask(
    tree: Tree, slot: int = 0, *, prefix: int = 0, decode: Callable[[int], str] = str
) -> Svg:
    """A row for each node, a column for each node, filled where the row sees the column.

    A node sees itself, its ancestors and the whole prefix, which stands as one wide column: it is
    implied by the length and no mask is kept for it. Rows of padding are left empty.

    Args:
        tree: on the device or the host.
        slot: which of its B trees.
        prefix: committed tokens.
        decode: the text of one token id; default the id itself.

    Raises:
        ValueError: no such slot.
    """
    batch, nodes = np.shape(tree.token)
    if not 0 <= slot < batch:
        raise ValueError(f"slot={slot}; expected 0 to {batch - 1}, the trees that there are.")
    valid = np.asarray(tree.valid)[slot]
    words = np.asarray(tree.ancestors)[slot]
    column = np.arange(nodes, dtype=np.uint32)
    sees = ((words[:, column // 32] >> (column % 32)) & 1).astype(bool) & valid[:, None]
    labels = [
        f"{node} {shorten(quoted(int(token), decode), _LONGEST)}"
        if valid[node]
        else f"{node} padding"
        for node, token in enumerate(np.asarray(tree.token)[slot])
    ]
    left = _MARGIN + max(map(width_of, labels)) + 8
    says = f"prefix: {prefix}"
    first = left + (width_of(says) + 16 if prefix else 0)
    top = _MARGIN + _CELL
    parts = []
    if prefix:
        parts.append(write(left + 8, top - 12, says, FAINT))
    for node in range(nodes):
        shift = (_CELL - width_of(str(node))) / 2
        parts.append(write(first + node * _CELL + shift, top - 12, str(node), FAINT))
    for row, label in enumerate(labels):
        y = top + row * _CELL
        parts.append(write(_MARGIN, y + _CELL / 2, label, INK if valid[row] else FAINT))
        if prefix:
            reads = valid[row]
            parts.append(_cell(left, y, first - left, bool(reads), f"row {row}: the prefix"))
        for at in range(nodes):
            seen = bool(sees[row, at])
            word = "sees" if seen else "does not see"
            parts.append(_cell(first + at * _CELL, y, _CELL, seen, f"row {row} {word} column {at}"))
    width = first + nodes * _CELL + _MARGIN
    longest = max(map(len, labels))
    marks = ["".join(row) for row in np.where(sees, "#", ".")]
    lines = [f"{label:<{longest}}  {row}" for label, row in zip(labels, marks)]
    text = "\n".join(["which columns each row sees", *lines])
    return drawing(width, top + nodes * _CELL + _MARGIN, text, *parts)


def _cell(x: Number, y: Number, width: Number, seen: bool, says: str) -> str:
    place = {
        "class": "sees" if seen else "blind",
        "x": x + 1,
        "y": y + 1,
        "width": width - 2,
        "height": _CELL - 2,
        "fill": LOOKS["bonus"].border if seen else "#f6f8fa",
        "stroke": RULE,
    }
    return element("rect", place, element("title", {}, escape(says)))
