"""Curves, intervals and charts of a report, and the colours they are drawn in."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from marble_rl.report.grids import STRONGEST, histogram, matrix, sample_map

import marble_rl.report
from marble_rl.intervals import Difference
from marble_rl.report.charts import LINE, Line, Reference, interval_mark, line_chart, stacked_bars
from marble_rl.report.sections import PALETTE
from marble_rl.report.speed import STAGES
from marble_rl.report.statistics import RankCorrelation, mean_interval, rank_correlation, rise, smooth, thinned
from marble_rl.report.wording import MINUS, counted, duration, listed, number

STYLE = Path(marble_rl.report.__file__).parent / "templates" / "style.css"


def test_smoothing_keeps_a_straight_line_and_calms_noise() -> None:
    steps = [0, 1, 2, 5, 9, 10, 30]
    curve, band = smooth(steps, [3 + 0.5 * x for x in steps])
    assert curve == pytest.approx([3 + 0.5 * x for x in steps])
    assert [high - low for low, high in band] == pytest.approx([0] * 7, abs=1e-6)
    noise = np.random.default_rng(0).normal(size=120)
    assert np.std(smooth(range(120), noise)[0]) < 0.35
    assert smooth([7], [1.5]) == ([1.5], [(1.5, 1.5)])


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


def test_a_band_is_drawn_around_its_curve() -> None:
    chart = line_chart("t", [Line("a", [0, 1], [1.0, 2.0], "r0", band=[(0.5, 2.0), (1.75, 2.5)])])
    (outline,) = re.findall(r'class="band r0" d="M([^"]*)z"', chart.svg)
    (path,) = re.findall(r'class="line r0" d="M([^"]*)"', chart.svg)
    first, last = (float(point.split()[1]) for point in path.split("L"))
    up, up_last, down_last, down = (float(point.split()[1]) for point in outline.split("L"))
    assert up < first < down
    assert up_last < last < down_last
    assert first - up == pytest.approx(2 * (down - first), abs=0.3)
    assert down - up == pytest.approx(2 * (down_last - up_last), abs=0.3)


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
    assert mean_interval([1.0] * 5) == Difference(1.0, 1.0, 1.0)
    assert rise([0.0] * 14) is None
    assert rise([0.0] * 15) == Difference(0.0, 0.0, 0.0)


def test_rank_correlations_count_orders() -> None:
    def found(a: list[int], b: list[int]) -> tuple[float, ...]:
        result = rank_correlation(a, b)
        assert isinstance(result, RankCorrelation)
        return result.rho, result.as_negative, result.as_positive

    assert found([1, 2, 3, 4], [9, 7, 5, 1]) == pytest.approx((-1.0, 1 / 24, 1.0))
    assert found([1, 2, 3, 4], [1, 5, 7, 9]) == pytest.approx((1.0, 1.0, 1 / 24))
    assert found([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx((0.8, 23 / 24, 4 / 24))
    assert found([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx((0.894, 1.0, 1 / 6), abs=1e-3)
    rho, share, others = found(list(range(12)), [-x for x in range(12)])
    assert rho == pytest.approx(-1)
    assert share < 0.001
    assert others == 1.0


def test_equal_values_have_no_order() -> None:
    assert rank_correlation([1, 1, 1, 1], [1, 2, 3, 4]) is None
    assert rank_correlation([1, 2, 3, 4], [0.5] * 4) is None


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
    assert all(top <= y <= bottom for y in row["y"])
    assert all(left <= x <= right for x in chart.data["at"])  # type: ignore[attr-defined]
    ticks = re.findall(r'class="tick" x="38" y="([\d.]+)"[^>]*>([^<]+)<', chart.svg)
    assert len(ticks) >= 3
    assert len({text for _, text in ticks}) == len(ticks)
    assert "nan" not in chart.svg


@pytest.mark.parametrize("ends", [[1.0] * 6, [0.0] * 6, [0, 0, 0.01, 1, 1, 0.99], [0, 0.2, 0.4, 0.6, 0.8, 1]])
def test_labels_of_curves_do_not_overlap(ends: list[float]) -> None:
    lines = [Line(f"l{i}", [0, 1], [0.5 * i / 6, end], f"r{i}", f"l{i}") for i, end in enumerate(ends)]
    chart = line_chart("t", [*lines, Line("low", [0, 1], [0, 0.5], "ink"), Line("high", [0, 1], [1, 0.5], "ink")])
    places = sorted(float(y) for y in re.findall(r'class="end r\d" x="[\d.]+" y="([\d.]+)"', chart.svg))
    assert len(places) == 6
    assert all(below - above >= LINE - 0.2 for above, below in itertools.pairwise(places))
    assert places[-1] <= 240 - 20


def test_stacked_bars_stand_on_each_other() -> None:
    chart = stacked_bars("t", [0, 1], [("a", "s0", [1.0, 2.0]), ("b", "s1", [3.0, 0.0])])
    paths = re.findall(r'class="area (s\d)" d="([^"]*)"', chart.svg)
    boxes = {name: re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", d) for name, d in paths}
    assert [len(boxes["s0"]), len(boxes["s1"])] == [2, 1]  # nothing is drawn for 0 seconds
    (_, top, _, _), (_, upper, _, height) = boxes["s0"][0], boxes["s1"][0]
    assert float(upper) + float(height) == pytest.approx(float(top), abs=0.2)
    assert float(height) == pytest.approx(3 * float(boxes["s0"][0][3]), rel=0.02)


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.3), (-0.3, -0.1), (-0.1, 0.3), (0.0, 0.0)])
def test_an_interval_is_drawn_on_its_side_of_zero(low: float, high: float) -> None:
    svg = interval_mark(Difference((low + high) / 2, low, high), "r0")
    (zero,) = re.findall(r'class="zero" d="M([\d.]+)', svg)
    ((left, right),) = re.findall(r'class="whisker" d="M([\d.]+) [\d.]+H([\d.]+)', svg)
    assert (float(left) > float(zero)) == (low > 0)
    assert (float(right) < float(zero)) == (high < 0)


def test_a_matrix_has_a_coloured_cell_for_every_number() -> None:
    chart = matrix("t", ["<a>", "b"], ["c", "d"], [[1.0, -0.5], [0.0, None]])
    cells = re.findall(r'<rect class="(\w+)"[^>]*fill-opacity="([\d.]+)"/><text[^>]*>([^<]*)<', chart.svg)
    assert cells == [
        ("pos", "0.45", "+1.00"), ("neg", "0.23", f"{MINUS}0.50"), ("pos", "0.00", "0.00"), ("none", "0.00", "?")
    ]  # fmt: skip
    assert "<a>" not in chart.svg
    assert f"b, c: {number(0)}" in chart.svg
    wide = matrix("t", ["a"], [f"c{i}" for i in range(12)], [[-0.25] * 12])
    assert wide.svg.count(f">{MINUS}.25<") == 12


def test_a_map_shows_every_sample_by_group_and_nothing_where_a_row_is_silent() -> None:
    samples = [("x", "p", [1.0, None]), ("y", "q", [-1.0, 0.5]), ("x", "r", [0.1, None])]
    chart = sample_map("t", ["a", "b"], samples)
    boxes = {
        (kind, opacity): d.count("M")
        for kind, opacity, d in re.findall(r'class="(pos|neg)" fill-opacity="([\d.]+)" d="([^"]*)"', chart.svg)
    }
    assert boxes == {("pos", "1.00"): 1, ("neg", "1.00"): 1, ("pos", "0.06"): 1, ("pos", "0.44"): 1}
    assert chart.data["x"] == ["p", "r", "q"]
    values = [row["values"] for row in chart.data["rows"]]  # type: ignore[attr-defined]
    assert values == [["+1.00", "+0.100", f"{MINUS}1.00"], [None, None, "+0.500"]]


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [0.3] * 5, [1.0, 0.5, 0.2], [1e-9, 3.0]])
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    chart = histogram("t", values, reference=Reference(0.5, "r"))
    (row,) = chart.data["rows"]  # type: ignore[misc]
    assert sum(row["values"]) == len(values)
    assert len(chart.data["at"]) == len(row["values"])  # type: ignore[arg-type]
    assert "nan" not in chart.svg


def test_names_on_the_x_axis_have_room() -> None:
    places = {0.0: "0 %", 0.5: "50 %", 0.9: "90 %", 1.0: "100 %"}
    chart = line_chart("t", [Line("a", list(places), [0, 1, 2, 3], "r0")], places=places, size=(340, 190))
    assert re.findall(r'text-anchor="middle">([^<]*)<', chart.svg) == ["100 %", "50 %", "0 %"]
    assert chart.data["x"] == list(places.values())


def test_names_are_escaped_in_charts() -> None:
    chart = line_chart("<b>", [Line("<i>", [0, 1], [0, 1], "r0", "<i>")], references=[Reference(0.5, "<u>")])
    assert not re.search(r"<[biu]>", chart.svg)


def colours() -> dict[str, tuple[str, str]]:
    """Each colour in the light and the dark theme."""
    found = re.findall(r"(--[\w-]+): light-dark\((#\w{6}), (#\w{6})\)", STYLE.read_text())
    return {name: (light, dark) for name, light, dark in found}


def contrast(a: str, b: str) -> float:
    """WCAG 2: (lighter + 0.05) / (darker + 0.05) of the relative luminances."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_text_and_rewards_can_be_read_in_both_themes() -> None:
    known = colours()
    written = ["--text", "--quiet", "--accent", "--good", "--bad", *(f"--r{i}" for i in range(PALETTE))]
    pairs = [(name, ground) for name in written for ground in ("--page", "--surface")]
    pairs += [(f"--{name}", f"--{name}-soft") for name in ("good", "bad", "mixed", "open")]
    for (name, ground), theme in itertools.product(pairs, (0, 1)):
        assert contrast(known[name][theme], known[ground][theme]) >= 4.5, (name, ground, theme)


def test_numbers_can_be_read_on_the_strongest_cells() -> None:
    known = colours()
    for name, theme in itertools.product(("--accent", "--bad"), (0, 1)):
        over, under = ([int(known[n][theme][i : i + 2], 16) for i in (1, 3, 5)] for n in (name, "--surface"))
        mixed = [round(STRONGEST * a + (1 - STRONGEST) * b) for a, b in zip(over, under, strict=True)]
        assert contrast(known["--text"][theme], "#{:02x}{:02x}{:02x}".format(*mixed)) >= 4.5


def test_every_reward_and_stage_has_a_colour_of_its_own() -> None:
    rules = STYLE.read_text()
    for theme in (0, 1):
        assert len({colours()[f"--r{i}"][theme] for i in range(PALETTE)}) == PALETTE
        assert len({colours()[f"--s{i}"][theme] for i in range(len(STAGES))}) == len(STAGES)
    for name in [*(f"r{i}" for i in range(PALETTE)), *(f"s{i}" for i in range(len(STAGES)))]:
        assert f".{name} {{ --c: var(--{name}); }}" in rules
