"""compare.png: the composite of each method with its interval, and beside it where it comes from, reward by reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from marble_rl.compare.statistics import COMPOSITE
from marble_rl.compare.table import Comparison, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HIGHLIGHTED = "marble"


def draw(comparison: Comparison, file: Path) -> None:
    """Methods sorted by composite, the best on top. Of two methods, which have none: every reward with its interval."""
    from matplotlib.figure import Figure

    from marble_rl.charts.style import LIGHT, styled

    count, height = len(comparison.rewards), 1.7 + 0.36 * len(comparison.rows)
    with styled():
        if comparison.has_composite:
            rows = sorted(comparison.rows, key=lambda row: -row.figures[COMPOSITE].mean)
            figure = Figure(figsize=(5.2 + 0.85 * count, height), layout="constrained")
            left, right = figure.subplots(1, 2, width_ratios=(3.2, 0.85 * count + 0.6))
            _intervals(left, COMPOSITE, rows, comparison)
            left.set_title(f"{COMPOSITE}, 95 % interval", fontsize=10)
            _matrix(right, rows, comparison)
            right.set_ylim(left.get_ylim())
        else:
            figure = Figure(figsize=(max(5.2, 2.0 + 2.0 * count), height), layout="constrained")
            every = figure.subplots(1, count, squeeze=False)[0]
            for axes, name in zip(every, comparison.rewards, strict=True):
                _intervals(axes, name, comparison.rows, comparison)
            for axes in every[1:]:
                axes.set_yticklabels([])  # the names stand beside the first
            every[-1].set_xlabel("95 % intervals", fontsize=8, loc="right")
        if comparison.held_out:
            figure.supxlabel("* evaluation-only", x=0.995, ha="right", fontsize=8, color=LIGHT["quiet"])
        figure.savefig(file)


def _intervals(axes: Axes, column: str, rows: Sequence[Row], comparison: Comparison) -> None:
    from marble_rl.charts.drawing import forest

    shown = [(f"{r.method}  (n={len(r.seeds)})", r.figures[column], _colour(r.method, comparison)) for r in rows]
    forest(axes, shown)
    means = [interval.mean for _, interval, _ in shown]
    if column == COMPOSITE:  # one wide interval must not hide the rest
        room = max(1.0, 2 * (max(means) - min(means)))
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, min(means) - room), min(high, max(means) + room))
    axes.set_title(_head(column, comparison), fontsize=10)


def _matrix(axes: Axes, rows: Sequence[Row], comparison: Comparison) -> None:
    from marble_rl.charts.drawing import matrix

    rewards = comparison.rewards
    scores = [[row.z[name] for name in rewards] for row in rows]
    texts = [[f"{row.figures[name].mean:.3g}" for name in rewards] for row in rows]
    bound = max(1.0, max(abs(value) for line in scores for value in line))
    matrix(axes, [""] * len(rows), [_head(name, comparison) for name in rewards], scores, texts, full=bound)
    axes.set_title("rewards; colour: z-score across methods", fontsize=10)


def _head(column: str, comparison: Comparison) -> str:
    return f"{column}*" if column in comparison.held_out else column


def _colour(method: str, comparison: Comparison) -> str:
    return "ours" if method.startswith(HIGHLIGHTED) else "bad" if method == comparison.against else "theirs"
