"""The picture of docs/performance.md: what a step costs against the number of rewards.

python -m tools.bench_picture runs/bench docs/images/bench.png      # of the folder that marble bench wrote
"""

from __future__ import annotations

import json
from pathlib import Path

import typer
from matplotlib.figure import Figure

from marble_rl.bench.measure import Spread
from marble_rl.bench.run import BENCH
from marble_rl.bench.workload import FUSED, FUSED_LAZY, PASSES, Step
from marble_rl.charts.style import LIGHT, styled


def main(folder: Path, picture: Path) -> None:
    """Draw the measurements in FOLDER to the file PICTURE."""
    tree = json.loads((folder / BENCH).read_text(encoding="utf-8"))
    draw({name: Spread(**spread) for name, spread in tree["speed"].items()}, picture)


def draw(speeds: dict[str, Spread], file: Path) -> None:
    """``speeds``: of each kind of step, relative to the weighted sum's."""

    def cost(step: Step) -> tuple[float, float, float]:
        speed = speeds[step.name]
        return 1 / speed.median, 1 / speed.median - 1 / speed.high, 1 / speed.low - 1 / speed.median

    with styled():
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for rewards, steps, label, marker, colour in (
            (list(FUSED), list(FUSED.values()), "one gradient per reward, fused", "o", "ours"),
            ([5], [PASSES], "one backward pass per reward", "s", "bad"),
            ([5], [FUSED_LAZY], "fused, regularised lazily", "o", "r9"),
        ):
            middle, below, above = zip(*map(cost, steps), strict=True)
            axes.errorbar(
                rewards, middle, yerr=[below, above], capsize=3, label=label, marker=marker, color=LIGHT[colour]
            )
        axes.axhline(1.0, color=LIGHT["quiet"], linewidth=1)
        axes.annotate("weighted sum", (50, 1.0), ha="right", va="bottom", color=LIGHT["quiet"])
        axes.set_xlabel("rewards K")
        axes.set_ylabel("cost of a step, weighted sum = 1")
        axes.set_ylim(0)
        axes.margins(x=0.05)
        axes.legend()
        figure.savefig(file)


if __name__ == "__main__":
    typer.run(main)
