"""A diagnosis on the terminal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from marble_rl.diagnose.intervals import UNKNOWN, Estimate, few
from marble_rl.diagnose.measure import Sample
from marble_rl.diagnose.run import SIZES, Diagnosis


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    console.print(
        f"{found.batches} fresh mini-batches of {found.images} images, policy after step {found.step}", markup=False
    )
    if warning := few(found.batches):
        console.print(warning, style="yellow", soft_wrap=True)
    console.print(_directions(found))
    console.print(
        "smallest cosine with a reward's gradient; conflict: how often it is negative in another batch", style="dim"
    )
    if found.larger:
        console.print(_larger(found))
        console.print(
            "smallest cosine with the mean gradient of the images left over, and how often it is negative; mean_gram "
            "and noise_aware know those images too",
            style="dim",
            soft_wrap=True,
        )
    console.print(_signals(found))
    console.print(_cosines(found))
    console.print(_advantages(found))
    if found.advantages.agreement is not None:
        console.print(
            f"cosines of gradients agree with correlations of advantages to {_shown(found.advantages.agreement)}; at 1 "
            "the QP sees nothing else",
            style="dim",
            soft_wrap=True,
        )
    console.print(_specialists(found))
    console.print(
        f"QP: mean length {fmean(found.qp.norm):.3f} (smallest {min(found.qp.norm):.3f}), "
        f"{100 * found.qp.near_zero:.0f} % of batches below 0.05; combined gradient "
        f"{fmean(found.qp.combined):.2f} of the rewards' mean length",
        soft_wrap=True,
    )
    if found.conflict:
        opposed = found.conflict[-2]
        console.print(
            f"constructed conflict ({found.names[1]} turned {100 * opposed.strength:.0f} % against {found.names[0]}): "
            f"min cos {opposed.min_cos:+.3f} for the min-norm point, {opposed.weighted_sum_min_cos:+.3f} for the sum",
            markup=False,
            soft_wrap=True,
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i)
    return table


def _directions(found: Diagnosis) -> Table:
    table = _table("Directions", "", "own batch", "another batch", "conflict", "mean of others", "AdamW's step")
    for name, figures in found.directions.items():
        if not figures.in_batch:
            continue
        table.add_row(
            name,
            f"{figures.in_batch['min_cos'].mean:+.2f}",
            _shown(figures.independent.get("min_cos", UNKNOWN)),
            _known(figures.independent.get("conflict", UNKNOWN).mean, ".2f"),
            _shown(figures.rest.get("min_cos", UNKNOWN)),
            _shown(found.applied[name].min_cos),
        )
    return table


def _larger(found: Diagnosis) -> Table:
    table = _table(
        "Directions made from larger batches", "", *(f"{size * found.images} images" for size in (1, *found.larger))
    )
    for name in found.directions:
        if not all(name in by_name for by_name in found.larger.values()):
            continue
        figures = [found.directions[name], *(by_name[name] for by_name in found.larger.values())]
        if any(f.rest for f in figures):
            table.add_row(name, *(_both(f.rest) for f in figures))
    return table


def _signals(found: Diagnosis) -> Table:
    table = _table("Signal of each reward, by batch size beside the run's", "", *(f"x{size:g}" for size in SIZES))
    for i, name in enumerate(found.names):
        table.add_row(name, *(f"{found.signal[size][i]:.2f}" for size in SIZES))
    return table


def _cosines(found: Diagnosis) -> Table:
    table = _table("Cosines between the rewards' true gradients (? where one is lost in noise)", "", *found.names)
    for name, row in zip(found.names, found.cosines, strict=True):
        table.add_row(name, *(_known(c, "+.2f") for c in row))
    return table


def _advantages(found: Diagnosis) -> Table:
    table = _table("Coefficients of the QP, mean over mini-batches", "", *found.names)
    facts = found.advantages
    for name, shares in (("of the gradients", facts.alpha), ("of the advantages", facts.alpha_of_advantages)):
        table.add_row(name, *(f"{share.mean:.2f}" for share in shares))
    return table


def _specialists(found: Diagnosis) -> Table:
    sources: dict[str, list[Sample]] = defaultdict(list)
    for sample in found.samples:
        sources[sample.source].append(sample)
    table = _table("Mean size of the advantages by prompt source, first mini-batch", "", *found.names)
    for source, samples in sources.items():
        columns = zip(*(sample.advantages for sample in samples), strict=True)
        table.add_row(source, *(_mean_size(column) for column in columns))
    return table


def _mean_size(advantages: Sequence[float | None]) -> str:
    told = [abs(a) for a in advantages if a is not None]
    return f"{fmean(told):.2f}" if told else "-"


def _both(figures: dict[str, Estimate]) -> str:
    return f"{figures['min_cos'].mean:+.3f} {figures['conflict'].mean:.2f}" if figures else "?"


def _shown(estimate: Estimate) -> str:
    """Mean and interval, which need not lie evenly around it."""
    return "?" if math.isnan(estimate.mean) else f"{estimate.mean:+.2f} ({estimate.low:+.2f} to {estimate.high:+.2f})"


def _known(value: float, form: str) -> str:
    return "?" if math.isnan(value) else f"{value:{form}}"
