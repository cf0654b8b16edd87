"""The table of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from markupsafe import Markup

from marble_rl.intervals import Difference
from marble_rl.report.charts import interval_mark
from marble_rl.report.reading import RunData
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
    for name in dict.fromkeys(name for means in evaluation.means.values() for name in means):
        means = [number(means[name]) if name in means else "" for means in evaluation.means.values()]
        row = EvaluationRow(name, colour.get(name, "ink"), name in evaluation.held_out, means)
        found = evaluation.differences.get(name)
        rows.append(row if found is None else _with_difference(row, found))
    return rows


def _with_difference(row: EvaluationRow, found: Difference) -> EvaluationRow:
    verdict = "no clear change" if not found.significant else "up" if found.mean > 0 else "down"
    return replace(
        row,
        difference=number(found.mean, signed=True),
        interval=interval(found),
        mark=interval_mark(found, row.colour),
        verdict=verdict,
    )
