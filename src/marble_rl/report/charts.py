"""Charts in a page: drawn by marble_rl.charts, with what to show under the pointer as JSON that script.js reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from marble_rl.charts import drawing
from marble_rl.charts.drawing import Line, Reference
from marble_rl.charts.style import LIGHT
from marble_rl.charts.svg import Sheet, sheet
from marble_rl.intervals import Interval
from marble_rl.report.wording import MINUS, number, shortened

WIDTH, HEIGHT = 460.0, 200.0
"""Pixels of a chart: the whole width, and the height of its plot."""
SMALL_WIDTH, SMALL_HEIGHT = 340.0, 150.0
MOST_NAME, MOST_LABEL = 22, 14
"""Characters of a name beside a row of intervals, and beside a row of cells."""
LABEL_GAP = 14.0
"""Least distance of labels at the ends of curves."""
MOST_REMEMBERED = 100
"""Charts of each kind."""
P = ParamSpec("P")
T = TypeVar("T")
Row = dict[str, Any]
"""A line under the pointer: its `name` and `colour`, and at each place one of its `values` and the height `y` of a dot.
A value is None where there is nothing to show; a chart without dots has no heights."""


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


def drawn_once(draw: Callable[P, T]) -> Callable[P, T]:
    """Remember what was drawn: a page that is built again, as under --watch, has mostly the same charts.

    Charts are the same where the repr of all arguments is: give lists and tuples, not arrays, which abbreviate theirs.
    """
    known: dict[str, T] = {}

    @wraps(draw)
    def draw_or_recall(*args: P.args, **kwargs: P.kwargs) -> T:
        key = hashlib.sha256(repr((args, kwargs)).encode(errors="surrogatepass")).hexdigest()
        if key not in known:
            while len(known) >= MOST_REMEMBERED:
                del known[next(iter(known))]
            known[key] = draw(*args, **kwargs)
        return known[key]

    return draw_or_recall


def _svg(page: Sheet, description: str) -> Markup:
    """With a description for those who cannot see it; the arrow keys walk through its values."""
    return page.svg(Markup('role="img" aria-label="{}" tabindex="0"').format(description))


def _hover(page: Sheet, headings: Sequence[str], at: Sequence[float], rows: Sequence[Row], along: str = "x") -> Row:
    """For script.js: what to show at each of the places ``at``, pixels from the left (``along`` x) or the top (y)."""
    return {"plot": page.plot, "x": headings, "at": at, "rows": rows, "along": along}


@drawn_once
def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    references: Sequence[Reference] = (),
    include: Sequence[float] = (),
    x_ends: tuple[float, float] | None = None,
    x_label: str = "step",
    x_names: Mapping[float, str] | None = None,
    small: bool = False,
    **texts: str,
) -> Chart:
    """Curves, as of `drawing.curves`. ``texts`` here and below: `note`, `colour` and `summary` of the chart."""
    with sheet(*(SMALL_WIDTH, SMALL_HEIGHT) if small else (WIDTH, HEIGHT)) as page:
        labels = drawing.curves(
            page.axes, lines, x_label=x_label, x_names=x_names, x_ends=x_ends, references=references, include=include
        )
        page.fit(labels)
        drawing.spread(labels, page.axes, LABEL_GAP)
        every = sorted({float(x) for line in lines for x in line.x})
        rows = []
        for line in lines:
            heights = dict(zip(map(float, line.x), page.places(line.x, line.y)[1], strict=True))
            values = {float(x): number(y) for x, y in zip(line.x, line.y, strict=True)}
            shown = {"values": list(map(values.get, every)), "y": list(map(heights.get, every))}
            rows.append({"name": line.name, "colour": line.colour, **shown})
        at, _ = page.places(every, [lines[0].y[0]] * len(every))
        headings = [f"{x_label} {f'{x:.9g}' if x_names is None else x_names[x]}" for x in every]
        data = _hover(page, headings, at, rows)
        last = ", ".join(f"{line.name} {number(line.y[-1])}" for line in lines)
        return Chart(title, _svg(page, f"{title}. Last values: {last}"), data, **texts)


@drawn_once
def stacked_bars(
    title: str, steps: Sequence[float], stages: Sequence[tuple[str, str, Sequence[float]]], **texts: str
) -> Chart:
    """Seconds of each stage (name, colour, seconds a step), one bar a step."""
    with sheet(WIDTH, HEIGHT) as page:
        half = (steps[-1] - steps[0]) / (len(steps) - 1) / 2 if len(steps) > 1 else 0.5
        edges = [*(step - half for step in steps), steps[-1] + half]
        heights = [[*seconds, seconds[-1]] for _, _, seconds in stages]
        page.axes.stackplot(edges, heights, colors=[LIGHT[c] for _, c, _ in stages], step="post", linewidth=0)
        page.axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        page.axes.set(xlim=(edges[0], edges[-1]), xlabel="step")
        page.fit()
        rows = [
            {"name": name, "colour": colour, "values": [f"{value:.2f} s" for value in seconds], "y": []}
            for name, colour, seconds in stages
        ]
        at, _ = page.places(steps, [0.0] * len(steps))
        return Chart(title, _svg(page, title), _hover(page, [f"step {x:.9g}" for x in steps], at, rows), **texts)


@drawn_once
def forest(title: str, rows: Sequence[tuple[str, Interval, str]], *, small: bool = True, **texts: str) -> Chart:
    """Means with their intervals, one row for each (name, mean and interval, colour), on one scale."""
    with sheet(SMALL_WIDTH if small else WIDTH, 24.0 * len(rows)) as page:
        drawing.forest(page.axes, [(shortened(name, MOST_NAME), interval, colour) for name, interval, colour in rows])
        page.fit()
        values = [f"{number(i.mean)} ({number(i.low)} to {number(i.high)})" for _, i, _ in rows]
        _, at = page.places([rows[0][1].mean] * len(rows), range(len(rows)))
        shown = {"name": "mean", "colour": "ink", "values": values, "y": []}
        data = _hover(page, [name for name, _, _ in rows], at, [shown], along="y")
        described = "; ".join(f"{name} {text}" for (name, _, _), text in zip(rows, values, strict=True))
        return Chart(title, _svg(page, f"{title}. {described}"), data, **texts)


@drawn_once
def interval_mark(interval: Interval, colour: str) -> Markup:
    """A difference and its interval beside zero, each on its own scale. The figures stand beside it in the table."""
    with sheet(170.0, 22.0) as page:
        drawing.whisker(page.axes, interval, LIGHT[colour], 0.0)
        page.axes.axvline(0.0, color=LIGHT["quiet"], linewidth=1.0, zorder=0)
        low, high = min(0.0, interval.low), max(0.0, interval.high)
        edge = 0.05 * ((high - low) or 1.0)
        page.axes.set(xlim=(low - edge, high + edge), ylim=(-1.0, 1.0))
        page.axes.set_axis_off()
        return page.svg(Markup('class="interval {}" aria-hidden="true"').format(colour))


@drawn_once
def matrix(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[float | None]],
    *,
    signed: bool = True,
    unknown: str = "?",
    **texts: str,
) -> Chart:
    """Numbers in coloured cells. ``unknown`` stands where there is none."""
    written = [[unknown if v is None else _digits(v, signed, len(columns)) for v in row] for row in cells]
    with sheet(WIDTH, 34.0 * len(rows)) as page:
        beside, below = ([shortened(name, MOST_LABEL) for name in names] for names in (rows, columns))
        drawing.matrix(page.axes, beside, below, cells, written)
        page.fit()
        at, _ = page.places(range(len(columns)), [0.0] * len(columns))
        shown = _cell_rows(rows, cells, signed)
        named = [
            (f"{row['name']}, {column}", v) for row in shown for column, v in zip(columns, row["values"], strict=True)
        ]
        described = "; ".join(f"{place}: {value}" for place, value in named if value is not None)
        return Chart(title, _svg(page, f"{title}. {described}"), _hover(page, columns, at, shown), **texts)


def _cell_rows(names: Sequence[str], cells: Sequence[Sequence[float | None]], signed: bool) -> list[Row]:
    texts = [[None if v is None else number(v, signed=signed) for v in row] for row in cells]
    return [{"name": name, "colour": "ink", "values": row, "y": []} for name, row in zip(names, texts, strict=True)]


def _digits(value: float, signed: bool, columns: int) -> str:
    """As many as fit into a cell beside so many others."""
    narrow = columns > 5
    text = f"{abs(value):.{2 if columns < 10 else 1}f}" if abs(value) < 10 else f"{abs(value):.0f}"
    sign = MINUS if value < 0 and float(text) else "+" if signed and not narrow and float(text) else ""
    return sign + (text.removeprefix("0") if narrow and abs(value) < 1 else text)
