"""The ground that charts are drawn on: from values to places, round ticks, grid lines and their labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from marble_rl.report.wording import MINUS

LEFT, TOP, BOTTOM = 44, 12, 26
Mark = tuple[float, str, str]
"""On the x axis: where, its text, and which part of the text stands there (`start`, `middle` or `end`)."""


@dataclass(frozen=True)
class Frame:
    """From values to places."""

    width: float
    height: float
    right: float
    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, value: float) -> float:
        low, high = self.x
        return round(LEFT + (self.width - LEFT - self.right) * ((value - low) / (high - low) if high > low else 0.5), 1)

    def down(self, value: float) -> float:
        low, high = self.y
        return round(TOP + (self.height - TOP - BOTTOM) * (1 - (value - low) / (high - low)), 1)

    def hover(
        self, unit: str, x: Sequence[float], rows: list[dict[str, object]], names: Sequence[str] | None = None
    ) -> dict[str, object]:
        """For script.js. ``names`` are shown in place of the values of ``x``."""
        return {
            "plot": [LEFT, TOP, self.width - self.right, self.height - BOTTOM],
            "x": [round(v, 1) for v in x] if names is None else list(names),
            "at": [self.across(v) for v in x],
            "unit": unit,
            "rows": rows,
        }


def drawing(frame: Frame, title: str, parts: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}" tabindex="0">{}<g class="hover"></g></svg>'
    ).format(frame.width, frame.height, title, Markup("").join(parts))


def scale(low: float, high: float) -> tuple[float, float, list[float]]:
    """Bounds that hold all values, and three to five round ticks between them."""
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-6):
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    bottom, top = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [i * step for i in range(bottom, top + 1)]
    room = 0.04 * (high - low)
    return min(low - room, ticks[0]) if low < 0 or low - room > 0 else 0.0, max(high, ticks[-1]), ticks


def tick_text(ticks: Sequence[float]) -> Callable[[float], str]:
    """As many digits as tell the ticks apart."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    if max(abs(tick) for tick in ticks) < 1e-3 or max(abs(tick) for tick in ticks) >= 1e5:
        return lambda value: f"{value:.1e}".replace("-", MINUS) if value else "0"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    digits += abs(round(step, digits) - step) > 1e-9 * step
    return lambda value: f"{value:.{digits}f}".replace("-", MINUS)


def step_marks(first: float, last: float) -> list[Mark]:
    """Both ends of the steps, and the middle where there is one."""
    if last <= first:
        return [(first, f"step {first:.0f}", "middle")]
    middle = round((first + last) / 2)
    between = [(float(middle), f"{middle}", "middle")] if last - first > 3 else []
    return [(first, f"step {first:.0f}", "start"), *between, (last, f"{last:.0f}", "end")]


def axes(frame: Frame, ticks: Sequence[float], marks: Sequence[Mark]) -> Markup:
    text = tick_text(ticks)
    shown = [tick for tick in ticks if frame.y[0] - 1e-12 <= tick <= frame.y[1] + 1e-12]
    end = frame.width - frame.right
    parts = []
    for tick in shown:
        y, kind = frame.down(tick), "grid zero" if abs(tick) < 1e-12 else "grid"
        label = Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            LEFT - 6, y + 4, text(tick)
        )
        parts += [Markup('<path class="{}" d="M{} {}H{}"/>').format(kind, LEFT, y, end), label]
    for value, name, anchor in marks:
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>').format(
                frame.across(value), frame.height - 8, anchor, name
            )
        )
    return Markup("").join(parts)
