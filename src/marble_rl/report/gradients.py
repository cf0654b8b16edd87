"""Sections on what a diagnosis measured: how directions serve the rewards, how rewards agree, and who teaches what."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean

from marble_rl.charts.drawing import Line, Reference
from marble_rl.diagnose.intervals import few
from marble_rl.diagnose.record import Diagnosis
from marble_rl.intervals import Interval
from marble_rl.report.charts import Chart, forest, line_chart, matrix
from marble_rl.report.evaluation import gains_by_source
from marble_rl.report.run_data import RunData
from marble_rl.report.sections import Section, Table, colours
from marble_rl.report.wording import number, shortened

COMMAND = "marble diagnose RUN"
KNOWN = {"weighted_sum": "theirs", "uniform": "r8", "marble": "ours"}
"""Directions that have their own colour; the others are drawn in that of text."""


def diagnosis(run: RunData) -> Section:
    measured = run.diagnosis
    why = (
        f"Not diagnosed. {COMMAND} measures gradients on fresh batches: conflict rates, cosines between rewards, "
        "signal by batch size, and which prompt sources teach which reward."
    )
    if measured is None:
        return Section("diagnosis", "Diagnosis", "", [], why)
    when = "" if measured.step is None else f" after step {measured.step}"
    text = (
        f"{few(measured.batches)} One gradient per reward from each of {measured.batches} fresh batches of "
        f"{measured.images} images, none of them trained on, drawn by the policy{when}. Each way to combine the "
        "rewards is measured with the gradients of its own batch, where a reward's noise counts as agreement with "
        "itself, and with those of another batch, which is what counts. Whiskers: 95 % intervals. "
        f"{_min_norm_length(measured)}"
    )
    charts = [
        *_forests(measured),
        *_larger(measured),
        _cosines(measured),
        *_correlations(measured),
        *_signal(run, measured),
    ]
    return Section("diagnosis", "Diagnosis", text.strip(), charts, table=_table(measured))


def _min_norm_length(measured: Diagnosis) -> str:
    k, qp = len(measured.names), measured.qp
    return (
        f"The min-norm point of a batch's unit gradients has a length of {number(fmean(qp.norm))} on average: the "
        f"cosine that it guarantees every reward in its own batch (unrelated gradients have 1/√{k} = "
        f"{number(1 / math.sqrt(k))}). In {100 * qp.near_zero:.0f} % of the batches it is below 0.05: they have next "
        "to no common direction."
    )


def _forests(measured: Diagnosis) -> list[Chart]:
    """Another batch first: it is the figure that counts."""
    wanted = (
        ("Another batch: worst cosine", "independent", "min_cos", "Above 0 every reward gains; noise lies below."),
        ("Own batch: worst cosine", "in_batch", "min_cos", "The paper's figure; pure noise gives 1/√K."),
        ("Another batch: conflict rate", "independent", "conflict", "How often at least one reward is worked against."),
        ("Own batch: conflict rate", "in_batch", "conflict", "0 by construction for the min-norm point."),
    )
    charts = []
    for title, way, key, note in wanted:
        rows = [
            (name, getattr(direction, way)[key], KNOWN.get(name, "ink"))
            for name, direction in measured.directions.items()
            if key in getattr(direction, way)
        ]
        if rows:
            charts.append(forest(title, rows, small=False, note=note))
    return charts


def _larger(measured: Diagnosis) -> list[Chart]:
    """Only those with their own colour: the curves of all ten directions would hide each other."""
    lines = []
    for name in measured.directions:
        by_size = measured.by_size(name)
        if name in KNOWN and len(by_size) > 1:
            x = [math.log2(size) for size in by_size]
            y = [figure.mean for figure in by_size.values()]
            band = [(figure.low, figure.high) for figure in by_size.values()]
            lines.append(Line(name, x, y, KNOWN[name], name, band=band))
    if not lines:
        return []
    note = (
        "Worst cosine of directions made from larger batches, with the mean gradient of all images left over. Above 0 "
        "the batch is large enough for the direction to serve every reward in truth."
    )
    sizes = _sizes(size for name in measured.directions for size in measured.by_size(name))
    title = "Worst cosine by batch size"
    return [line_chart(title, lines, include=[0.0], x_label="batch size", x_names=sizes, note=note)]


def _sizes(sizes: Iterable[float]) -> dict[float, str]:
    """Relative to the run's. Each doubling takes the same room."""
    return {math.log2(size): f"x{size:g}" for size in sizes}


def _table(measured: Diagnosis) -> Table:
    columns = ["direction", "another batch", "conflict there", "own batch", "conflict there", "AdamW's step"]
    rows = []
    for name, direction in measured.directions.items():
        figures = [
            direction.independent.get("min_cos"),
            direction.independent.get("conflict"),
            direction.in_batch.get("min_cos"),
            direction.in_batch.get("conflict"),
            measured.applied[name].min_cos if name in measured.applied else None,
        ]
        rows.append((name, measured.meanings.get(name, ""), KNOWN.get(name, "ink"), [_written(f) for f in figures]))
    about = (
        "Smallest cosine with a reward's gradient with its interval, and how often it is negative. Last column: "
        "of the step that AdamW would take, in another batch."
    )
    return Table(columns, rows, about)


def _written(figure: Interval | None) -> str:
    if figure is None:
        return ""
    interval = f" ({number(figure.low)} to {number(figure.high)})" if figure.low < figure.high else ""
    return number(figure.mean) + interval


def _cosines(measured: Diagnosis) -> Chart:
    note = (
        "Of their true gradients, from products of different batches. Below 0 two rewards oppose each other. With "
        "little signal they are rough and can leave ±1; ? where a gradient is lost in noise."
    )
    return matrix("Cosines between rewards", measured.names, measured.names, measured.cosines, note=note)


def _correlations(measured: Diagnosis) -> list[Chart]:
    facts = measured.advantages
    if facts is None or not facts.correlations:
        return []
    agreement = ""
    if facts.agreement is not None:
        agreement = (
            f" Within one batch the cosines between gradients follow these to {_written(facts.agreement)}; at 1 "
            "gradients say nothing that the scores of its images do not."
        )
    note = f"Of the images in a batch: do two rewards prefer the same ones?{agreement}"
    return [matrix("Correlations of advantages", measured.names, measured.names, facts.correlations, note=note)]


def _signal(run: RunData, measured: Diagnosis) -> list[Chart]:
    colour = colours(run)
    lines = []
    for k, name in enumerate(measured.names):
        known = [(math.log2(size), row[k]) for size, row in measured.signal.items()]
        points = [(x, y) for x, y in known if y is not None]
        if points:
            x, y = zip(*points, strict=True)
            # The smallest batch has the sign of the estimate |mu|^2; below 0 the others mean nothing.
            drawn = y if y[0] > 0 else [0.0] * len(y)
            lines.append(Line(name, x, drawn, colour.get(name, "ink"), shortened(name, 14)))
    if not lines:
        return []
    note = (
        "Share of a reward's squared gradient that is not noise, for batches of other sizes than the run's. A reward "
        "stands at 0 where its estimate is not positive: in these batches it cannot be distinguished from noise."
    )
    return [
        line_chart(
            "Signal by batch size",
            lines,
            references=[Reference(0.1, "too little to learn from")],
            include=[0.0],
            x_label="batch size",
            x_names=_sizes(measured.signal),
            note=note,
        )
    ]


def specialists(run: RunData) -> Section:
    """From the diagnosis and the evaluation, whichever there is."""
    text = (
        "Rewards need not concern every prompt. Which prompt sources teach which reward, and where each of them "
        "gained. An empty place: the reward does not apply."
    )
    charts = []
    if run.diagnosis is not None and run.diagnosis.samples:
        charts.append(_mean_sizes(run.diagnosis))
    gains = {} if run.evaluation is None else gains_by_source(run.evaluation)
    if gains:
        rewards = [name for name in (*run.trained, *run.held_out) if any(name in row for row in gains.values())]
        cells = [[row.get(name) for name in rewards] for row in gains.values()]
        note = (
            "On the evaluated prompts, last weights against first, in units of the first scores' spread over prompts."
        )
        if rewards:
            charts.append(matrix("Gain by prompt source", list(gains), rewards, cells, unknown="", note=note))
    why = (
        "Nothing is known yet on which prompts teach which reward. marble evaluate RUN shows where each reward gained, "
        f"{COMMAND} which prompts teach it."
    )
    return Section("specialists", "Specialists", text, charts, why)


def _mean_sizes(measured: Diagnosis) -> Chart:
    sources = list(dict.fromkeys(sample.source for sample in measured.samples))
    cells: list[list[float | None]] = []
    for source in sources:
        columns = zip(*(sample.advantages for sample in measured.samples if sample.source == source), strict=True)
        known = [[abs(value) for value in column if value is not None] for column in columns]
        cells.append([fmean(sizes) if sizes else None for sizes in known])
    note = "Mean size in one batch: near 0, the prompts of this source teach the reward nothing."
    return matrix("Advantages by prompt source", sources, measured.names, cells, signed=False, unknown="", note=note)
