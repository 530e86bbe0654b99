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
    nodes = [node for node in view.nodes if node is not None]
    drafted = len(nodes) - 1
    accepted = [i for i, node in enumerate(view.nodes) if node is not None and node.accepted]
    if title is None:
        title = _title(drafted, max(len(accepted) - 1, 0), view, decode)
    lines = [Text().append(title, style="bold")]
    last = accepted[-1] if accepted else 0

    def branch(node: int, indent: str) -> None:
        # The accepted child first, and the bonus where an accepted child would be.
        children = sorted(view.children(node), key=lambda child: not _is_accepted(view, child))
        has_bonus = node == last and view.bonus is not None
        entries: list[int | None] = [None, *children] if has_bonus else [*children]
        for place, child in enumerate(entries):
            is_last = place == len(entries) - 1
            line = Text().append(indent + ("╰─ " if is_last else "├─ "), style="dim")
            if child is None and view.bonus is not None:
                line.append(f"★ {_quoted(view.bonus, decode)}", style=BONUS)
            elif child is not None:
                line.append_text(_node(view, child, decode))
            lines.append(line)
            if child is not None:
                branch(child, indent + ("   " if is_last else "│  "))

    root = view.nodes[0]
    if root is not None:
        lines.append(Text(_quoted(root.token, decode)))
        branch(0, "")
    return Text("\n").join(lines)


def _title(drafted: int, accepted: int, view: RoundView, decode: Callable[[int], str]) -> str:
    bonus = None if view.bonus is None else _quoted(view.bonus, decode)
    if not drafted:
        return f"nothing drafted, next token {bonus}"
    tokens = "token" if drafted == 1 else "tokens"
    end = "where the text ends" if bonus is None else f"bonus {bonus}"
    return f"{accepted} of {drafted} drafted {tokens} accepted, {end}"


def _is_accepted(view: RoundView, node: int) -> bool:
    found = view.nodes[node]
    return found is not None and found.accepted


def _node(view: RoundView, node: int, decode: Callable[[int], str]) -> Text:
    found = view.nodes[node]
    assert found is not None
    mark, style = ("✓", ACCEPTED) if found.accepted else ("✗", REJECTED)
    line = Text()
    line.append(f"{mark} {_quoted(found.token, decode)}", style=style)
    return line.append(f"  {found.score:.2g}", style="dim")


def _quoted(token: int, decode: Callable[[int], str]) -> str:
    return json.dumps(decode(token), ensure_ascii=False)
