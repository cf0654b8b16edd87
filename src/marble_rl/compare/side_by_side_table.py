"""Runs side by side on the terminal."""

from __future__ import annotations

from rich.console import Console

from marble_rl.compare.side_by_side import Difference, SideBySide, notes
from marble_rl.compare.writing import print_cells, print_notes
from marble_rl.intervals import Interval

MOST = 40
"""Characters of a setting's value."""


def print_side_by_side(compared: SideBySide, console: Console) -> None:
    if compared.means:
        print_cells("Scores on the evaluated prompts", _scores(compared), console)
    if compared.settings:
        head = ["setting", *(run.name for run in compared.runs)]
        body = [
            [key, *(value if len(value) <= MOST else f"{value[: MOST - 1]}…" for value in values)]
            for key, values in compared.settings
        ]
        print_cells("Settings that differ", [head, *body], console)
    else:
        console.print("All settings are the same.", highlight=False)
    print_notes([*notes(compared), *(["* evaluation only: never trained on"] if compared.held_out else [])], console)


def _scores(compared: SideBySide) -> list[list[str]]:
    """A row per reward: the base model, each run, then each difference to the first run."""
    evaluated = [run for run in compared.runs if run.name in compared.means]
    known = [d for d in compared.differences if d.by_reward]
    head = ["reward", *(["base"] if compared.base else []), *(f"{run.name}\n{run.label}" for run in evaluated)]
    head += [f"{d.run}\nminus {compared.first.name}" for d in known]
    rows = [head]
    for reward in compared.rewards:
        cells = [reward + ("*" if reward in compared.held_out else "")]
        if compared.base:
            cells.append(f"{compared.base[reward]:.4f}" if reward in compared.base else "")
        cells += [_mean(compared.means[run.name].get(reward)) for run in evaluated]
        rows.append([*cells, *(_difference(d, reward) for d in known)])
    return rows


def _mean(figure: Interval | None) -> str:
    if figure is None:
        return ""
    return f"{figure.mean:.4f}" + ("" if figure.over == "nothing" else f"\n±{figure.half_width:.4f}")


def _difference(difference: Difference, reward: str) -> str:
    """With its interval, and a word where that leaves out 0."""
    figure = difference.by_reward.get(reward)
    if figure is None:
        return ""
    word = " higher" if reward in difference.changed(1) else " lower" if reward in difference.changed(-1) else ""
    ends = "" if figure.over == "nothing" else f"\n{figure.low:+.4f} .. {figure.high:+.4f}"
    return f"{figure.mean:+.4f}{word}{ends}"
