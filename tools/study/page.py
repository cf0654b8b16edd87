"""The pages of results: their templates have the words, this file the numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from marble_rl.compare.methods import ABLATIONS, BASE, VARIANTS
from marble_rl.compare.shares import MEAN, WORST
from marble_rl.compare.statistics import COMPOSITE
from marble_rl.compare.table import Comparison, decided
from marble_rl.compare.writing import markdown_tables, notes
from marble_rl.diagnose.record import Diagnosis, DirectionFigures
from marble_rl.report.wording import number
from tools.study.claims import (
    PAPER,
    UNSCALED,
    judge_paper,
    shown_difference,
    shown_interval,
)
from tools.study.findings import Study, Whole
from tools.study.guards import HEADS, rows
from tools.study.registered import PARTS, Judged, judge
from tools.study.trials import TRIALS
from tools.study.variants import REMOVED, judge_ours, with_note

DIRECTIONS = (
    "weighted_sum",
    "uniform",
    "marble",
    "min_variance",
    "alpha_over_norm",
    "marble_adam_metric",
    "noise_aware",
)
"""Of a diagnosis, those that its table shows; `marble_adam_metric` and `noise_aware` were removed since."""

BEGINNING = "beginning"
"""The diagnosis of a run that has only begun: what policies are like before a method has led them anywhere."""
MERGED = 8
"""Merged mini-batches in the summary: as many images as the paper's batch, nearly."""


def results_page(whole: Whole) -> str:
    """docs/results.md"""
    jobs = [result for part in whole.every for result in part.results]
    return _rendered(
        "results.md.j2",
        parts=_registered(whole),
        guarded=whole.guarded,
        guard_heads=HEADS,
        guard_rows=rows(whole.guarded) if whole.guarded and not whole.guarded.missing else [],
        counts=_counts(judge_paper(whole.study)),
        jobs=sum(result.method != BASE for result in jobs),
        minutes=sum(result.train_seconds + result.evaluate_seconds for result in jobs) / 60,
        worst=WORST,
        mean=MEAN,
        trials={name: (TRIALS[name].about, sentences) for name, sentences in whole.trials.items()},
    )


def _registered(whole: Whole) -> dict[str, Judged]:
    """By name, the parts of the plan of which there are results."""
    studies = {"A": whole.rare, "E": whole.closely, "B": whole.study, "C": whole.many}
    alone = [] if whole.rare is None else whole.rare.results
    return {name: judge(study.results, PARTS[name], alone) for name, study in studies.items() if study is not None}


def paper_page(whole: Whole) -> str:
    """docs/results/paper.md"""
    study, conflict, large = whole.study, whole.conflict, whole.large
    paper, diagnoses = judge_paper(study), _diagnoses(whole)
    return _rendered(
        "paper.md.j2",
        conflict=conflict is not None,
        paper=paper,
        ours=judge_ours(study),
        counts=_counts(paper),
        diagnoses=diagnoses,
        beginning=_named(diagnoses, f"`{BEGINNING}`"),
        opposed=_named(diagnoses, _opposed(BEGINNING)),
        merged=MERGED,
        unscaled=UNSCALED,
        apart=_apart(study),
        versus=partial(_versus, study),
        versus_large=partial(_versus, large),
        versus_conflict=partial(_versus, conflict),
    )


def _counts(judged: Sequence[dict[str, str]]) -> Counter[str]:
    """How many of the paper's claims have which verdict."""
    return Counter(of["verdict"] for claim, of in zip(PAPER, judged, strict=True) if not claim.ours)


def tables_page(whole: Whole) -> str:
    """docs/results/tables.md"""
    study, conflict, large = whole.study, whole.conflict, whole.large
    return _rendered(
        "tables.md.j2",
        tables=_tables(study.table),
        notes=notes(study.table),
        changes=_changes(study),
        conflict=None if conflict is None else _changes(conflict),
        conflict_differences=None if conflict is None else _differences(conflict.table),
        conflict_notes=[] if conflict is None else notes(conflict.table),
        large_tables=[] if large is None else _tables(large.table)[:2],
        large_notes=[] if large is None else notes(large.table),
        others={
            PARTS[name].about.capitalize(): (_tables(part.table), notes(part.table))
            for name, part in (("A", whole.rare), ("E", whole.closely), ("C", whole.many))
            if part is not None
        },
        longest=max((r.train_seconds + r.evaluate_seconds) / 60 for part in whole.every for r in part.results),
        versions=study.table.versions,
    )


def _apart(study: Study) -> list[str]:
    """Ablations and variants that differ from MARBLE beyond their intervals."""
    names = [name for name in (*ABLATIONS, *VARIANTS, *REMOVED) if study.has(name, "marble")]
    return [f"`{name}`" for name in names if decided(study.difference(name, "marble"), COMPOSITE)]


def gradients_page(whole: Whole) -> str:
    """docs/results/gradients.md"""
    return _rendered("gradients.md.j2", diagnoses=_diagnoses(whole))


def _versus(study: Study | None, method: str, other: str, column: str = COMPOSITE) -> str:
    """Difference of the composites, or of a reward; empty where there are not two common seeds, or no composite."""
    if study is None or not study.has(method, other):
        return ""
    differences = study.difference(method, other)
    if column not in differences:
        return ""
    text = shown_difference(differences[column], marked=decided(differences, column))
    return f"{text.removesuffix(')')}; {differences[column].n} seeds)"


def _rendered(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("tools.study"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"interval": shown_interval, "number": _shown_number, "both": _both, "each_of": _each}
    environment.filters |= {"shares": _coefficients}
    return environment.get_template(template).render(**values)


def _tables(comparison: Comparison) -> list[tuple[str, str]]:
    """(title, table) of each, with a note at the methods that were removed since."""
    rows = [replace(row, method=with_note(row.method)) for row in comparison.rows]
    return markdown_tables(comparison.model_copy(update={"rows": rows}))


def _changes(study: Study) -> str:
    """Table of the differences to the base model; nothing where it was not run, or nothing else."""
    if not any(result.method == BASE for result in study.results):
        return ""
    return _differences(study.against(BASE))


def _differences(comparison: Comparison) -> str:
    """The table of differences to what is compared with; nothing where there is none."""
    return next((table for title, table in _tables(comparison) if title.startswith("Difference")), "")


@dataclass(frozen=True)
class ShownDiagnosis:
    """A diagnosis with its heading."""

    name: str
    record: Diagnosis

    @property
    def directions(self) -> dict[str, DirectionFigures]:
        return {name: self.record.directions[name] for name in DIRECTIONS if name in self.record.directions}

    @property
    def by_size(self) -> dict[int, dict[str, DirectionFigures]]:
        return {1: self.record.directions, **self.record.larger}

    @property
    def qp_norm(self) -> float:
        return fmean(self.record.qp.norm)


def _diagnoses(whole: Whole) -> list[ShownDiagnosis]:
    """Those with the opposing reward last."""
    plain = [ShownDiagnosis(f"`{name}`", record) for name, record in whole.study.diagnoses.items()]
    opposed = {} if whole.conflict is None else whole.conflict.diagnoses
    return [*plain, *(ShownDiagnosis(_opposed(name), record) for name, record in opposed.items())]


def _named(diagnoses: Sequence[ShownDiagnosis], name: str) -> ShownDiagnosis | None:
    return next((shown for shown in diagnoses if shown.name == name), None)


def _opposed(name: str) -> str:
    return f"`{name}` with the opposing reward"


def _both(shown: ShownDiagnosis, against: str, size: int = 1) -> str:
    """Worst cosine and conflict rate of the weighted sum and of MARBLE; empty where there are too few mini-batches."""
    if size not in shown.by_size:
        return ""
    figures = [getattr(shown.by_size[size][name], against) for name in ("weighted_sum", "marble")]
    return " -> ".join(f"{f['min_cos'].mean:+.2f} ({f['conflict'].mean:.2f})" for f in figures)


def _each(shown: ShownDiagnosis, direction: str) -> list[float]:
    """Cosines of a direction with each reward's gradient, on images that it was not made from; NaN where unknown."""
    return [math.nan if cosine is None else cosine.mean for cosine in shown.record.directions[direction].each]


def _coefficients(shown: ShownDiagnosis, reward: str) -> str:
    facts = shown.record.advantages
    if reward not in shown.record.names or facts is None:
        return ""
    k = shown.record.names.index(reward)
    alphas = (facts.alpha[k], facts.alpha_of_advantages[k])
    gradients, advantages = ("?" if alpha is None else f"{alpha.mean:.2f}" for alpha in alphas)
    return f"{gradients} ({advantages})"


def _shown_number(value: float | None) -> str:
    """`?` for what is lost in noise."""
    return "?" if value is None else number(value)
