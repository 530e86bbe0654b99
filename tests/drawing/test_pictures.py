"""Pictures made of markup: what is in them, whether they are well-formed and can be read."""

import base64
import re
import xml.etree.ElementTree as ElementTree

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drawing import draw_mask, draw_text, draw_tree
from jspec.drawing.svg import escape
from jspec.engine.output import Output
from jspec.engine.stats import Stats
from jspec.tokenizer import Tokenizer
from jspec.trees import build
from jspec.trees.draw import draw_round
from jspec.trees.view import NodeView, RoundView

SVG = "{http://www.w3.org/2000/svg}"
WORDS = ["the", "city", "town", "of", "in", "Paris"]
NASTY = [
    '<b>&"quoted"</b>',
    "\x00\x07\x1b[31m",
    "\ud800\ufffe",
    "$x$",
    "東京 and a very long token",
    "\n",
]


def view(*nodes, bonus: int | None = 5):
    return RoundView([n and NodeView(*n) for n in nodes], bonus)


def five_nodes():
    return view(
        (0, -1, 0, 1.0, True),
        (2, 0, 1, 0.07, False),
        (1, 0, 1, 0.81, True),
        (3, 2, 2, 0.625, True),
        (4, 2, 2, 0.11, False),
        None,
    )


def parsed(picture):
    image = ElementTree.fromstring(picture._repr_html_() + "</img>")
    kind, code = image.get("src", "").split(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(code).decode() == picture.markup
    root = ElementTree.fromstring(picture.markup)
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text == image.get("alt")
    return root


def groups(root):
    return {g.get("data-node"): g for g in root.iter(f"{SVG}g")}


def text_of(group):
    return "".join(text.text or "" for text in group.iter(f"{SVG}text"))


class TestTree:
    def test_nodes_labels_and_edges(self):
        picture = draw_tree(five_nodes(), WORDS.__getitem__)
        root = parsed(picture)
        found = groups(root)
        assert {name: g.get("class") for name, g in found.items()} == {
            "0": "root",
            "1": "rejected",
            "2": "accepted",
            "3": "accepted",
            "4": "rejected",
            "bonus": "bonus",
        }
        assert text_of(found["0"]) == '"the"'
        assert text_of(found["2"]) == '✓ "city"  0.81'
        assert text_of(found["4"]) == '✗ "in"  0.11'
        assert text_of(found["bonus"]) == '★ "Paris"'
        heading = next(root.iter(f"{SVG}text"))
        assert repr(picture) == draw_round(five_nodes(), WORDS.__getitem__).plain
        assert heading.text == '2 of 4 drafted tokens accepted, bonus "Paris"'

    def test_an_edge_joins_every_node_to_its_parent(self):
        root = parsed(draw_tree(five_nodes(), WORDS.__getitem__))
        found = groups(root)

        def box(name):
            rect = found[name].find(f"{SVG}rect")
            assert rect is not None
            x, y, width, height = (
                float(rect.get(key, "nan")) for key in ("x", "y", "width", "height")
            )
            return x, x + width, y + height / 2

        above = {"1": "0", "2": "0", "3": "2", "4": "2", "bonus": "3"}
        wanted = {(*box(up)[1:], box(down)[0], box(down)[2]) for down, up in above.items()}
        drawn = set()
        for path in root.iter(f"{SVG}path"):
            numbers = [float(n) for n in re.findall(r"-?[\d.]+", path.get("d", ""))]
            drawn.add((*numbers[:2], *numbers[-2:]))
        assert drawn == wanted
        # The accepted path is one straight line along the top.
        assert len({box(name)[2] for name in ("0", "2", "3", "bonus")}) == 1

    def test_boxes_do_not_overlap_and_lie_inside(self):
        root = parsed(draw_tree(five_nodes(), lambda token: NASTY[token]))
        width, height = (float(root.get(key, "nan")) for key in ("width", "height"))
        boxes = []
        for group in root.iter(f"{SVG}g"):
            rect = group.find(f"{SVG}rect")
            assert rect is not None
            x, y, w, h = (float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width
            assert 0 <= y <= y + h <= height
            boxes.append((x, y, x + w, y + h))
        for index, a in enumerate(boxes):
            for b in boxes[index + 1 :]:
                assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]

    def test_nothing_drafted_and_a_text_that_ends(self):
        root = parsed(draw_tree(view((0, -1, 0, 1.0, True), None), title="round 3"))
        assert [text.text for text in root.iter(f"{SVG}text")] == ["round 3", '"0"', '★ "5"']
        cut = view((0, -1, 0, 1.0, True), (1, 0, 1, 0.5, True), bonus=None)
        assert set(groups(parsed(draw_tree(cut)))) == {"0", "1"}

    def test_any_token_text_is_safe(self):
        picture = draw_tree(five_nodes(), lambda token: NASTY[token])
        found = groups(parsed(picture))
        assert "<b>" not in picture.markup
        assert text_of(found["0"]).startswith('"<b>&\\"quoted\\"')
        assert "…" in text_of(found["4"])  # cut, and whole under the mouse
        title = found["4"].find(f"{SVG}title")
        assert title is not None
        assert "a very long token" in (title.text or "")
        picture.markup.encode("utf-8")


class TestMask:
    def tree(self):
        token = jnp.asarray([[0, 1, 2, 3, 0], [0, 1, 2, 3, 4]], jnp.int32)
        parent = jnp.asarray([[-1, 0, 0, 1, -1], [-1, 0, 1, 2, 3]], jnp.int32)
        return build(token, parent, jnp.asarray([[True] * 4 + [False], [True] * 5]))

    def seen(self, root):
        cells = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class")]
        says = [cell.find(f"{SVG}title").text for cell in cells]
        assert [cell.get("class") == "sees" for cell in cells] == [
            "does not see" not in said for said in says
        ]
        wide = {said for said in says if said.endswith("the prefix")}
        return {tuple(map(int, re.findall(r"\d+", s))) for s in says if " sees " in s}, wide

    def test_a_row_sees_itself_and_its_ancestors(self):
        seen, wide = self.seen(parsed(draw_mask(self.tree(), decode=WORDS.__getitem__)))
        assert seen == {(0, 0), (1, 0), (1, 1), (2, 0), (2, 2), (3, 0), (3, 1), (3, 3)}
        assert not wide
        assert repr(draw_mask(self.tree())).splitlines()[1:] == [
            '0 "0"      #....',
            '1 "1"      ##...',
            '2 "2"      #.#..',
            '3 "3"      ##.#.',
            "4 padding  .....",
        ]
        seen, _ = self.seen(parsed(draw_mask(self.tree(), 1)))
        assert seen == {(row, column) for row in range(5) for column in range(row + 1)}

    def test_labels_and_prefix(self):
        root = parsed(draw_mask(self.tree(), prefix=7, decode=lambda token: NASTY[token]))
        texts = [text.text for text in root.iter(f"{SVG}text")]
        assert texts[0] == "prefix: 7"
        assert texts[1:6] == ["0", "1", "2", "3", "4"]
        assert texts[-1] == "4 padding"
        cells = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class")]
        assert len(cells) == 5 * 6

    def test_wide_trees_have_more_than_one_word(self):
        nodes = 40
        token = jnp.zeros((1, nodes), jnp.int32)
        parent = jnp.arange(-1, nodes - 1, dtype=jnp.int32)[None]
        tree = build(token, parent, jnp.ones((1, nodes), bool))
        seen, _ = self.seen(parsed(draw_mask(tree)))
        assert seen == {(row, column) for row in range(nodes) for column in range(row + 1)}

    def test_a_slot_that_is_not_there(self):
        with pytest.raises(ValueError, match="slot=2; expected 0 to 1"):
            draw_mask(self.tree(), 2)


class Words(Tokenizer):
    """Stands in for a tokenizer: one word an id, the last one ends the text."""

    def __init__(self):
        self.eos_token_ids = frozenset({5})

    def token_text(self, token):
        return NASTY[token]

    def stream_decoder(self):
        return self

    def push(self, ids):
        return "".join(map(self.token_text, ids))

    def flush(self):
        return ""


class TestText:
    def output(self):
        stats = Stats(
            accept_lengths=[3, 1, 1],
            corrects=[2, 0, 1],  # the last round's bonus was cut
            drafts=[4, 4, 4],
            num_steps=3,
            drafter="none",
            rule="target-sampling",
        )
        return Output(
            prompt_token_ids=[1],
            token_ids=[0, 1, 2, 3, 4, 5],
            text=None,
            finish_reason="stop",
            stats=stats,
        )

    def test_who_wrote_what(self):
        root = ElementTree.fromstring(draw_text(self.output()).markup)
        spans = [span for span in root.iter("span") if "token" in span.get("title", "")]
        assert [(span.text, span.get("class")) for span in spans] == [
            ("0 ", "bonus"),
            ("1 ", "accepted"),
            ("2 ", "accepted"),
            ("3 ", "bonus"),
            ("4 ", "bonus"),
            ("5 ", "accepted"),
        ]
        assert spans[1].get("title") == "token 1, round 1: drafted, accepted"
        assert "drafted 3 of 6 tokens" in "".join(root.itertext())

    def test_any_token_text_is_safe(self):
        picture = draw_text(self.output(), Words())
        root = ElementTree.fromstring(picture.markup)
        assert root.get("class") == "tex2jax_ignore"  # $x$ is not set as a formula
        texts = [span.text for span in root.iter("span")]
        assert repr(picture) == "".join(NASTY)
        assert texts[0] == '<b>&"quoted"</b>'
        assert texts[1] == "\ufffd\ufffd\ufffd[31m"
        assert texts[2] == "\ufffd\ufffd"


def luminance(color):
    levels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in levels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one, other):
    """WCAG 2.1; 4.5 is the least for text."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_drawings_bring_their_own_background():
    tree = TestMask().tree()
    for picture in (draw_tree(five_nodes()), draw_mask(tree, prefix=3)):
        root = parsed(picture)
        paper = root.find(f"{SVG}rect")
        assert paper is not None
        assert (paper.get("width"), paper.get("height")) == (root.get("width"), root.get("height"))
        for text in root.iter(f"{SVG}text"):
            assert contrast(text.get("fill"), paper.get("fill")) > 4.5
        for group in root.iter(f"{SVG}g"):
            box = group.find(f"{SVG}rect")
            for text in group.iter(f"{SVG}text"):
                assert contrast(text.get("fill"), box.get("fill")) > 4.5
    root = ElementTree.fromstring(draw_text(TestText().output()).markup)
    for part in [root, *root.iter("span")]:
        style = dict(rule.split(":", 1) for rule in part.get("style", "").split(";"))
        assert contrast(style["color"], style["background"]) > 4.5


def test_pictures_are_written_to_files(tmp_path):
    draw_tree(five_nodes()).save(tmp_path / "tree.svg")
    assert ElementTree.parse(tmp_path / "tree.svg").getroot().tag == f"{SVG}svg"
    draw_text(TestText().output()).save(tmp_path / "text.html")
    assert (tmp_path / "text.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_escape_keeps_what_can_be_written():
    kept = "a\tb\nc é 東 \U0001f600"
    assert escape(kept) == kept
    assert escape("\x7f\x85\x0b") == "\ufffd" * 3
