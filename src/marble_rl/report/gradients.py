"""Sections on what a diagnosis found: how directions serve the rewards, how rewards agree, and who teaches what."""

from __future__ import annotations

import math
from statistics import fmean

from marble_rl.diagnose.intervals import few
from marble_rl.intervals import Difference
from marble_rl.report.charts import Chart, Line, Reference, forest, line_chart
from marble_rl.report.diagnosis import StoredDiagnosis
from marble_rl.report.grids import histogram, matrix, sample_map
from marble_rl.report.reading import RunData
from marble_rl.report.sections import Section, Table, colours
from marble_rl.report.wording import number, shortened

COMMAND = "marble diagnose RUN"
MOST_SAMPLES = 400
"""In the map: it is no wider in dots, and each takes a hundred bytes of the page for every reward."""
KNOWN = {"weighted_sum": "theirs", "uniform": "r8", "marble": "ours"}
"""Directions with a colour of their own; the others are drawn in that of text."""


def diagnosis(run: RunData) -> Section:
    found = run.diagnosis
    why = (
        f"Not diagnosed. {COMMAND} measures gradients on fresh batches: conflict rates, cosines between rewards, "
        "signal by batch size, and which samples teach which reward."
    )
    if found is None:
        return Section("diagnosis", "Diagnosis", "", [], why)
    when = "" if found.step is None else f" after step {found.step}"
    text = (
        f"{few(found.batches)} One gradient per reward from each of {found.batches} fresh batches of {found.images} "
        f"images, none of them trained on, drawn by the policy{when}. Each way to combine the rewards is measured with "
        "the gradients of its own batch, where a reward's noise counts as agreement with itself, and with those of "
        "another batch, which is what counts. Whiskers: 95 % intervals."
    )
    charts = [
        *_forests(found),
        *_larger(found),
        _cosines(found),
        *_correlations(found),
        *_signal(run, found),
        _norms(found),
        _lengths(found),
        *_constructed(found),
    ]
    return Section("diagnosis", "Diagnosis", text.strip(), charts, table=_table(found))


def _forests(found: StoredDiagnosis) -> list[Chart]:
    """Another batch first: it is the figure that counts."""
    wanted = (
        ("Another batch: worst cosine", "other", "min_cos", "Above 0 every reward gains; noise lies below."),
        ("Own batch: worst cosine", "own", "min_cos", "The paper's figure; pure noise gives 1/√K."),
        ("Another batch: conflict rate", "other", "conflict", "How often at least one reward is worked against."),
        ("Own batch: conflict rate", "own", "conflict", "0 by construction for the min-norm point."),
    )
    charts = []
    for title, way, key, note in wanted:
        rows = [
            (direction.name, getattr(direction, way)[key], KNOWN.get(direction.name, "ink"))
            for direction in found.directions
            if key in getattr(direction, way)
        ]
        if rows:
            charts.append(forest(title, rows, width=460.0, note=note))
    return charts


def _larger(found: StoredDiagnosis) -> list[Chart]:
    """Only those with a colour of their own: ten lines on top of each other tell nothing."""
    lines = []
    for direction in found.directions:
        if direction.name in KNOWN and len(direction.by_size) > 1:
            x = [math.log2(size) for size in direction.by_size]
            y = [figure.mean for figure in direction.by_size.values()]
            band = [(figure.low, figure.high) for figure in direction.by_size.values()]
            lines.append(Line(direction.name, x, y, KNOWN[direction.name], direction.name, band=band))
    if not lines:
        return []
    places = {math.log2(size): f"x{size}" for direction in found.directions for size in direction.by_size}
    note = (
        "Worst cosine of directions made from larger batches, with the mean gradient of all images left over. Above 0 "
        "the batch is large enough for the direction to serve every reward in truth."
    )
    chart = line_chart("Worst cosine by batch size", lines, include=[0.0], places=places, unit="batch", note=note)
    return [chart]


def _table(found: StoredDiagnosis) -> Table:
    columns = ["direction", "another batch", "conflict there", "own batch", "conflict there", "AdamW's step"]
    rows = []
    for direction in found.directions:
        figures = [
            direction.other.get("min_cos"),
            direction.other.get("conflict"),
            direction.own.get("min_cos"),
            direction.own.get("conflict"),
            direction.step,
        ]
        rows.append((direction.name, direction.meaning, KNOWN.get(direction.name, "ink"), [_told(f) for f in figures]))
    about = (
        "Smallest cosine with a reward's gradient with its interval, and how often it is negative. Last column: "
        "of the step that AdamW would take, in another batch."
    )
    return Table(columns, rows, about)


def _told(figure: Difference | None) -> str:
    if figure is None:
        return ""
    interval = f" ({number(figure.low)} to {number(figure.high)})" if figure.low < figure.high else ""
    return number(figure.mean) + interval


def _cosines(found: StoredDiagnosis) -> Chart:
    note = (
        "Of their true gradients, from products of different batches. Below 0 two rewards oppose each other. With "
        "little signal they are rough and can leave ±1; ? where a gradient is lost in noise."
    )
    return matrix("Cosines between rewards", found.rewards, found.rewards, found.cosines, note=note)


def _correlations(found: StoredDiagnosis) -> list[Chart]:
    if not found.correlations:
        return []
    agreement = ""
    if found.agreement is not None:
        agreement = (
            f" Within one batch the cosines between gradients follow these to {number(found.agreement.mean)} "
            f"({number(found.agreement.low)} to {number(found.agreement.high)}); at 1 gradients tell nothing that "
            "the scores of its images do not."
        )
    note = f"Of the images in a batch: do two rewards prefer the same ones?{agreement}"
    return [matrix("Correlations of advantages", found.rewards, found.rewards, found.correlations, note=note)]


def _signal(run: RunData, found: StoredDiagnosis) -> list[Chart]:
    colour = colours(run)
    lines = []
    for k, name in enumerate(found.rewards):
        known = [(math.log2(size), row[k]) for size, row in found.signal.items()]
        points = [(x, y) for x, y in known if y is not None]
        if points:
            x, y = zip(*points, strict=True)
            # The smallest batch has the sign of the estimate |mu|^2; below 0 the others mean nothing.
            drawn = y if y[0] > 0 else [0.0] * len(y)
            lines.append(Line(name, x, drawn, colour.get(name, "ink"), shortened(name, 14)))
    if not lines:
        return []
    places = {math.log2(size): f"x{size:g}" for size in found.signal}
    note = (
        "Share of a reward's squared gradient that is not noise, for batches of other sizes than the run's. A reward "
        "stands at 0 where its estimate is not positive: these batches cannot tell it from noise."
    )
    references = [Reference(0.1, "too little to learn from")]
    chart = line_chart(
        "Signal by batch size", lines, references=references, include=[0.0], places=places, unit="batch", note=note
    )
    return [chart]


def _norms(found: StoredDiagnosis) -> Chart:
    k = len(found.rewards)
    return histogram(
        "Length of the common direction",
        found.norms,
        reference=Reference(1 / math.sqrt(k), f"1/√{k}: unrelated gradients"),
        note="Over batches: the cosine that the min-norm point of unit gradients guarantees in its own batch.",
        summary=f"{100 * found.near_zero:.0f} % below 0.05",
    )


def _lengths(found: StoredDiagnosis) -> Chart:
    return histogram(
        "Length of the combined gradient",
        found.combined,
        note="Over batches, in units of the rewards' mean gradient length. Short: little is left to agree on.",
        summary=f"mean {number(fmean(found.combined))}",
    )


def _constructed(found: StoredDiagnosis) -> list[Chart]:
    if len(found.conflict) < 2 or len(found.rewards) < 2:
        return []
    strength, ours, theirs = (list(column) for column in zip(*found.conflict, strict=True))
    lines = [
        Line("marble", strength, ours, "ours", "marble"),
        Line("plain sum", strength, theirs, "theirs", "plain sum", "dashed"),
    ]
    note = f"Worst cosine in the own batch while {found.rewards[1]}'s gradient is turned against {found.rewards[0]}'s."
    places = {value: f"{100 * value:.0f} %" for value in strength}
    title = "A constructed conflict"
    return [line_chart(title, lines, include=[0.0], places=places, unit="turned", note=note)]


def specialists(run: RunData) -> Section:
    """From the diagnosis and the evaluation, whichever there is."""
    text = (
        "Rewards need not concern every prompt. Which samples teach which reward, and where each of them gained, by "
        "prompt source. An empty place: the reward does not apply."
    )
    charts = []
    found = run.diagnosis
    if found is not None and found.samples:
        every = math.ceil(len(found.samples) / MOST_SAMPLES)
        which = "Every sample" if every == 1 else f"One sample in {every}"
        note = f"{which} of one batch. Blue: better than its group's mean, red: worse. Deeper: by more."
        charts.append(sample_map("Advantages of samples", found.rewards, found.samples[::every], note=note))
        charts.append(_mean_sizes(found))
    gains = {} if run.evaluation is None else run.evaluation.gains
    if gains:
        rewards = [name for name in (*run.trained, *run.held_out) if any(name in row for row in gains.values())]
        cells = [[row.get(name) for name in rewards] for row in gains.values()]
        note = (
            "On the evaluated prompts, last weights against first, in units of the first scores' spread over prompts."
        )
        if rewards:
            charts.append(matrix("Gain by prompt source", list(gains), rewards, cells, unknown="", note=note))
    why = (
        "Nothing is known yet on which prompts teach which reward. marble evaluate RUN tells where each reward gained, "
        f"{COMMAND} which samples teach it."
    )
    return Section("specialists", "Specialists", text, charts, why)


def _mean_sizes(found: StoredDiagnosis) -> Chart:
    sources = list(dict.fromkeys(source for source, _, _ in found.samples))
    cells: list[list[float | None]] = []
    for source in sources:
        columns = zip(*(values for of, _, values in found.samples if of == source), strict=True)
        told = [[abs(value) for value in column if value is not None] for column in columns]
        cells.append([fmean(sizes) if sizes else None for sizes in told])
    note = "Their mean size: near 0, the prompts of this source tell the reward nothing."
    return matrix("Advantages by prompt source", sources, found.rewards, cells, signed=False, unknown="", note=note)
