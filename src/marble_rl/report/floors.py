"""The floors of guards: each guard's level against its floor, and how hard it pulls (docs/guards.md).

Not to be confused with guards.py, the checks of a run's health."""

from __future__ import annotations

from statistics import fmean

from marble_rl.balancing.guards import MATERIAL
from marble_rl.charts.drawing import Line, Reference
from marble_rl.errors import count_of
from marble_rl.report.charts import line_chart
from marble_rl.report.run_data import RunData
from marble_rl.report.sections import Section, colours
from marble_rl.report.statistics import thinned
from marble_rl.report.wording import number, shortened

BELOW = 0.25
"""Of a band: a guard that stands lower than this below its floor does not hold it. At the floor the level scatters."""


def recent_rates(run: RunData) -> dict[str, float]:
    """By guard with a level, the mean rate over the last third of the steps."""
    measured = [name for name in run.config.guards if run.series(f"floor/{name}/level")]
    series = {name: run.series(f"floor/{name}/rate").values for name in measured}
    return {name: fmean(values[-max(1, len(values) // 3) :]) for name, values in series.items() if values}


def lines_without_direction(run: RunData) -> int:
    """In how many steps no direction satisfied all floors."""
    return sum(any(line.get(f"floor/{name}/slack", 0.0) > MATERIAL for name in run.config.guards) for line in run.lines)


def floors(run: RunData) -> Section | None:
    """None without guards."""
    guards = run.config.guards
    if not guards:
        return None
    colour = colours(run)
    charts = []
    for name, guard in guards.items():
        level = run.series(f"floor/{name}/level")
        if level:
            charts.append(
                line_chart(
                    name,
                    [Line("level", *thinned(level.steps, level.values), colour[name])],
                    references=[Reference(guard.floor, "floor")],
                    include=[0.0],
                    colour=colour[name],
                    summary=f"{number(level.values[-1], signed=True)}, floor {number(guard.floor, signed=True)}",
                    note="Score minus the base model's on the same prompts, smoothed.",
                )
            )
    pulls = {name: run.series(f"floor/{name}/lambda") for name in guards}
    if any(pulls.values()):
        lines = [
            Line(name, *thinned(s.steps, s.values), colour[name], shortened(name, 14)) for name, s in pulls.items() if s
        ]
        note = "0: the guard changes nothing. 1: it pulls as hard as all objectives together."
        charts.append(line_chart("Pull of the guards", lines, include=[0.0], note=note))
    text = "Guards must stay above their floor and ask for no more. Near its floor a guard pulls, above it is free."
    short = lines_without_direction(run)
    if short:
        text += f" In {short} of {count_of(len(run.lines), 'step')} no direction satisfied all floors."
    return Section("floors", "Floors of the guards", text, charts, "No guard was measured yet.")
