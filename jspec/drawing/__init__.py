"""Pictures for notebooks and reports.

Trees, masks and texts are SVG and HTML, made here, and need nothing else. Charts need matplotlib
(`pip install 'jspec[notebooks]'`), which is imported when the first one is drawn. Every picture
shows itself at the end of a notebook cell and is written to a file by `save`.
"""

from jspec.drawing.charts import (
    Chart,
    draw_accept_lengths,
    draw_acceptance,
    draw_lines,
    draw_shares,
    draw_speeds,
)
from jspec.drawing.mask import draw_mask
from jspec.drawing.svg import Html, Svg
from jspec.drawing.text import draw_text
from jspec.drawing.tree import draw_tree

__all__ = [
    "Chart",
    "Html",
    "Svg",
    "draw_accept_lengths",
    "draw_acceptance",
    "draw_lines",
    "draw_mask",
    "draw_shares",
    "draw_speeds",
    "draw_text",
    "draw_tree",
]
