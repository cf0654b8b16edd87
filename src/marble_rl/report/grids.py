"""Charts of cells and bins: a matrix with its numbers, a map of samples, and a histogram.

Blue is above zero, red below; how strong says how far. At most `STRONGEST`, so that numbers stay readable on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup

from marble_rl.report.axes import BOTTOM, LEFT, TOP, Frame, axes, drawing, scale, tick_text
from marble_rl.report.charts import CHARACTER, Chart, Reference
from marble_rl.report.wording import MINUS, number, shortened

WIDTH = 460.0
STRONGEST = 0.45
"""Opacity of the colour of a cell."""
LEVELS = 5
"""Shades of a map on either side of zero; each is one path, which is much smaller than a rectangle for every sample."""
MOST_LABEL = 14
BINS = 20


def matrix(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[float | None]],
    *,
    full: float = 1.0,
    signed: bool = True,
    unknown: str = "?",
    note: str = "",
) -> Chart:
    """Numbers in coloured cells. ``full``: the value with the strongest colour; ``unknown`` stands where there is none.

    Names of columns stand below, aslant: their last letter under the middle of the column.
    """
    left = 12 + CHARACTER * max(len(shortened(name, MOST_LABEL)) for name in rows)
    room, row = (WIDTH - left - 4) / len(columns), 34.0
    bottom = TOP + row * len(rows)
    height = bottom + 20 + 0.6 * CHARACTER * max(len(shortened(name, MOST_LABEL)) for name in columns)
    parts = []
    for i, name in enumerate(rows):
        y = TOP + row * (i + 0.5)
        label = Markup('<text class="name" x="{}" y="{:.1f}" text-anchor="end">{}</text>')
        parts.append(label.format(left - 8, y + 4, shortened(name, MOST_LABEL)))
        for j, value in enumerate(cells[i]):
            text = unknown if value is None else _digits(value, signed=signed, narrow=room < 52)
            kind, opacity = "none", 0.0
            if value is not None:
                kind, opacity = "pos" if value >= 0 else "neg", STRONGEST * min(1.0, abs(value) / full)
            told = (unknown or "does not apply") if value is None else number(value, signed=signed)
            x, top = left + room * j, TOP + row * i
            figure = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>').format(
                x + room / 2, y + 4, text
            )
            parts.append(
                Markup(
                    '<g class="cell"><title>{}</title><rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" '
                    'height="{:.1f}" rx="4" fill-opacity="{:.2f}"/>{}</g>'
                ).format(
                    f"{name}, {columns[j]}: {told}", kind, x + 1, top + 1, room - 2, row - 2, opacity,
                    figure if text else "",
                )
            )  # fmt: skip
    for j, name in enumerate(columns):
        x, y = left + room * (j + 0.5) + 4, bottom + 14
        label = Markup(
            '<text class="name" text-anchor="end" transform="translate({:.1f} {:.1f}) rotate(-32)">{}</text>'
        )
        parts.append(label.format(x, y, shortened(name, MOST_LABEL)))
    svg = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">{}</svg>')
    return Chart(title, svg.format(WIDTH, height, title, Markup("").join(parts)), {}, note)


def _digits(value: float, *, signed: bool, narrow: bool) -> str:
    text = f"{abs(value):.2f}" if abs(value) < 10 else f"{abs(value):.0f}"
    sign = MINUS if value < 0 and float(text) else "+" if signed and not narrow and float(text) else ""
    return sign + (text.removeprefix("0") if narrow and abs(value) < 1 else text)


def sample_map(
    title: str,
    rows: Sequence[str],
    samples: Sequence[tuple[str, str, Sequence[float | None]]],
    *,
    note: str = "",
) -> Chart:
    """A column for each (group, name, value for each row or None where the row says nothing about it), by group."""
    by_group: dict[str, list[tuple[str, str, Sequence[float | None]]]] = defaultdict(list)
    for sample in samples:
        by_group[sample[0]].append(sample)
    ordered = [sample for group in by_group.values() for sample in group]
    left, row = 12 + CHARACTER * max(len(shortened(name, MOST_LABEL)) for name in rows), 26.0
    height, column = TOP + row * len(rows) + BOTTOM, (WIDTH - left - 4) / len(ordered)
    full = max((abs(v) for _, _, values in ordered for v in values if v is not None), default=0.0) or 1.0
    shades: dict[tuple[str, int], list[str]] = defaultdict(list)
    for i, (_, _, values) in enumerate(ordered):
        for k, value in enumerate(values):
            if value is not None:
                level = round(LEVELS * min(1.0, abs(value) / full))
                box = f"M{left + column * i:.1f} {TOP + row * k + 1:.1f}h{column:.2f}v{row - 2:.1f}h-{column:.2f}z"
                shades["pos" if value >= 0 else "neg", level].append(box)
    parts = []
    for (kind, level), boxes in sorted(shades.items()):
        path = Markup('<path class="{}" fill-opacity="{:.2f}" d="{}"/>')
        parts.append(path.format(kind, 0.06 + 0.94 * level / LEVELS, "".join(boxes)))
    for k, name in enumerate(rows):
        label = Markup('<text class="name" x="{}" y="{:.1f}" text-anchor="end">{}</text>')
        parts.append(label.format(left - 8, TOP + row * (k + 0.5) + 4, shortened(name, MOST_LABEL)))
    start = float(left)
    for group, members in groupby(ordered, key=lambda sample: sample[0]):
        width = column * len(list(members))
        parts.append(Markup('<path class="grid zero" d="M{:.1f} {}V{}"/>').format(start, TOP - 4, height - BOTTOM + 4))
        label = Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>')
        parts.append(label.format(start + width / 2, height - 8, shortened(group, int(width / CHARACTER))))
        start += width
    found: list[dict[str, object]] = [
        {
            "name": name,
            "colour": "ink",
            "values": [None if s[2][k] is None else number(s[2][k], signed=True) for s in ordered],  # type: ignore[arg-type]
            "y": [],
        }
        for k, name in enumerate(rows)
    ]
    frame = Frame(WIDTH, height, 4.0, (0.0, 1.0), (0.0, 1.0))
    data = frame.hover("", [], found, [shortened(name, 36) for _, name, _ in ordered])
    data["at"] = [round(left + column * (i + 0.5), 1) for i in range(len(ordered))]
    return Chart(title, drawing(frame, title, parts), data, note)


def histogram(
    title: str, values: Sequence[float], *, reference: Reference | None = None, note: str = "", summary: str = ""
) -> Chart:
    """How many values lie in each of `BINS` bins from zero on; ``reference`` is a place on the x axis."""
    _, high, x_ticks = scale(0.0, max([*values, *([reference.y] if reference else [])]) or 1.0)
    size = high / BINS
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, max(0, int(value / size)))] += 1
    _, top, ticks = scale(0.0, 1.15 * max(counts))  # with room for the label above the bars
    frame = Frame(WIDTH, 240.0, 10.0, (0.0, high), (0.0, top))
    text = tick_text(x_ticks)
    marks = [(tick, text(tick), "middle" if 0 < tick < high else "start" if tick <= 0 else "end") for tick in x_ticks]
    bar = (frame.width - LEFT - frame.right) / BINS
    boxes = "".join(
        f"M{LEFT + bar * i + 0.5:.1f} {frame.down(count):.1f}h{bar - 1:.1f}V{frame.down(0):.1f}h-{bar - 1:.1f}z"
        for i, count in enumerate(counts)
        if count
    )
    parts = [axes(frame, [tick for tick in ticks if tick == int(tick)], marks)]
    parts.append(Markup('<path class="area ours soft" d="{}"/>').format(boxes))
    if reference is not None:
        x = frame.across(reference.y)
        anchor, aside = ("end", -5) if x > frame.width / 2 else ("start", 5)
        line = '<path class="reference" d="M{} {}V{}"/><text class="reference" x="{}" y="{}" text-anchor="{}">{}</text>'
        parts.append(
            Markup(line).format(x, TOP, frame.height - BOTTOM, x + aside, TOP + 8, anchor, reference.label)
        )  # fmt: skip
    rows: list[dict[str, object]] = [{"name": "batches", "colour": "ours", "values": counts, "y": []}]
    names = [f"{number(size * i)} to {number(size * (i + 1))}" for i in range(BINS)]
    data = frame.hover("", [], rows, names)
    data["at"] = [round(LEFT + bar * (i + 0.5), 1) for i in range(BINS)]
    return Chart(title, drawing(frame, title, parts), data, note, summary=summary)
