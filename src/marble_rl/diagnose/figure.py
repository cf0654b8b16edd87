"""The picture of a diagnosis."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from marble_rl.charts.drawing import Line, Reference, curves, forest, histogram, matrix, spread
from marble_rl.charts.style import LIGHT, PALETTE, styled
from marble_rl.diagnose.record import Diagnosis

SERIES = (
    ("in its own batch", "theirs", "in_batch"),
    ("in another batch", "bad", "independent"),
    ("with the mean of the others", "ours", "rest"),
)


def draw_diagnosis(diagnosis: Diagnosis, path: Path) -> None:
    """Four panels: how directions serve the rewards, how rewards agree, how much is signal, what the QP achieves."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(13, 9), layout="constrained")
        axes = figure.subplots(2, 2)
        _directions(axes[0, 0], diagnosis)
        _cosines(axes[0, 1], diagnosis)
        labels = _signal(axes[1, 0], diagnosis)
        _qp(axes[1, 1], diagnosis)
        title = f"{diagnosis.batches} fresh mini-batches of {diagnosis.images} images, after step {diagnosis.step}"
        figure.suptitle(title, color=LIGHT["text"])
        figure.draw_without_rendering()
        spread(labels, axes[1, 0], 12.0)
        figure.savefig(path)


def _directions(axes: Any, diagnosis: Diagnosis) -> None:
    axes.set_title("How each direction serves the reward it serves least")
    measured = {name: figures for name, figures in diagnosis.directions.items() if figures.in_batch}
    if not measured:
        return
    for i, (label, colour, key) in enumerate(SERIES):
        rows = [(name, getattr(figures, key).get("min_cos"), colour) for name, figures in measured.items()]
        forest(axes, rows, shift=0.25 * (i - 1), label=label)
    axes.set_xlabel("smallest cosine with a reward's gradient")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)


def _cosines(axes: Any, diagnosis: Diagnosis) -> None:
    texts = [
        ["?" if value is None else f"{value:+.2f}".replace("-", "\N{MINUS SIGN}") for value in row]
        for row in diagnosis.cosines
    ]
    matrix(axes, diagnosis.names, diagnosis.names, diagnosis.cosines, texts)
    axes.set_title("Cosines between the rewards' true gradients")


def _signal(axes: Any, diagnosis: Diagnosis) -> list[Any]:
    doublings = {math.log2(size): f"x{size:g}" for size in diagnosis.signal}
    lines = []
    for i, name in enumerate(diagnosis.names):
        shares = [(math.log2(size), row[i]) for size, row in diagnosis.signal.items()]
        known = [(x, share) for x, share in shares if share is not None]
        if known:
            x, y = zip(*known, strict=True)
            lines.append(Line(name, x, y, f"r{i % PALETTE}", name))
    x_label = "batch size, relative to the run's"
    labels = curves(axes, lines, x_label=x_label, x_names=doublings, include=[0.0]) if lines else []
    axes.set_title("Share of each reward's squared gradient that is not noise")
    return labels


def _qp(axes: Any, diagnosis: Diagnosis) -> None:
    noise = Reference(1 / math.sqrt(len(diagnosis.names)), "pure noise: 1/√K")
    histogram(
        axes, diagnosis.qp.norm, unit="length of the min-norm point = smallest cosine in its own batch", reference=noise
    )
    axes.set_title("What the quadratic program achieves")
