"""Kinds of charts, each drawn on axes: curves, intervals, a matrix, a histogram.

Colours are names of `style.LIGHT`. In a matrix blue is above zero and red below; how strong says how far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from marble_rl.charts.style import LIGHT, plain
from marble_rl.intervals import Interval

STRONGEST = 0.45
"""Opacity of a cell's colour, so that its number stays readable."""
ROUND = (1, 2, 2.5, 5, 10)
"""First digits of ticks."""
LOOKS: dict[str, dict[str, Any]] = {
    "line": {},
    "dashed": {"linestyle": (0, (2.5, 2.5)), "linewidth": 1.8},
    "dots": {"linewidth": 4.0, "alpha": 0.38, "zorder": 1.9},
    "rings": {"linestyle": "", "marker": "o", "markersize": 7, "markerfacecolor": LIGHT["surface"], "mew": 2.2},
    "reference": {"linestyle": (0, (2, 4)), "linewidth": 1.0, "color": LIGHT["quiet"], "zorder": 4.0},
    "zero": {"linewidth": 1.0, "color": LIGHT["quiet"], "alpha": 0.55, "zorder": 0.9},
}


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
    """`line`, `dashed`, `dots` (faint, behind the lines) or `rings`"""
    band: Sequence[tuple[float, float]] | None = None
    """(lowest, highest) of its 95 % interval at each x"""


@dataclass(frozen=True)
class Reference:
    """A value with a meaning, drawn as a dotted line."""

    value: float
    label: str


def curves(
    axes: Axes,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    x_names: Mapping[float, str] | None = None,
    x_ends: tuple[float, float] | None = None,
    references: Sequence[Reference] = (),
    include: Sequence[float] = (),
) -> list[Any]:
    """Curves with their names at their right ends; returns these labels, for `spread`.

    ``x_names`` are for values of x that are not steps, ``x_ends`` those of the x axis. The y axis reaches ``include``.
    """
    for line in lines:
        x, y, colour = np.asarray(line.x, float), np.asarray(line.y, float), LIGHT[line.colour]
        if line.band is not None:
            axes.fill_between(x, *np.transpose(line.band), color=colour, alpha=0.16, linewidth=0)
        if line.style == "dots":  # lines of no length with round ends: much smaller in a page than as many markers
            x, y = np.repeat(x, 3), np.repeat(y, 3)
            y[2::3] = np.nan
        axes.plot(x, y, **{"color": colour, "marker": "o" if len(x) == 1 else "", **LOOKS[line.style]})
    for reference in references:
        axes.axhline(reference.value, label=plain(reference.label), **LOOKS["reference"])
    axes.update_datalim([(lines[0].x[0], value) for value in include], updatex=False)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    if x_names is not None:
        shown = _with_room(x_names)
        axes.set_xticks(shown, [x_names[x] for x in shown])
    axes.set_xlabel(x_label)
    axes.autoscale_view()
    every = [value for line in lines for value in line.x]
    first, last = x_ends or (min(every), max(every))
    if last > first:
        axes.set_xlim(first, last)
    if axes.get_ylim()[0] <= 0 <= axes.get_ylim()[1]:
        axes.axhline(0.0, **LOOKS["zero"])
    if references:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderpad=0.2)  # above the plot: it hides no curve
    right: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (8, 0), "textcoords": "offset points"}
    return [
        axes.annotate(
            plain(line.label), (1.0, line.y[-1]), color=LIGHT[line.colour], fontweight="bold", va="center", **right
        )
        for line in lines
        if line.label
    ]


def _with_room(names: Mapping[float, str]) -> list[float]:
    """Values whose names do not touch each other, the last one among them; about 36 characters fit below the plot."""
    character = (max(names) - min(names)) / 36
    shown: list[float] = []
    for x in sorted(names, reverse=True):
        if not shown or shown[-1] - x >= character * (len(names[x]) + 1):
            shown.append(x)
    return shown


def spread(labels: Sequence[Any], axes: Axes, least: float) -> None:
    """Move the labels of curves apart by ``least`` points, or what there is room for, inside the height of the axes."""
    box, point = axes.get_window_extent(), axes.figure.dpi / 72
    gap = min(least * point, box.height / max(1, len(labels) - 1))
    ends = {label: float(axes.transData.transform((1.0, label.xy[1]))[1]) for label in labels}
    lowest, places = box.y0, {}
    for label in sorted(labels, key=ends.__getitem__):
        places[label] = max(ends[label], lowest)
        lowest = places[label] + gap
    highest = box.y1
    for label in reversed(places):
        place = min(places[label], highest)
        label.set_position((8, (place - ends[label]) / point))
        highest = place - gap


def forest(axes: Axes, rows: Sequence[tuple[str, Interval, str]]) -> None:
    """Means with their intervals: a row for each (name, interval, colour)."""
    for place, (_, interval, colour) in enumerate(rows):
        whisker(axes, interval, LIGHT[colour], place)
    axes.set_yticks(range(len(rows)), [plain(name) for name, _, _ in rows], color=LIGHT["text"])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=ROUND))
    axes.autoscale_view(scaley=False)
    if axes.get_xlim()[0] <= 0 <= axes.get_xlim()[1]:
        axes.axvline(0.0, **LOOKS["zero"])


def whisker(axes: Axes, interval: Interval, colour: str, place: float) -> None:
    dot: dict[str, Any] = {"marker": "o", "markersize": 9, "mec": LIGHT["surface"], "mew": 1.5, "linestyle": ""}
    axes.plot([interval.low, interval.high], [place, place], color=colour, linewidth=3)
    axes.plot([interval.mean], [place], color=colour, **dot)


def matrix(
    axes: Axes,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[float | None]],
    texts: Sequence[Sequence[str]],
    *,
    full: float = 1.0,
) -> None:
    """A text in every cell, which is coloured by its value. ``full``: the value with the strongest colour."""
    for i, j in np.ndindex(len(rows), len(columns)):
        value = cells[i][j]
        colour = "grid" if value is None else "accent" if value >= 0 else "bad"
        strength = STRONGEST * (1.0 if value is None else min(1.0, abs(value) / full))
        axes.add_artist(Rectangle((j - 0.48, i - 0.46), 0.96, 0.92, color=LIGHT[colour], alpha=strength, linewidth=0))
        axes.text(j, i, texts[i][j], ha="center", va="center_baseline", color=LIGHT["text"])
    aslant: dict[str, Any] = {"rotation": 32, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(columns)), [plain(name) for name in columns], color=LIGHT["text"], **aslant)
    axes.set_yticks(range(len(rows)), [plain(name) for name in rows], color=LIGHT["text"])
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(visible=False)
