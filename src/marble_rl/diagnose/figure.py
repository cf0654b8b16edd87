"""The picture of a diagnosis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from marble_rl.diagnose.record import Diagnosis

INK = "#1f2937"
OWN, OTHER, REST = "#9ca3af", "#dc2626", "#2563eb"


def draw_diagnosis(found: Diagnosis, path: Path) -> None:
    """Four panels: how directions serve the rewards, how rewards agree, how much is signal, what the QP finds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    _directions(axes[0, 0], found)
    _cosines(axes[0, 1], found)
    _signal(axes[1, 0], found)
    _qp(axes[1, 1], found)
    figure.suptitle(f"{found.batches} fresh mini-batches of {found.images} images, after step {found.step}", color=INK)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _directions(axes: Any, found: Diagnosis) -> None:
    names = [name for name, figures in found.directions.items() if figures.in_batch]
    for offset, (label, colour, key) in enumerate(
        (
            ("in its own batch", OWN, "in_batch"),
            ("in another batch", OTHER, "independent"),
            ("with the mean of the others", REST, "rest"),
        )
    ):
        told = {i: getattr(found.directions[name], key).get("min_cos") for i, name in enumerate(names)}
        estimates = [estimate for estimate in told.values() if estimate is not None]
        places = [i + 0.22 * (offset - 1) for i, estimate in told.items() if estimate is not None]
        errors = [[e.mean - e.low for e in estimates], [e.high - e.mean for e in estimates]]
        axes.errorbar([e.mean for e in estimates], places, xerr=errors, fmt="o", color=colour, label=label, ms=5)
    axes.axvline(0, color=INK, lw=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("smallest cosine with a reward's gradient")
    axes.set_title("How each direction serves the reward it serves least")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)


def _cosines(axes: Any, found: Diagnosis) -> None:
    matrix = np.array(found.cosines, dtype=float)
    axes.imshow(np.nan_to_num(matrix), vmin=-1, vmax=1, cmap="RdBu")
    for i in range(len(matrix)):
        for j in range(len(matrix)):
            told = not np.isnan(matrix[i, j])
            colour = "white" if told and abs(matrix[i, j]) > 0.6 else INK
            axes.text(j, i, f"{matrix[i, j]:+.2f}" if told else "?", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(found.names)), found.names, rotation=30, ha="right")
    axes.set_yticks(range(len(found.names)), found.names)
    axes.set_title("Cosines between the rewards' true gradients")


def _signal(axes: Any, found: Diagnosis) -> None:
    sizes = list(found.signal)
    for i, name in enumerate(found.names):
        axes.plot(sizes, [found.signal[size][i] for size in sizes], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"x{size:g}" for size in sizes])
    axes.axvline(1, color=INK, lw=0.8, ls=":")
    axes.axhline(0, color=INK, lw=0.8)
    axes.set_xlabel("batch size beside the run's")
    axes.set_title("Share of each reward's squared gradient that is not noise")
    axes.legend(frameon=False, fontsize=8)


def _qp(axes: Any, found: Diagnosis) -> None:
    axes.hist(found.qp.norm, bins=20, color=REST, alpha=0.8)
    axes.axvline(1 / np.sqrt(len(found.names)), color=INK, lw=0.8, ls=":", label="pure noise: 1 / sqrt(K)")
    axes.set_xlabel("length of the min-norm point = smallest cosine in its own batch")
    axes.set_ylabel("mini-batches")
    axes.set_title("What the quadratic program achieves")
    axes.legend(frameon=False, fontsize=8)
