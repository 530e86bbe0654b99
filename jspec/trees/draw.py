"""A round's tree as text, for terminals and notebooks."""

import json
from collections.abc import Callable

from rich.text import Text

from jspec.trees.view import RoundView

ACCEPTED, REJECTED, BONUS = "green", "red", "bold cyan"


def draw_round(view: RoundView, decode: Callable[[int], str], title: str | None = None) -> Text:
    """One line a node, in box-drawing characters: what was drafted and how far the target agreed.

    ✓ is on the accepted path, ✗ is rejected, ★ is the bonus: the target's own token, placed below
    the last accepted node. A drafted node ends with its score. Print it with rich for colors;
    `.plain` is the same text without.

    Args:
        view: of `Update.round`.
        decode: the text of one token id.
        title: first line; default a count of drafted and accepted nodes.

    Example:
        2 of 4 drafted tokens accepted, bonus " Paris"
        " the"
        ├─ ✓ " city"  0.81
        │  ├─ ✓ " of"  0.62
        │  │  ╰─ ★ " Paris"
        │  ╰─ ✗ " in"  0.11
        ╰─ ✗ " town"  0.07
    """
    lines = [Text().append(title or describe(view, decode), style="bold")]

    def branch(node: int, indent: str) -> None:
        entries = view.below(node)
        for place, child in enumerate(entries):
            is_last = place == len(entries) - 1
            line = Text().append(indent + ("╰─ " if is_last else "├─ "), style="dim")
            if child is None and view.bonus is not None:
                line.append(f"★ {quoted(view.bonus, decode)}", style=BONUS)
            elif child is not None:
                line.append_text(_node(view, child, decode))
            lines.append(line)
            if child is not None:
                branch(child, indent + ("   " if is_last else "│  "))

    root = view.nodes[0]
    if root is not None:
        lines.append(Text(quoted(root.token, decode)))
        branch(0, "")
    return Text("\n").join(lines)


def describe(view: RoundView, decode: Callable[[int], str]) -> str:
    """A round in one line: how many drafted tokens were accepted, and the bonus."""
    bonus = None if view.bonus is None else quoted(view.bonus, decode)
    if not view.drafted:
        return f"nothing drafted, next token {bonus}"
    tokens = "token" if view.drafted == 1 else "tokens"
    end = "where the text ends" if bonus is None else f"bonus {bonus}"
    return f"{max(len(view.path) - 1, 0)} of {view.drafted} drafted {tokens} accepted, {end}"


def _node(view: RoundView, node: int, decode: Callable[[int], str]) -> Text:
    found = view.nodes[node]
    assert found is not None
    mark, style = ("✓", ACCEPTED) if found.accepted else ("✗", REJECTED)
    line = Text()
    line.append(f"{mark} {quoted(found.token, decode)}", style=style)
    return line.append(f"  {found.score:.2g}", style="dim")


def quoted(token: int, decode: Callable[[int], str]) -> str:
    """The text of a token in quotes, on one line."""
    return json.dumps(decode(token), ensure_ascii=False)
