"""compare.png: the composite of each method with its interval, and beside it where it comes from, reward by reward."""

from __future__ import annotations

from pathlib import Path

from marble_rl.compare.statistics import COMPOSITE
from marble_rl.compare.table import Comparison

HIGHLIGHTED = "marble"


def draw(comparison: Comparison, file: Path) -> None:
    """Methods sorted by composite, the best on top."""
    from matplotlib.figure import Figure

    from marble_rl.charts.drawing import forest, matrix
    from marble_rl.charts.style import LIGHT, styled

    rows = sorted(comparison.rows, key=lambda row: -row.figures[COMPOSITE].mean)
    rewards = comparison.rewards
    with styled():
        size = (5.2 + 0.85 * len(rewards), 1.7 + 0.36 * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3.2, 0.85 * len(rewards) + 0.6))
        intervals = [
            (f"{row.method}  (n={len(row.seeds)})", row.figures[COMPOSITE], _colour(row.method, comparison))
            for row in rows
        ]
        forest(left, intervals)
        means = [row.figures[COMPOSITE].mean for row in rows]
        room = max(1.0, 2 * (max(means) - min(means)))  # one wide interval must not hide the rest
        low, high = left.get_xlim()
        left.set_xlim(max(low, min(means) - room), min(high, max(means) + room))
        left.set_title("composite, 95 % interval", fontsize=10)

        scores = [[row.z[name] for name in rewards] for row in rows]
        texts = [[f"{row.figures[name].mean:.3g}" for name in rewards] for row in rows]
        heads = [f"{name}*" if name in comparison.held_out else name for name in rewards]
        bound = max(1.0, max(abs(value) for line in scores for value in line))
        matrix(right, [""] * len(rows), heads, scores, texts, full=bound)
        right.set_ylim(left.get_ylim())
        right.set_title("rewards; colour: z-score across methods", fontsize=10)
        if comparison.held_out:
            figure.supxlabel("* evaluation-only", x=0.995, ha="right", fontsize=8, color=LIGHT["quiet"])
        figure.savefig(file)


def _colour(method: str, comparison: Comparison) -> str:
    return "ours" if method.startswith(HIGHLIGHTED) else "bad" if method == comparison.against else "theirs"
