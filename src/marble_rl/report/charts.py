"""Charts as SVG that a browser scales, prints and recolours: lines, stacked bars, intervals.

Colours are classes (`r0`, `r1`, ... one for each reward; `s0`, ... for stages) that the style sheet gives a value for
either theme. What a chart shows under the pointer stands beside it as JSON, read by script.js.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from marble_rl.intervals import Interval
from marble_rl.report.axes import BOTTOM, LEFT, TOP, Frame, Mark, axes, drawing, scale, step_marks, tick_text
from marble_rl.report.wording import number, shortened

CHARACTER = 8.6
"""Width of one in the labels at the ends of curves; they are larger on a phone, where the chart is scaled down."""
MOST_NAME = 22
"""Characters of a name beside its row."""
LINE = 14
"""Least distance of two labels."""


@dataclass(frozen=True)
class Line:
    """A curve, or single marks."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    label: str = ""
    """At its right end"""
    style: str = "line"
    """`line`, `dashed`, `dots` (faint, behind the lines) or `marks` (rings)"""
    band: Sequence[tuple[float, float]] | None = None
    """(lowest, highest) of its 95 % interval at each x"""


@dataclass(frozen=True)
class Reference:
    """A horizontal line with a meaning."""

    y: float
    label: str


@dataclass(frozen=True)
class Chart:
    """A drawing, and what to show under the pointer."""

    title: str
    svg: Markup
    data: dict[str, object]
    note: str = ""
    colour: str = ""
    """Of the title, where the chart is about one reward"""
    summary: str = ""
    """Beside the title"""


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    references: Sequence[Reference] = (),
    include: Sequence[float] = (),
    steps: tuple[float, float] | None = None,
    places: dict[float, str] | None = None,
    unit: str = "step",
    size: tuple[int, int] = (460, 240),
    note: str = "",
    colour: str = "",
    summary: str = "",
) -> Chart:
    """Curves over steps. ``include`` are values that the y axis must reach, ``steps`` the ends of the x axis.

    ``places`` names every x, where it is another thing than steps; its ``unit`` stands before the name.
    """
    xs = sorted({float(v) for line in lines for v in line.x})
    ends = [end for line in lines for interval in line.band or () for end in interval]
    everything = [*(v for line in lines for v in line.y), *ends, *(r.y for r in references), *include]
    low, high, ticks = scale(min(everything), max(everything))
    labels = [line.label for line in lines if line.label] + [""]
    right = max(10.0, 12 + CHARACTER * max(len(label) for label in labels))
    frame = Frame(*size, right, steps or (xs[0], xs[-1]), (low, high))
    marks = step_marks(*frame.x) if places is None else _named_marks(frame, places)
    parts = [axes(frame, ticks, marks), *(_reference(frame, reference, lines) for reference in references)]
    order = {"dots": 0, "marks": 2}
    parts += [_draw(frame, line) for line in sorted(lines, key=lambda line: order.get(line.style, 1))]
    parts += _end_labels(frame, [line for line in lines if line.label])
    rows: list[dict[str, object]] = []
    for line in lines:
        known = {float(x): y for x, y in zip(line.x, line.y, strict=True)}
        values = [None if x not in known else number(known[x]) for x in xs]
        heights = [None if x not in known else frame.down(known[x]) for x in xs]
        rows.append({"name": line.name, "colour": line.colour, "values": values, "y": heights})
    names = None if places is None else [places[x] for x in xs]
    return Chart(title, drawing(frame, title, parts), frame.hover(unit, xs, rows, names), note, colour, summary)


def _named_marks(frame: Frame, places: dict[float, str]) -> list[Mark]:
    """From the right, those that have room beside the one before."""
    kept: list[Mark] = []
    for x, name in sorted(places.items(), reverse=True):
        if not kept or frame.across(kept[-1][0]) - frame.across(x) >= CHARACTER * (len(name) + 1):
            kept.append((x, name, "middle"))
    return kept


def stacked_bars(
    title: str, steps: Sequence[float], stages: Sequence[tuple[str, str, Sequence[float]]], *, note: str = ""
) -> Chart:
    """Seconds of each stage (name, colour, seconds a step), one bar a step."""
    totals = [math.fsum(values[i] for _, _, values in stages) for i in range(len(steps))]
    _, high, ticks = scale(0.0, max(totals))
    frame = Frame(460, 240, 10.0, (min(steps) - 0.5, max(steps) + 0.5), (0.0, high))
    room = (frame.width - LEFT - frame.right) / len(steps)
    bar = max(0.8, room * 0.8)
    # One path for each stage: a tenth of the size of as many rectangles.
    floor = [0.0] * len(steps)
    parts = [axes(frame, ticks, step_marks(min(steps), max(steps)))]
    rows: list[dict[str, object]] = []
    for name, colour, values in stages:
        pieces = []
        for i, value in enumerate(values):
            top, height = frame.down(floor[i] + value), frame.down(floor[i]) - frame.down(floor[i] + value)
            if height > 0:
                left = LEFT + room * (i if len(steps) > 1 else 0) + (room - bar) / 2
                pieces.append(f"M{left:.1f} {top:.1f}h{bar:.1f}v{height:.1f}h-{bar:.1f}z")
            floor[i] += value
        parts.append(Markup('<path class="area {}" d="{}"/>').format(colour, "".join(pieces)))
        rows.append({"name": name, "colour": colour, "values": [f"{v:.2f} s" for v in values], "y": []})
    data = frame.hover("step", steps, rows)
    data["at"] = [round(LEFT + room * (i + 0.5), 1) for i in range(len(steps))]
    return Chart(title, drawing(frame, title, parts), data, note)


def forest(title: str, rows: Sequence[tuple[str, Interval, str]], *, width: float = 340.0, note: str = "") -> Chart:
    """Means with their intervals, one row for each (name, mean and interval, colour), on one scale."""
    low, high, ticks = scale(min(d.low for _, d, _ in rows), max(d.high for _, d, _ in rows))
    names = [shortened(name, MOST_NAME) for name, _, _ in rows]
    small = width < 400
    left, row = 14 + (6.6 if small else CHARACTER) * max(map(len, names)), 24.0
    height = TOP + row * len(rows) + BOTTOM

    def across(value: float) -> float:
        return round(left + (width - left - 14) * (value - low) / (high - low), 1)

    text = tick_text(ticks)
    shown = [tick for tick in ticks if low <= tick <= high][:: 2 if len(ticks) > 3 and small else 1]
    parts = []
    for tick in shown:
        x, kind = across(tick), "grid zero" if abs(tick) < 1e-12 else "grid"
        parts.append(Markup('<path class="{}" d="M{} {}V{}"/>').format(kind, x, TOP - 4, height - BOTTOM))
        label = Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>')
        parts.append(label.format(x, height - 8, text(tick)))
    for i, (name, (_, found, colour)) in enumerate(zip(names, rows, strict=True)):
        y = TOP + row * (i + 0.5)
        values = f"{number(found.mean)} ({number(found.low)} to {number(found.high)})"
        label = Markup('<title>{}</title><text x="0" y="{}">{}</text>').format(values, y + 4, name)
        whisker = Markup('<path class="whisker" d="M{} {}H{}"/>').format(across(found.low), y, across(found.high))
        dot = Markup('<circle class="dot" cx="{}" cy="{}" r="4.5"/>').format(across(found.mean), y)
        parts.append(Markup('<g class="interval {}">{}{}{}</g>').format(colour, label, whisker, dot))
    svg = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">{}</svg>')
    return Chart(title, svg.format(width, height, title, Markup("").join(parts)), {}, note)


def interval_mark(found: Interval, colour: str) -> Markup:
    """A difference and its interval beside zero, on a scale of its own."""
    width, height, edge = 170.0, 22.0, 8.0
    low, high = min(0.0, found.low), max(0.0, found.high)
    reach = (high - low) or 1.0

    def across(value: float) -> float:
        return round(edge + (width - 2 * edge) * (value - low) / reach, 1)

    middle = height / 2
    return Markup(
        '<svg class="interval {}" viewBox="0 0 {:.0f} {:.0f}" aria-hidden="true"><path class="zero" d="M{} 2V{}"/>'
        '<path class="whisker" d="M{} {}H{}"/><circle class="dot" cx="{}" cy="{}" r="4.5"/></svg>'
    ).format(
        colour, width, height, across(0), height - 2, across(found.low), middle, across(found.high),
        across(found.mean), middle,
    )  # fmt: skip


def _reference(frame: Frame, reference: Reference, lines: Sequence[Line]) -> Markup:
    """With its label at that end, and on that side, where the curves keep farthest away."""
    y, end = frame.down(reference.y), frame.width - frame.right
    reach = CHARACTER * len(reference.label)
    points = [(frame.across(x), frame.down(v)) for line in lines for x, v in zip(line.x, line.y, strict=True)]
    places = [(x, y + dy, anchor) for dy in (-5, 13) for x, anchor in ((end - 2, "end"), (LEFT + 2, "start"))]

    def clearance(place: tuple[float, float, str]) -> float:
        x, base, anchor = place
        low, high = (x - reach, x) if anchor == "end" else (x, x + reach)
        return min((abs(py - base + 4) for px, py in points if low - 8 <= px <= high + 8), default=99.0)

    x, base, anchor = max(places, key=clearance)
    return Markup(
        '<path class="reference" d="M{} {}H{}"/><text class="reference" x="{}" y="{}" text-anchor="{}">{}</text>'
    ).format(LEFT, y, end, x, base, anchor, reference.label)


def _draw(frame: Frame, line: Line) -> Markup:
    places = [(frame.across(x), frame.down(y)) for x, y in zip(line.x, line.y, strict=True)]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in places)
    if line.style in ("line", "dashed") and len(places) > 1:
        band = _band(frame, line) if line.band is not None else Markup("")
        return band + Markup('<path class="{} {}" d="{}"/>').format(line.style, line.colour, path)
    radius = 2 if line.style == "dots" else 4
    dots = [Markup('<circle cx="{}" cy="{}" r="{}"/>').format(x, y, radius) for x, y in places]
    between = [Markup('<path d="{}"/>').format(path)] if line.style == "marks" else []
    return Markup('<g class="{} {}">{}</g>').format(line.style, line.colour, Markup("").join(between + dots))


def _band(frame: Frame, line: Line) -> Markup:
    """Forth along its upper edge and back along the lower one."""
    intervals = zip(line.x, line.band or (), strict=True)
    edges = [(frame.across(x), frame.down(high), frame.down(low)) for x, (low, high) in intervals]
    outline = [f"{x:g} {up:g}" for x, up, _ in edges] + [f"{x:g} {down:g}" for x, _, down in reversed(edges)]
    return Markup('<path class="band {}" d="M{}z"/>').format(line.colour, "L".join(outline))


def _end_labels(frame: Frame, lines: Sequence[Line]) -> list[Markup]:
    """Names at the right ends of curves, moved apart where they would overlap."""
    wanted = sorted(((frame.down(line.y[-1]), line) for line in lines), key=lambda pair: pair[0])
    places: list[float] = []
    for place, _ in wanted:
        places.append(max(place, places[-1] + LINE) if places else place)
    overflow = max(0.0, places[-1] - (frame.height - BOTTOM)) if places else 0.0
    for i in reversed(range(len(places))):  # back up from the bottom edge
        places[i] = places[i] - overflow if i == len(places) - 1 else min(places[i], places[i + 1] - LINE)
    x = frame.width - frame.right + 8
    return [
        Markup('<text class="end {}" x="{}" y="{:.1f}">{}</text>').format(line.colour, x, place + 4, line.label)
        for (_, line), place in zip(wanted, places, strict=True)
    ]
