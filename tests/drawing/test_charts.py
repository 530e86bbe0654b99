"""Charts show the numbers they were given."""

import math
import sys

import numpy as np
import pytest

from jspec.drawing import (
    draw_accept_lengths,
    draw_acceptance,
    draw_lines,
    draw_shares,
    draw_speeds,
)

PNG = b"\x89PNG\r\n"


def test_lines():
    chart = draw_lines(
        {"$a$": ([1, 2, 8], [3.0, math.nan, 5.0]), "b": ([1, 8], [1.0, 2.0])},
        title="t",
        xlabel="nodes",
        ylabel="ms",
        log_x=True,
    )
    first, second = chart.axes.get_lines()
    np.testing.assert_array_equal(first.get_xydata(), [[1, 3], [2, math.nan], [8, 5]])
    assert second.get_label() == "b"
    assert [tick.get_text() for tick in chart.axes.get_xticklabels()] == ["1", "2", "8"]
    legend = chart.axes.get_legend()
    assert legend is not None
    assert not legend.get_texts()[0].get_parse_math()
    assert chart._repr_png_().startswith(PNG)


def test_acceptance_by_depth():
    chart = draw_acceptance({"eagle3": [0.8, 0.6, math.nan], "medusa": [0.5]})
    longest = chart.axes.get_lines()[0]
    assert list(longest.get_xdata()) == [1, 2, 3]
    assert list(chart.axes.get_xticks()) == [1, 2, 3]
    assert chart._repr_png_().startswith(PNG)


def test_accept_lengths():
    chart = draw_accept_lengths([1, 1, 2, 4], longest=6)
    bars = {round(bar.get_center()[0]): bar.get_height() for bar in chart.axes.patches}
    assert bars == {1: 2, 2: 1, 3: 0, 4: 1, 5: 0, 6: 0}
    assert chart.axes.get_lines()[0].get_label() == "τ = 2.00"
    with pytest.raises(ValueError, match="no accept lengths"):
        draw_accept_lengths([])
    with pytest.raises(ValueError, match="longest=3, but a round emitted 4"):
        draw_accept_lengths([4], longest=3)


def test_speeds():
    chart = draw_speeds({"plain": 20.0, "eagle3": 35.0})
    assert [bar.get_width() for bar in chart.axes.patches] == [20.0, 35.0]
    assert [text.get_text() for text in chart.axes.texts] == ["20.0  (1.00x)", "35.0  (1.75x)"]
    with pytest.raises(ValueError, match="expected a first above 0"):
        draw_speeds({"plain": math.nan})


def test_shares(tmp_path):
    parts = {"chain": {"draft": 1.0, "verify": 3.0}, "tree": {"draft": 2.0, "verify": 4.0}}
    chart = draw_shares(parts, title="a round", xlabel="ms")
    pieces = [(bar.get_x(), bar.get_width()) for bar in chart.axes.patches]
    assert pieces == [(0, 1), (0, 2), (1, 3), (2, 4)]
    chart.save(tmp_path / "shares.png")
    assert (tmp_path / "shares.png").read_bytes().startswith(PNG)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'jspec\[notebooks\]'"):
        draw_speeds({"plain": 1.0})


def test_a_chart_has_a_background_of_its_own():
    chart = draw_speeds({"plain": 1.0})
    assert chart.figure.get_facecolor() == chart.axes.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
