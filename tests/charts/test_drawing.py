"""What is drawn, read from matplotlib's own objects."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure

from marble_rl.charts.drawing import Line, Reference, curves, forest, spread
from marble_rl.charts.style import LIGHT, styled
from marble_rl.charts.svg import RULER, sheet
from marble_rl.intervals import Interval


@pytest.mark.parametrize("values", [[0.0, 0.0], [-5, -4.9], [1e-9, 2e-9], [1e9, -1e9], [0.1, 1e5], [1e-300, 0.0]])
def test_ticks_of_an_axis_differ(values: list[float]) -> None:
    with styled():
        axes = Figure().subplots()
        curves(axes, [Line("a", [0, 1], values, "r0")])
        axes.figure.draw_without_rendering()
        ticks = [label.get_text() for label in axes.get_yticklabels()]
    assert 3 <= len(ticks) == len(set(ticks))


@pytest.mark.parametrize("ends", [[1.0] * 6, [0.0] * 6, [0, 0, 0.01, 1, 1, 0.99], [0, 0.2, 0.4, 0.6, 0.8, 1]])
def test_labels_of_curves_do_not_overlap(ends: list[float]) -> None:
    with styled():
        figure = Figure(figsize=(5, 3), dpi=72)
        axes = figure.subplots()
        labels = curves(axes, [Line(f"l{i}", [0, 1], [0.5, end], f"r{i}", f"l{i}") for i, end in enumerate(ends)])
        spread(labels, axes, 14.0)
        figure.draw_without_rendering()
        boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
        plot = axes.get_window_extent()
    assert len(boxes) == 6
    assert all(above.y0 + above.y1 - below.y0 - below.y1 >= 27.9 for below, above in itertools.pairwise(boxes))
    assert plot.y0 - 8 <= boxes[0].y0
    assert boxes[-1].y1 <= plot.y1 + 8


def test_many_labels_share_the_height_of_the_axes() -> None:
    with styled():
        axes = Figure(figsize=(5, 2), dpi=72).subplots()
        labels = curves(axes, [Line(f"l{i}", [0, 1], [0.5, 0.5], "r0", f"l{i}") for i in range(40)])
        spread(labels, axes, 14.0)
        heights = sorted(label.get_window_extent().y0 for label in labels)
    assert heights[-1] - heights[0] == pytest.approx(axes.get_window_extent().height, rel=0.01)


def test_a_curve_has_its_band_its_colour_and_its_reference() -> None:
    with styled():
        axes = Figure().subplots()
        band = [(0.5, 2.0), (1.75, 2.5)]
        curves(
            axes, [Line("a", [0, 1], [1.0, 2.0], "r3", band=band)], references=[Reference(3.0, "$x$")], include=[0.0]
        )
        low, high = axes.get_ylim()
        drawn = axes.lines[0]
        (area,) = axes.collections
        legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert drawn.get_color() == LIGHT["r3"]
    assert {tuple(point) for point in np.round(area.get_paths()[0].vertices, 9)} == {
        (0, 0.5),
        (0, 2),
        (1, 1.75),
        (1, 2.5),
    }
    assert low == 0
    assert high >= 3
    assert legend == ["$x$"]


def test_what_a_reference_means_hides_no_curve_and_has_room() -> None:
    with sheet(460.0, 200.0) as page:
        page.fit(curves(page.axes, [Line("a", [0, 1], [0.0, 1.0], "r0")], references=[Reference(0.5, "a meaning")]))
        legend = page.axes.get_legend().get_window_extent(RULER)
        assert legend.y0 >= page.axes.get_window_extent().y1
        assert legend.y1 <= page.height


def test_a_row_of_intervals_stands_at_its_name() -> None:
    with styled():
        axes = Figure().subplots()
        forest(axes, [("one", Interval(0.1, 0.0, 0.2), "r0"), ("two", Interval(0.5, 0.4, 0.6), "r1")])
        names = [label.get_text() for label in axes.get_yticklabels()]
        whisker, dot = axes.lines[2:4]
    assert names == ["one", "two"]
    assert list(whisker.get_xdata()) == [0.4, 0.6]
    assert (list(dot.get_xdata()), list(dot.get_ydata())) == ([0.5], [1.0])
