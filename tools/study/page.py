"""docs/results.md from the study's results: the template has the words, everything that is a number comes from here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from marble_rl.compare.methods import ABLATIONS, VARIANTS
from marble_rl.compare.report import markdown_table, markdown_tables, notes
from marble_rl.compare.statistics import COMPOSITE
from marble_rl.compare.table import Comparison
from marble_rl.report.wording import number
from tools.study.claims import PAPER, UNSCALED, difference_told, estimate, judge_ours, judge_paper
from tools.study.findings import BASE, Study, Whole

DIRECTIONS = (
    "weighted_sum",
    "uniform",
    "marble",
    "min_variance",
    "alpha_over_norm",
    "marble_adam_metric",
    "noise_aware",
)
"""Of a diagnosis, those that its table shows."""

BEGINNING = "beginning"
"""The diagnosis of a run that has only begun: what policies are like before a method has led them anywhere."""
MERGED = 8
"""Merged mini-batches in the summary: as many images as the paper's batch, nearly."""


def results_page(whole: Whole) -> str:
    """docs/results.md"""
    study, conflict, large = whole.study, whole.conflict, whole.large
    paper, diagnoses = judge_paper(study), _diagnoses(whole)
    return _rendered(
        "results.md.j2",
        tables=markdown_tables(study.table),
        notes=notes(study.table),
        changes=_changes(study),
        shares=_shares(study),
        conflict=None if conflict is None else _changes(conflict),
        conflict_differences=None if conflict is None else _differences(conflict.table),
        conflict_notes=[] if conflict is None else notes(conflict.table),
        large_tables=[] if large is None else markdown_tables(large.table)[:2],
        large_notes=[] if large is None else notes(large.table),
        paper=paper,
        ours=judge_ours(study),
        counts=Counter(judged["verdict"] for claim, judged in zip(PAPER, paper, strict=True) if not claim.ours),
        jobs=sum(len(part.results) for part in whole.every),
        minutes=sum(r.train_seconds + r.evaluate_seconds for part in whole.every for r in part.results) / 60,
        longest=max((r.train_seconds + r.evaluate_seconds) / 60 for part in whole.every for r in part.results),
        versions=study.table.versions,
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


def _apart(study: Study) -> list[str]:
    """Ablations and variants that differ from MARBLE beyond their intervals."""
    names = [name for name in (*ABLATIONS, *VARIANTS) if study.has(name, "marble")]
    return [f"`{name}`" for name in names if study.difference(name, "marble")[COMPOSITE].significant]


def gradients_page(whole: Whole) -> str:
    """docs/results/gradients.md"""
    return _rendered("gradients.md.j2", diagnoses=_diagnoses(whole))


def _versus(study: Study | None, method: str, other: str, column: str = COMPOSITE) -> str:
    """Difference of the composites, or of a reward; empty where there are not two common seeds."""
    if study is None or not study.has(method, other):
        return ""
    found = study.difference(method, other)[column]
    return f"{difference_told(found).removesuffix(')')}; {found.n} seeds)"


def _rendered(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("tools.study"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"estimate": estimate, "number": _told, "both": _both, "shares": _coefficients}
    environment.filters |= {"each_of": _each}
    return environment.get_template(template).render(**values)


def _changes(study: Study) -> str:
    """Table of the differences to the base model; nothing where it was not run, or nothing else."""
    if not any(result.method == BASE for result in study.results):
        return ""
    return _differences(study.against(BASE))


def _differences(comparison: Comparison) -> str:
    """The table of differences to what is compared with; nothing where there is none."""
    return next((table for title, table in markdown_tables(comparison) if title.startswith("Difference")), "")


def _shares(study: Study) -> str:
    """Table of the gains in units of the specialists'; nothing where there are no specialists. The smallest is bold."""
    body = []
    joint = [row for row in study.table.rows if row.method != BASE and not row.method.startswith("only-")]
    for row in joint:
        shares = {reward: study.share(row.method, reward) for reward in study.trained}
        known = {reward: share for reward, share in shares.items() if share is not None}
        if not known:
            continue
        least = min(known, key=lambda reward: known[reward].mean)
        cells = []
        for reward, share in shares.items():
            text = "" if share is None else f"{share.mean:.2f} ±{share.half_width:.2f}"
            cells.append(f"**{text}**" if reward == least else text)
        body.append([row.method, str(known[least].n), *cells])
    return markdown_table(["method", "n", *study.trained], body) if body else ""


def _diagnoses(whole: Whole) -> list[dict[str, Any]]:
    """Those with the opposing reward last."""
    plain = [_diagnosis(f"`{name}`", found) for name, found in whole.study.diagnoses.items()]
    opposed = {} if whole.conflict is None else whole.conflict.diagnoses
    return [*plain, *(_diagnosis(_opposed(name), found) for name, found in opposed.items())]


def _named(diagnoses: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((found for found in diagnoses if found["name"] == name), None)


def _opposed(name: str) -> str:
    return f"`{name}` with the opposing reward"


def _both(diagnosis: Mapping[str, Any], against: str, size: int = 1) -> str:
    """Worst cosine and conflict rate of the weighted sum and of MARBLE; empty where there are too few mini-batches."""
    directions = diagnosis["by_size"].get(size)
    if directions is None:
        return ""
    figures = [directions[name][against] for name in ("weighted_sum", "marble")]
    return " -> ".join(f"{f['min_cos']['mean']:+.2f} ({f['conflict']['mean']:.2f})" for f in figures)


def _each(diagnosis: Mapping[str, Any], direction: str) -> list[float]:
    """Cosines of a direction with each reward's gradient, on images that it was not made of; NaN of silent rewards."""
    return [math.nan if found is None else found["mean"] for found in diagnosis["directions"][direction]["each"]]


def _coefficients(diagnosis: Mapping[str, Any], reward: str) -> str:
    if reward not in diagnosis["names"]:
        return ""
    k, facts = diagnosis["names"].index(reward), diagnosis["advantages"]
    return f"{facts['alpha'][k]['mean']:.2f} ({facts['alpha_of_advantages'][k]['mean']:.2f})"


def _diagnosis(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "by_size": {1: found["directions"]} | {int(size): of for size, of in found["larger"].items()},
        "qp_norm": fmean(found["qp"]["norm"]),
        "near_zero": found["qp"]["near_zero"],
        **{key: found[key] for key in ("batches", "images", "step", "names", "signal", "cosines", "advantages")},
        "directions": {d: found["directions"][d] for d in DIRECTIONS if d in found["directions"]},
        "applied": {d: found["applied"][d] for d in DIRECTIONS if d in found["applied"]},
    }


def _told(value: float | None) -> str:
    """`?` for what cannot be told from noise."""
    return "?" if value is None else number(value)
