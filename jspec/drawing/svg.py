"""Pictures that are markup, and what they are made of: colors, escaping, text width."""

import base64
import html
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PAPER, INK, FAINT, RULE = "#ffffff", "#1f2328", "#59636e", "#d0d7de"
"""Background, text, lesser text, lines: always set, so that a dark page does not shine through."""

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
FONT_SIZE, CHARACTER = 13, 8
"""Size of text, and the width a character is given, in pixels."""

Number = int | float

# What XML cannot hold, and controls; tabs and line feeds are text.
_UNWRITABLE = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Look:
    """Colors of a box: fill, border, text."""

    fill: str
    border: str
    text: str


LOOKS = {
    "root": Look("#f6f8fa", "#59636e", INK),
    "accepted": Look("#dafbe1", "#1a7f37", "#0a3f1a"),
    "rejected": Look("#ffffff", "#cf222e", "#82071e"),
    "bonus": Look("#ddf4ff", "#0969da", "#0a3069"),
}
"""One look for each thing a token can be, in every picture."""


@dataclass(frozen=True, repr=False)
class Svg:
    """A drawing.

    A notebook gets it as an image, which shows also where a page may not bring markup of its own:
    in a notebook that is not trusted, or on a web page that renders it.

    Attributes:
        markup: one `svg` element, with its own background.
        text: the same for terminals.
    """

    markup: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        code = base64.b64encode(self.markup.encode()).decode()
        title = self.text.splitlines()[0]
        source = f"data:image/svg+xml;base64,{code}"
        return f'<img alt="{escape(title)}" src="{source}" style="max-width:none">'

    def save(self, path: str | Path) -> None:
        """Write an `.svg` file."""
        Path(path).write_text(self.markup + "\n", encoding="utf-8")


@dataclass(frozen=True, repr=False)
class Html:
    """A piece of a page.

    Attributes:
        markup: one element, with its own background.
        text: the same for terminals.
    """

    markup: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.markup

    def save(self, path: str | Path) -> None:
        """Write an `.html` file."""
        page = f'<!doctype html><meta charset="utf-8">{self.markup}\n'
        Path(path).write_text(page, encoding="utf-8")


def escape(text: str) -> str:
    """Text for markup, attributes included; what XML cannot hold becomes U+FFFD."""
    return html.escape(_UNWRITABLE.sub("\ufffd", text), quote=True)


def width_of(text: str) -> int:
    """Pixels that a line of text takes in FONT."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return CHARACTER * (len(text) + wide)


def shorten(text: str, longest: int) -> str:
    """Text of at most `longest` characters, the end cut off."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def element(tag: str, attributes: Mapping[str, object], *inside: str) -> str:
    """An element; attribute values are escaped, what is inside is markup."""
    written = "".join(f' {name}="{escape(str(value))}"' for name, value in attributes.items())
    return f"<{tag}{written}>{''.join(inside)}</{tag}>"


def write(x: Number, y: Number, text: str, color: str = INK, **more: object) -> str:
    """One line of text, its left end at x and its middle at y."""
    place = {"x": x, "y": y, "fill": color, "dominant-baseline": "central", "xml:space": "preserve"}
    return element("text", place | more, escape(text))


def drawing(width: Number, height: Number, text: str, *inside: str) -> Svg:
    """An `svg` element on PAPER; the first line of `text` is its title."""
    size = {"width": round(width), "height": round(height)}
    attributes = {
        "xmlns": "http://www.w3.org/2000/svg",
        **size,
        "viewBox": f"0 0 {round(width)} {round(height)}",
        "role": "img",
        "font-family": FONT,
        "font-size": FONT_SIZE,
    }
    paper = element("rect", {**size, "fill": PAPER})
    title = element("title", {}, escape(text.splitlines()[0]))
    return Svg(element("svg", attributes, title, paper, *inside), text)
