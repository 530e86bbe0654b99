"""Charts of what was measured, through matplotlib."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jspec.drawing.svg import FAINT, INK, LOOKS, PAPER, RULE, Number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart also by people who do not see all colors, and in gray.
COLORS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#59636e", "#bf3989", "#9a6700", "#1f2328")
MARKERS = "os^Dv<>p"


@dataclass(frozen=True)
class Chart:
    """A chart with its own background.

    Attributes:
        figure: of matplotlib, to be changed or reused.
    """

    figure: "Figure"

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=90)
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Write a picture in the format of the file's ending."""
        self.figure.savefig(path, dpi=90)

    @property
    def axes(self) -> "Axes":
        """Where the data is drawn."""
        return self.figure.axes[0]


def draw_lines(
    series: Mapping[str, tuple[Sequence[Number], Sequence[Number]]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
) -> Chart:
    """A line for each name, through its points (x, y); NaN leaves a gap.

    Args:
        series: x and y by name.
        title: above.
        xlabel, ylabel: of the axes, with units.
        log_x: a logarithmic x axis, with plain numbers at the points.
    """
    chart = _chart(title, xlabel, ylabel)
    for index, (name, (x, y)) in enumerate(series.items()):
        chart.axes.plot(
            x,
            y,
            color=COLORS[index % len(COLORS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            label=name,
        )
    if log_x:
        ticks = sorted({float(value) for x, _ in series.values() for value in x})
        chart.axes.set_xscale("log", base=2)
        chart.axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        chart.axes.minorticks_off()
    _legend(chart, len(series))
    return chart


def draw_acceptance(series: Mapping[str, Sequence[Number]]) -> Chart:
    """Acceptance β_i at each depth i, a line for each name.

    Args:
        series: β_1, β_2, … by name, such as `Stats.acceptance_by_depth`; NaN where no round came
            so deep.
    """
    lines = {name: (list(range(1, len(y) + 1)), list(y)) for name, y in series.items()}
    chart = draw_lines(
        lines, title="acceptance by depth", xlabel="depth", ylabel="share accepted, if reached"
    )
    deepest = max((len(y) for y in series.values()), default=1)
    chart.axes.set_xticks(range(1, deepest + 1))
    chart.axes.set_ylim(0, 1.02)
    return chart


def draw_accept_lengths(accept_lengths: Sequence[int], longest: int | None = None) -> Chart:
    """How many rounds emitted 1, 2, … tokens, bonus included; the line is their mean, τ.

    Args:
        accept_lengths: of `Stats.accept_lengths`, of one text or of many joined.
        longest: last bar; default the longest there was.

    Raises:
        ValueError: no round, or one beyond `longest`.
    """
    if not len(accept_lengths):
        raise ValueError("no accept lengths to draw; expected those of at least one round.")
    top = max(accept_lengths)
    if longest is not None and longest < top:
        raise ValueError(f"longest={longest}, but a round emitted {top} tokens; raise it.")
    counts = np.bincount(np.asarray(accept_lengths), minlength=(longest or top) + 1)
    mean = float(np.mean(accept_lengths))
    chart = _chart("tokens a round", "tokens emitted, bonus included", "rounds")
    first = 0 if counts[0] else 1
    bars = range(first, len(counts))
    look = LOOKS["accepted"]
    chart.axes.bar(bars, counts[first:], color=look.fill, edgecolor=look.border, label="rounds")
    chart.axes.axvline(mean, color=LOOKS["bonus"].border, linewidth=2, label=f"τ = {mean:.2f}")
    chart.axes.set_xticks(bars)
    _legend(chart, 2)
    return chart


def draw_speeds(tokens_per_second: Mapping[str, Number]) -> Chart:
    """A bar for each way of decoding; the ratios are over the first one.

    Args:
        tokens_per_second: by name, the baseline first.

    Raises:
        ValueError: nothing to draw, or a baseline that is not above 0.
    """
    names, speeds = list(tokens_per_second), list(tokens_per_second.values())
    if not speeds or not speeds[0] > 0:
        raise ValueError(f"tokens_per_second={dict(tokens_per_second)}; expected a first above 0.")
    chart = _chart("decoding speed", "tokens per second", "", height=0.9 + 0.45 * len(names))
    bars = chart.axes.barh(names, speeds, color=COLORS[0], height=0.6)
    bars[0].set_color(COLORS[4])
    chart.axes.bar_label(
        bars, [f"{s:.1f}  ({s / speeds[0]:.2f}x)" for s in speeds], padding=4, color=INK
    )
    chart.axes.invert_yaxis()
    chart.axes.set_xlim(0, 1.3 * max(speeds))
    _literal(chart.axes.get_yticklabels())
    return chart


def draw_shares(parts: Mapping[str, Mapping[str, Number]], *, title: str, xlabel: str) -> Chart:
    """A bar for each row, in pieces that add up.

    Args:
        parts: the size of each piece by row and piece; all rows have the same pieces.
        title: above.
        xlabel: of the sizes, with units.
    """
    rows = list(parts)
    chart = _chart(title, xlabel, "", height=1.4 + 0.45 * len(rows))
    left = np.zeros(len(rows))
    for index, piece in enumerate(parts[rows[0]]):
        sizes = np.asarray([parts[row][piece] for row in rows])
        chart.axes.barh(
            rows, sizes, left=left, label=piece, color=COLORS[index % len(COLORS)], height=0.6
        )
        left = left + sizes
    chart.axes.invert_yaxis()
    _literal(chart.axes.get_yticklabels())
    _legend(chart, 2, outside=True)
    return chart


def _chart(title: str, xlabel: str, ylabel: str, height: Number = 3.4) -> Chart:
    """Empty axes. The figure belongs to nobody else: it is not shown twice, and not kept.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "charts need matplotlib, which is not installed: pip install 'jspec[notebooks]'"
        ) from error
    figure = Figure(figsize=(6.4, height), facecolor=PAPER, layout="constrained")
    axes: Any = figure.add_subplot(facecolor=PAPER)
    axes.set_title(title, color=INK, fontsize=11, loc="left")
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.tick_params(colors=INK)
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    return Chart(figure)


def _legend(chart: Chart, entries: int, *, outside: bool = False) -> None:
    """Names of the lines, where there is more than one."""
    if entries < 2:
        return
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if outside else {}
    legend = chart.axes.legend(labelcolor=INK, facecolor=PAPER, edgecolor=RULE, fontsize=9, **place)
    _literal(legend.get_texts())


def _literal(texts: Sequence[Any]) -> None:
    """Names are shown as they are: matplotlib would set what stands between dollar signs."""
    for text in texts:
        text.set_parse_math(False)
