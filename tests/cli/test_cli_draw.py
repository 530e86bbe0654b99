"""A round's tree as text."""

from jspec.trees.draw import draw_round
from jspec.trees.view import NodeView, RoundView

WORDS = ["the", "city", "town", "of", "in", "Paris", 'a "quote"\n']


def _decode(token):
    return WORDS[token]


def _view(*nodes, bonus=5):
    return RoundView([n and NodeView(*n) for n in nodes], bonus)


def test_path_rejected_nodes_scores_and_bonus():
    view = _view(
        (0, -1, 0, 1.0, True),
        (2, 0, 1, 0.07, False),
        (1, 0, 1, 0.81, True),
        (3, 2, 2, 0.625, True),
        (4, 2, 2, 0.11, False),
        None,
    )
    assert draw_round(view, _decode).plain.splitlines() == [
        '2 of 4 drafted tokens accepted, bonus "Paris"',
        '"the"',
        '├─ ✓ "city"  0.81',
        '│  ├─ ✓ "of"  0.62',
        '│  │  ╰─ ★ "Paris"',
        '│  ╰─ ✗ "in"  0.11',
        '╰─ ✗ "town"  0.07',
    ]


def test_nothing_accepted():
    view = _view((0, -1, 0, 1.0, True), (1, 0, 1, 0.5, False))
    assert draw_round(view, _decode, title="round 3").plain.splitlines() == [
        "round 3",
        '"the"',
        '├─ ★ "Paris"',
        '╰─ ✗ "city"  0.5',
    ]


def test_nothing_drafted_and_text_that_needs_quoting():
    view = _view((0, -1, 0, 1.0, True), None, bonus=6)
    assert draw_round(view, _decode).plain.splitlines() == [
        r'nothing drafted, next token "a \"quote\"\n"',
        '"the"',
        r'╰─ ★ "a \"quote\"\n"',
    ]
