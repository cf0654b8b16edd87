"""docs/results.md from the study's results: the template has the words, everything that is a number comes from here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from marble_rl.compare.report import markdown_tables, notes
from marble_rl.report.wording import number
from marble_rl.study.claims import estimate, judge_ours, judge_paper
from marble_rl.study.findings import Study

BASE = "base"
DIRECTIONS = ("weighted_sum", "uniform", "marble", "alpha_over_norm", "marble_adam_metric", "mean_gram", "noise_aware")
"""Of a diagnosis, those that its table shows."""


def results_page(study: Study, conflict: Study | None) -> str:
    environment = Environment(
        loader=PackageLoader("marble_rl.study"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"estimate": estimate, "number": _told}
    paper = judge_paper(study)
    return environment.get_template("results.md.j2").render(
        tables=markdown_tables(study.table),
        notes=notes(study.table),
        changes=_changes(study),
        conflict=None if conflict is None else _changes(conflict),
        conflict_notes=[] if conflict is None else notes(conflict.table),
        paper=paper,
        ours=judge_ours(study),
        counts=Counter(judged["verdict"] for judged in paper),
        jobs=len(study.results),
        minutes=sum(r.train_seconds + r.evaluate_seconds for r in study.results) / 60,
        longest=max((r.train_seconds + r.evaluate_seconds) / 60 for r in study.results),
        versions=study.table.versions,
        diagnoses=[_diagnosis(name, found) for name, found in study.diagnoses.items()],
    )


def _changes(study: Study) -> str:
    """Table of the differences to the base model; nothing where it was not run, or nothing else."""
    if not any(result.method == BASE for result in study.results):
        return ""
    tables = markdown_tables(study.against(BASE))
    return next((table for title, table in tables if title.startswith("Difference")), "")


def _diagnosis(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "qp_norm": fmean(found["qp"]["norm"]),
        "near_zero": found["qp"]["near_zero"],
        **{key: found[key] for key in ("batches", "images", "step", "names", "signal", "cosines")},
        "directions": {d: found["directions"][d] for d in DIRECTIONS if d in found["directions"]},
        "applied": {d: found["applied"][d] for d in DIRECTIONS if d in found["applied"]},
    }


def _told(value: float | None) -> str:
    """`?` for what cannot be told from noise."""
    return "?" if value is None else number(value)
