"""The table of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from markupsafe import Markup

from marble_rl.intervals import Interval
from marble_rl.report.charts import interval_mark
from marble_rl.report.run_data import RunData
from marble_rl.report.sections import colours
from marble_rl.report.wording import interval, number


@dataclass(frozen=True)
class EvaluationRow:
    """A reward before and after."""

    name: str
    colour: str
    held_out: bool
    means: list[str]
    difference: str = ""
    interval: str = ""
    mark: Markup | None = None
    verdict: str = ""


def evaluation_rows(run: RunData) -> list[EvaluationRow]:
    evaluation = run.evaluation
    if evaluation is None:
        return []
    colour = colours(run)
    rows = []
    for name in evaluation.rewards:
        means = [number(of.means[name]) if name in of.means else "" for of in evaluation.weights.values()]
        row = EvaluationRow(name, colour.get(name, "ink"), name in evaluation.held_out_rewards, means)
        difference = evaluation.differences.get(name)
        rows.append(row if difference is None else _with_difference(row, difference))
    return rows


def _with_difference(row: EvaluationRow, difference: Interval) -> EvaluationRow:
    verdict = "no clear change" if not difference.significant else "up" if difference.sign > 0 else "down"
    return replace(
        row,
        difference=number(difference.mean, signed=True),
        interval=interval(difference),
        mark=interval_mark(difference, row.colour),
        verdict=verdict,
    )
