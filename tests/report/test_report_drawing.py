"""Curves, intervals and charts of a report."""

from __future__ import annotations

import re

import numpy as np
import pytest

from marble_rl.charts.drawing import Line, Reference
from marble_rl.intervals import Interval
from marble_rl.report.charts import forest, interval_mark, line_chart, matrix, stacked_bars
from marble_rl.report.statistics import mean_interval, rise, smooth, thinned
from marble_rl.report.wording import MINUS, counted, duration, listed, number


def test_smoothing_keeps_a_straight_line_and_calms_noise() -> None:
    steps = [0, 1, 2, 5, 9, 10, 30]
    curve, band = smooth(steps, [3 + 0.5 * x for x in steps])
    assert curve == pytest.approx([3 + 0.5 * x for x in steps])
    assert [high - low for low, high in band] == pytest.approx([0] * 7, abs=1e-6)
    noise = np.random.default_rng(0).normal(size=120)
    assert np.std(smooth(range(120), noise)[0]) < 0.35
    assert smooth([7], [1.5]) == ([1.5], [(1.5, 1.5)])


@pytest.mark.full
@pytest.mark.parametrize("steps", [60, 2000])
def test_the_band_of_a_curve_holds_the_truth_as_often_as_it_says(steps: int) -> None:
    """Also where the curve was averaged down first."""
    dice = np.random.default_rng(2)
    x, truth = (np.array(part) for part in thinned(range(steps), np.linspace(0, 3, steps)))
    covered = []
    for _ in range(200):
        noisy = thinned(range(steps), np.linspace(0, 3, steps) + dice.normal(size=steps))[1]
        low, high = np.array(smooth(x, noisy)[1]).T
        covered.append((low <= truth) & (truth <= high))
    assert 0.92 <= np.mean(covered) <= 0.98
    assert (np.mean(covered, axis=0) > 0.85).all(), "also at the ends"


def test_long_curves_are_averaged_down() -> None:
    x, y = thinned(range(2000), np.arange(2000.0))
    assert len(x) == 400
    assert (x[0], y[0], x[-1]) == (2.0, 2.0, 1997.0)
    assert thinned([1, 2], [5.0, 6.0]) == ([1.0, 2.0], [5.0, 6.0])


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    dice = np.random.default_rng(1)
    covered = rises = 0
    for _ in range(400):
        found = mean_interval(dice.normal(0.3, 1, size=6))
        assert found is not None
        covered += found.low <= 0.3 <= found.high
        change = rise([*dice.normal(0, 1, 5), *dice.normal(9, 9, 15), *dice.normal(0.5, 3, 10)])
        assert change is not None
        rises += change.low <= 0.5 <= change.high
    assert 0.92 <= covered / 400 <= 0.98
    assert 0.92 <= rises / 400 <= 0.98


def test_too_few_values_have_no_interval() -> None:
    assert mean_interval([1.0] * 4) is None
    assert mean_interval([1.0] * 5) == Interval(1.0, 1.0, 1.0)
    assert rise([0.0] * 14) is None
    assert rise([0.0] * 15) == Interval(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.07381, "0.074"),
        (0.00038, "0.00038"),
        (6.7401, "6.74"),
        (-18.219, f"{MINUS}18.2"),
        (1234.5, "1234"),
        (2e-7, "2.0e-07"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text
    assert number(abs(value), signed=True) == ("0" if value == 0 else "+" + text.lstrip(MINUS))


def test_words() -> None:
    assert [counted(n, "step") for n in (0, 1, 3, 12)] == ["no steps", "one step", "three steps", "12 steps"]
    assert [counted(n, "refresh", "refreshes") for n in (0, 1, 2)] == ["no refreshes", "one refresh", "two refreshes"]
    assert [listed(w) for w in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert [duration(s) for s in (0.1, 5, 119, 7500)] == ["100 ms", "5.0 s", "2 min", "2 h 5 min"]


@pytest.mark.parametrize(
    "values",
    [[1.0], [2.0, 2.0, 2.0], [0.0, 0.0], [-5, -4.9], [1e-9, 2e-9], [1e9, -1e9], [0.1, 0.2, 1e5], [1e-300, 0.0]],
)
def test_every_value_lies_inside_its_chart(values: list[float]) -> None:
    chart = line_chart("t", [Line("a", range(len(values)), values, "r0", "a")], references=[Reference(values[0], "r")])
    left, top, right, bottom = chart.data["plot"]  # type: ignore[misc]
    (row,) = chart.data["rows"]  # type: ignore[misc]
    assert all(top - 0.2 <= y <= bottom + 0.2 for y in row["y"])
    assert all(left - 0.2 <= x <= right + 0.2 for x in chart.data["at"])  # type: ignore[attr-defined]
    assert "nan" not in chart.svg


def test_the_pointer_shows_what_each_curve_has_at_a_step() -> None:
    chart = line_chart("t", [Line("a", [0, 2], [1.0, 2.5], "r0"), Line("b", [1, 2], [3.0, 4.0], "r1", style="dots")])
    assert chart.data["x"] == ["step 0", "step 1", "step 2"]
    rows = {row["name"]: row["values"] for row in chart.data["rows"]}  # type: ignore[attr-defined]
    assert rows == {"a": ["1.00", None, "2.50"], "b": [None, "3.00", "4.00"]}
    assert 'aria-label="t. Last values: a 2.50, b 4.00"' in chart.svg


def test_a_long_chart_is_not_larger_than_it_needs_to_be() -> None:
    x, y = list(range(400)), np.random.default_rng(0).normal(size=400).tolist()
    dots = line_chart("t", [Line("a", x, y, "r0", style="dots"), Line("b", x, y, "r0")])
    assert len(dots.svg) < 25_000


@pytest.mark.parametrize("steps", [1, 12])
def test_stacked_bars_have_a_colour_and_a_value_for_every_stage(steps: int) -> None:
    chart = stacked_bars("t", range(steps), [("a", "s0", [1.0] * steps), ("b", "s1", [0.0] * steps)])
    assert {"var(--s0)", "var(--s1)"} <= set(re.findall(r"fill:(var\(--s\d\))", chart.svg))
    values = [row["values"] for row in chart.data["rows"]]  # type: ignore[attr-defined]
    assert values == [["1.00 s"] * steps, ["0.00 s"] * steps]


def test_rows_of_intervals_are_described_and_walked_from_top_to_bottom() -> None:
    chart = forest("t", [("one", Interval(0.5, 0.4, 0.6), "r0"), ("two", Interval(0.1, 0.0, 0.2), "r1")])
    assert "one 0.500 (0.400 to 0.600); two 0.100 (0 to 0.200)" in chart.svg
    first, second = chart.data["at"]  # type: ignore[misc]
    assert (chart.data["along"], chart.data["x"]) == ("y", ["one", "two"])
    assert first < second


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.3), (-0.3, -0.1), (-0.1, 0.3), (0.0, 0.0)])
def test_an_interval_is_drawn_on_its_side_of_zero(low: float, high: float) -> None:
    svg = interval_mark(Interval((low + high) / 2, low, high), "r0")
    (zero,) = re.findall(r'stroke:var\(--quiet\)[^>]*d="M([\d.]+)', svg)
    ((left, right),) = re.findall(r'stroke:var\(--r0\)[^>]*d="M([\d.]+) [\d.]+L([\d.]+)', svg)
    assert (float(left) > float(zero)) == (low > 0)
    assert (float(right) < float(zero)) == (high < 0)


def test_a_matrix_has_a_coloured_cell_for_every_number() -> None:
    chart = matrix("t", ["<a>", "b"], ["c", "d"], [[1.0, -0.5], [0.0, None]])
    texts = re.findall(r">([^<>]+)</text>", chart.svg)
    assert set(texts) == {"+1.00", f"{MINUS}0.50", "0.00", "?", "&lt;a&gt;", "b", "c", "d"}
    assert {"var(--accent)", "var(--bad)", "var(--grid)"} <= set(re.findall(r"fill:(var\(--\w+\))", chart.svg))
    values = [row["values"] for row in chart.data["rows"]]  # type: ignore[attr-defined]
    assert (chart.data["x"], values) == (["c", "d"], [["+1.00", f"{MINUS}0.500"], ["0", None]])
    wide = matrix("t", ["a"], [f"c{i}" for i in range(9)], [[-0.25] * 9])
    assert wide.svg.count(f">{MINUS}.25<") == 9


def test_names_on_the_x_axis_have_room() -> None:
    names = {0.0: "0 %", 0.5: "50 %", 0.9: "90 %", 1.0: "100 %"}
    chart = line_chart("t", [Line("a", list(names), [0, 1, 2, 3], "r0")], x_label="turned", x_names=names)
    assert re.findall(r">(\d+ %)<", chart.svg) == ["100 %", "50 %", "0 %"]
    assert chart.data["x"] == [f"turned {name}" for name in names.values()]


def test_a_chart_that_was_drawn_is_not_drawn_again() -> None:
    """And one that differs in the last digit of one value is another one."""
    first, again, other = (line_chart("t", [Line("a", [0, 1], [0.5, y], "r0")]) for y in (1.0, 1.0, 1.0 + 1e-15))
    assert first is again
    assert first is not other
