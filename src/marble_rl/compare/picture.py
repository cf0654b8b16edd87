"""compare.png: the composite of each method with its interval, and beside it where it comes from, reward by reward."""

from __future__ import annotations

from pathlib import Path

from marble_rl.compare.statistics import COMPOSITE
from marble_rl.compare.table import Comparison

HIGHLIGHTED = "marble"
BLUE, GREY, RED = "#2a6fbb", "#8a8f98", "#c0504d"


def draw(comparison: Comparison, file: Path) -> None:
    """Methods sorted by composite, the best on top."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    rows = sorted(comparison.rows, key=lambda row: row.figures[COMPOSITE].mean)
    rewards = comparison.rewards
    size = (5.2 + 0.85 * len(rewards), 1.7 + 0.36 * len(rows))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=size, dpi=150, sharey=True, layout="constrained", width_ratios=(3.2, 0.85 * len(rewards) + 0.6)
    )
    places = range(len(rows))
    for place, row in zip(places, rows, strict=True):
        found = row.figures[COMPOSITE]
        colour = BLUE if row.method.startswith(HIGHLIGHTED) else RED if row.method == comparison.against else GREY
        left.plot([found.low, found.high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
        left.plot(found.mean, place, marker="o", color=colour, linestyle="")
    means = [row.figures[COMPOSITE].mean for row in rows]
    room = max(1.0, 2 * (max(means) - min(means)))
    low, high = left.get_xlim()
    left.set_xlim(max(low, min(means) - room), min(high, max(means) + room))  # one wide interval must not hide the rest
    left.axvline(0.0, color="#cccccc", linewidth=1, zorder=0)
    left.set_yticks(list(places), [f"{row.method}  (n={len(row.seeds)})" for row in rows])
    left.set_ylim(-0.6, len(rows) - 0.4)
    left.set_title("composite, 95 % interval", fontsize=10)
    for side in ("top", "right", "left"):
        left.spines[side].set_visible(False)
    left.tick_params(axis="y", length=0)

    table = [[row.z[name] for name in rewards] for row in rows]
    bound = max(1.0, max(abs(value) for line in table for value in line))
    right.imshow(table, cmap="RdBu", vmin=-bound, vmax=bound, aspect="auto", origin="lower")
    for place, row in zip(places, rows, strict=True):
        for k, name in enumerate(rewards):
            value = row.z[name]
            dark = abs(value) > 0.6 * bound
            text = f"{row.figures[name].mean:.3g}"
            right.text(k, place, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    heads = [f"{name}*" if name in comparison.held_out else name for name in rewards]
    right.set_xticks(range(len(rewards)), heads, rotation=30, ha="right")
    right.tick_params(length=0)
    right.set_title("rewards; colour: z-score across methods", fontsize=10)
    for side in right.spines.values():
        side.set_visible(False)
    right.set_xlim(-0.5, len(rewards) - 0.5)
    figure.text(0.995, 0.005, "* held out" if comparison.held_out else "", ha="right", va="bottom", fontsize=8)
    figure.savefig(file)
    plt.close(figure)
