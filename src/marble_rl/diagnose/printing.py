"""A diagnosis on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from marble_rl.diagnose.answers import RULES
from marble_rl.diagnose.intervals import few
from marble_rl.diagnose.record import AdvantageFacts, Diagnosis, Figures
from marble_rl.intervals import Interval


def print_diagnosis(diagnosis: Diagnosis, console: Console, everything: bool = False) -> None:
    """Answers and one table; with ``everything`` all tables."""
    console.print(
        f"{diagnosis.batches} fresh mini-batches of {diagnosis.images} images, policy after step {diagnosis.step}",
        markup=False,
    )
    for one in diagnosis.answers:
        console.print(f"\n{one.question}", style="bold", markup=False)
        console.print(one.answer, markup=False, highlight=False)
    console.print()
    if warning := few(diagnosis.batches):
        console.print(warning, style="yellow", soft_wrap=True)
    console.print(_rewards(diagnosis))
    console.print(
        "signal: share of the squared gradient that is not noise; below 0.10 a reward hardly learns. Then, by rule: "
        "cosine of its update with the reward's gradient in the other batches. ± 95 % interval, ? where a figure "
        "cannot be estimated",
        style="dim",
    )
    if everything:
        _print_the_rest(diagnosis, console)


def _print_the_rest(diagnosis: Diagnosis, console: Console) -> None:
    console.print(_directions(diagnosis))
    for name in diagnosis.directions:
        console.print(f"{name}: {diagnosis.meanings.get(name, '?')}", style="dim", markup=False)
    console.print(
        "smallest cosine with a reward's gradient; conflict: how often it is negative in another batch", style="dim"
    )
    if diagnosis.larger:
        console.print(_larger(diagnosis))
        console.print(
            "smallest cosine with the mean gradient of the images left over, and how often it is negative; mean_gram "
            "was made from those images too",
            style="dim",
            soft_wrap=True,
        )
    console.print(_signals(diagnosis))
    console.print(_cosines(diagnosis))
    if diagnosis.advantages is not None:
        console.print(_coefficients(diagnosis.advantages, diagnosis.names))
        console.print(
            f"cosines of gradients agree with correlations of advantages to {_shown(diagnosis.advantages.agreement)}; "
            "at 1 the QP sees nothing else",
            style="dim",
            soft_wrap=True,
        )
    console.print(
        f"QP: mean length {fmean(diagnosis.qp.norm):.3f} (smallest {min(diagnosis.qp.norm):.3f}), "
        f"{100 * diagnosis.qp.near_zero:.0f} % of batches below 0.05",
        soft_wrap=True,
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i)
    return table


def _rewards(diagnosis: Diagnosis) -> Table:
    """One row for each reward: its signal, and how each rule serves it."""
    shown = {name: diagnosis.directions[name] for name in RULES if name in diagnosis.directions}
    table = _table("", "reward", "signal", *(RULES[name] for name in shown))
    signals = diagnosis.signal_intervals or [None] * len(diagnosis.names)
    for k, (name, signal) in enumerate(zip(diagnosis.names, signals, strict=True)):
        served = (figures.each[k] if figures.each else None for figures in shown.values())
        share = "?" if signal is None or signal.low <= 0 else f"{signal.mean:.2f} ±{signal.half_width:.2f}"
        table.add_row(name, share, *(_centred(one) for one in served))
    return table


def _directions(diagnosis: Diagnosis) -> Table:
    table = _table("Directions", "", "own batch", "another batch", "conflict", "mean of others", "AdamW's step")
    for name, figures in diagnosis.directions.items():
        if not figures.in_batch:
            continue
        table.add_row(
            name,
            f"{figures.in_batch['min_cos'].mean:+.2f}",
            _shown(figures.independent.get("min_cos")),
            _mean(figures.independent.get("conflict")),
            _shown(figures.rest.get("min_cos")),
            _shown(diagnosis.applied[name].min_cos),
        )
    return table


def _larger(diagnosis: Diagnosis) -> Table:
    table = _table(
        "Directions made from larger batches",
        "",
        *(f"{size * diagnosis.images} images" for size in (1, *diagnosis.larger)),
    )
    for name in diagnosis.directions:
        if not all(name in by_name for by_name in diagnosis.larger.values()):
            continue
        figures = [diagnosis.directions[name], *(by_name[name] for by_name in diagnosis.larger.values())]
        if any(f.rest for f in figures):
            table.add_row(name, *(_both(f.rest) for f in figures))
    return table


def _signals(diagnosis: Diagnosis) -> Table:
    table = _table(
        "Signal of each reward, by batch size beside the run's", "", *(f"x{size:g}" for size in diagnosis.signal)
    )
    for i, name in enumerate(diagnosis.names):
        table.add_row(name, *(_known(row[i], ".2f") for row in diagnosis.signal.values()))
    return table


def _cosines(diagnosis: Diagnosis) -> Table:
    table = _table(
        "Cosines between the rewards' true gradients (? where the signal of one may be 0)", "", *diagnosis.names
    )
    for name, row in zip(diagnosis.names, diagnosis.cosines, strict=True):
        table.add_row(name, *(_known(c, "+.2f") for c in row))
    return table


def _coefficients(facts: AdvantageFacts, names: Sequence[str]) -> Table:
    table = _table("Coefficients of the QP, mean over mini-batches", "", *names)
    for name, shares in (("of the gradients", facts.alpha), ("of the advantages", facts.alpha_of_advantages)):
        table.add_row(name, *map(_mean, shares))
    return table


def _both(figures: Figures) -> str:
    return f"{figures['min_cos'].mean:+.3f} {figures['conflict'].mean:.2f}" if figures else "?"


def _centred(interval: Interval | None) -> str:
    return "?" if interval is None else f"{interval.mean:+.2f} ±{interval.half_width:.2f}"


def _shown(interval: Interval | None) -> str:
    """Mean and interval, which need not lie evenly around it."""
    return "?" if interval is None else f"{interval.mean:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"


def _mean(interval: Interval | None) -> str:
    return _known(None if interval is None else interval.mean, ".2f")


def _known(value: float | None, form: str) -> str:
    return "?" if value is None else f"{value:{form}}"
