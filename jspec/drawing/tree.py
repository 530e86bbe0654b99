"""A round's tree as a drawing: depth from left to right, the accepted path along the top."""

from collections.abc import Callable
from dataclasses import dataclass

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
from jspec.trees.draw import describe, draw_round, quoted
from jspec.trees.view import RoundView

_BOX, _ROW, _GAP, _MARGIN, _LONGEST = 26, 34, 34, 14, 24
_MARKS = {"root": "", "accepted": "✓ ", "rejected": "✗ ", "bonus": "★ "}


@dataclass(frozen=True)
class _Box:
    """A node, or the bonus, with its place: row from the top, depth from the left."""

    node: int | None
    parent: int
    row: int
    depth: int
    kind: str
    label: str
    score: str
    says: str

    @property
    def width(self) -> int:
        return width_of(self.label + self.score) + 18


def draw_tree(view: RoundView, decode: Callable[[int], str] = str, title: str | None = None) -> Svg:
    """What was drafted and how far the target agreed, as an SVG.

    ✓ is on the accepted path, ✗ is rejected, ★ is the bonus: the target's own token, placed after
    the last accepted node. A drafted node ends with its score. Where the `.svg` itself is opened,
    the whole token and the node's number show under the mouse.

    Args:
        view: of `Update.round`.
        decode: the text of one token id, such as `tokenizer.token_text`; default the id itself.
        title: first line; default a count of drafted and accepted nodes.
    """
    title = title or describe(view, decode)
    boxes = _placed(view, decode)
    places = {box.node: box for box in boxes if box.node is not None}
    widths = [
        max(box.width for box in boxes if box.depth == depth)
        for depth in range(1 + max(box.depth for box in boxes))
    ]
    left = [_MARGIN + sum(widths[:depth]) + _GAP * depth for depth in range(len(widths))]
    top = _MARGIN + _ROW

    def middle(box: _Box) -> Number:
        return top + box.row * _ROW + _BOX / 2

    edges, nodes = [], []
    for box in boxes:
        look = LOOKS[box.kind]
        x, y = left[box.depth], middle(box)
        if box.depth:
            above = places[box.parent]
            start, from_y = left[above.depth] + above.width, middle(above)
            bend = (start + x) / 2
            line = {
                "d": f"M{start} {from_y} C{bend} {from_y} {bend} {y} {x} {y}",
                "fill": "none",
                "stroke": RULE if box.kind == "rejected" else look.border,
                "stroke-width": 1.5 if box.kind == "rejected" else 3,
            }
            edges.append(element("path", line))
        rectangle = {
            "x": x,
            "y": y - _BOX / 2,
            "width": box.width,
            "height": _BOX,
            "rx": 6,
            "fill": look.fill,
            "stroke": look.border,
        }
        parts = [element("title", {}, escape(box.says)), element("rect", rectangle)]
        parts.append(write(x + 9, y, box.label, look.text))
        if box.score:
            parts.append(write(x + 9 + width_of(box.label), y, box.score, FAINT))
        number = "bonus" if box.node is None else box.node
        nodes.append(element("g", {"class": box.kind, "data-node": number}, *parts))
    height = top + _ROW * (1 + max(box.row for box in boxes)) + _MARGIN
    width = max(left[-1] + widths[-1], _MARGIN + width_of(title)) + _MARGIN
    heading = write(_MARGIN, _MARGIN + 8, title, INK, **{"font-weight": "bold"})
    text = draw_round(view, decode, title).plain
    return drawing(width, height, text, heading, *edges, *nodes)


def _placed(view: RoundView, decode: Callable[[int], str]) -> list[_Box]:
    """Boxes in drawing order; a node stands in the row of its first child."""
    boxes: list[_Box] = []
    rows = 0

    def place(node: int | None, parent: int, depth: int) -> None:
        nonlocal rows
        found = None if node is None else view.nodes[node]
        if found is None:
            assert view.bonus is not None
            kind, token, score, says = "bonus", view.bonus, "", "the target's own token"
        else:
            accepted = "accepted" if found.accepted else "rejected"
            kind, token = ("root" if depth == 0 else accepted), found.token
            score = "" if depth == 0 else f"  {found.score:.2g}"
            says = f"node {node}, token {token}, depth {depth}"
        text = quoted(token, decode)
        label = _MARKS[kind] + shorten(text, _LONGEST)
        boxes.append(_Box(node, parent, rows, depth, kind, label, score, f"{text}: {says}"))
        below = [] if node is None else view.below(node)
        for child in below:
            place(child, -1 if node is None else node, depth + 1)
        if not below:
            rows += 1

    place(0, -1, 0)
    return boxes
