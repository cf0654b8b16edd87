"""The charts of a run's page, section by section. A section without data has no charts and says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from marble_rl.balancing.registry import RULES
from marble_rl.charts.drawing import Line, Reference
from marble_rl.charts.style import PALETTE
from marble_rl.report.charts import Chart, line_chart
from marble_rl.report.run_data import RunData, Series
from marble_rl.report.statistics import smooth, thinned
from marble_rl.report.wording import number, shortened


@dataclass(frozen=True)
class Table:
    """Figures with a name, what it means and its colour before each row."""

    columns: list[str]
    rows: list[tuple[str, str, str, list[str]]]
    about: str


@dataclass(frozen=True)
class Section:
    """Charts with what they mean."""

    id: str
    title: str
    text: str
    charts: list[Chart] = field(default_factory=list)
    missing: str = ""
    """Why there are no charts"""
    more: str = ""
    """An explanation to unfold"""
    table: Table | None = None
    """Below the charts"""


def colours(run: RunData) -> dict[str, str]:
    """A class for each reward, the same on the whole page."""
    return {name: f"r{i % PALETTE}" for i, name in enumerate((*run.trained, *run.held_out))}


def reward_curves(run: RunData) -> Section:
    text = (
        "The mean score of every step's images. Dots: single steps, which scatter since their prompts differ. "
        "Line: smoothed, with its 95 % interval. Rings: evaluations during training."
    )
    colour = colours(run)
    charts = []
    for name in (*run.trained, *run.held_out):
        measured = run.series(f"reward/{name}") or run.series(f"watch/{name}")
        evaluated = run.series(f"eval/{name}")
        lines = _raw_and_smooth(measured, colour[name])
        if evaluated:
            lines.append(Line("evaluated", *thinned(evaluated.steps, evaluated.values), colour[name], style="rings"))
        if lines:
            shown = next((line for line in lines if line.name == "smoothed"), lines[0])
            charts.append(
                line_chart(
                    f"{name} (held out)" if name in run.held_out else name,
                    lines,
                    include=_room(shown.y),
                    x_ends=(1, run.steps_done),
                    small=True,
                    colour=colour[name],
                    summary=" → ".join(number(v) for v in dict.fromkeys((shown.y[0], shown.y[-1]))),
                )
            )
    score = run.series("evaluation/score")
    if score:
        note = "Mean gain over the base model on the validation prompts, in stds of its scores over prompts."
        line = Line("score", *thinned(score.steps, score.values), "ink")
        ends = (1, run.steps_done)
        charts.append(line_chart("validation score", [line], include=[0.0], x_ends=ends, small=True, note=note))
    return Section("rewards", "Rewards during training", text, charts, "No step was logged yet.")


def _room(values: Sequence[float]) -> list[float]:
    """Bounds a tenth of the value apart, so that next to no change looks like next to none."""
    middle = (min(values) + max(values)) / 2
    return [middle - 0.05 * abs(middle), middle + 0.05 * abs(middle)]


def _raw_and_smooth(series: Series, colour: str) -> list[Line]:
    if not series:
        return []
    x, y = thinned(series.steps, series.values)
    if len(series.steps) < 8:
        return [Line("mean score", x, y, colour)]
    smoothed, band = smooth(x, y)
    return [Line("mean score", x, y, colour, style="dots"), Line("smoothed", x, smoothed, colour, band=band)]


def coefficients(run: RunData) -> Section:
    colour = colours(run)
    charts = []
    shares = run.by_reward("alpha_bar")
    if shares:
        equal = Reference(1 / len(run.objectives), "equal shares")
        charts.append(
            line_chart(
                "Smoothed coefficients",
                _lines(shares, colour),
                references=[equal],
                include=[0.0],
                note="What each reward's advantage is weighted with. They sum to 1.",
            )
        )
    norms = run.by_reward("grad_norm")
    if norms:
        charts.append(
            line_chart(
                "Gradient lengths",
                _lines(norms, colour),
                include=[0.0],
                note="Of each reward's own gradient. Only their ratios mean something.",
            )
        )
    update = run.series("update/norm")
    if update:
        bound = run.config.optimizer.grad_clip
        near = [] if bound is None or max(update.values) <= bound / 4 else [Reference(bound, "clipped above")]
        lines = [Line("length", *thinned(update.steps, update.values), "ink")]
        far = "" if near else "; it is not clipped" if bound is None else f"; the bound is {number(bound)}"
        note = f"Of the whole update before clipping{far}."
        charts.append(line_chart("Length of the update", lines, references=near, include=[0.0], note=note))
    distance = run.series("loss/kl")
    if distance:
        lines = [Line("distance", *thinned(distance.steps, distance.values), "ink")]
        note = "Mean squared difference between predictions with and without the LoRA."
        charts.append(line_chart("Distance from the base model", lines, include=[0.0], note=note))
    text = "How much each reward counts in an update, and how far the updates move the model."
    return Section("balance", "Balance", text, charts, "No step was logged yet.")


def harmony(run: RunData) -> Section:
    """Held out first: it is the figure that counts."""
    k = len(run.trained)
    chance = Reference(1 / math.sqrt(k), f"1/√{k}: unrelated gradients")
    charts = []
    rule = RULES.part_of(run.config.balance)
    unseen = "Made from earlier batches, measured on the next one."
    if rule.keeps_halves:
        unseen = "Made from one half of the prompts, measured on the other."
    noise = " Noise alone lies below 0." if k > 1 else ""
    for prefix, title, note, references in (
        ("heldout", "On unseen samples: worst cosine", f"{unseen}{noise}", []),
        ("harmony", "In batch: worst cosine", "Measured on the gradients the direction was made from.", [chance]),
    ):
        lines = _both(run, f"{prefix}/min_cos")
        if lines:
            charts.append(line_chart(title, lines, references=references, include=[0.0], note=note))
    mean = _both(run, "heldout/mean_cos")
    if mean:
        note = "Averaged over the rewards. Noise alone lies around 0."
        charts.append(line_chart("On unseen samples: mean cosine", mean, include=[0.0], note=note))
    norm = run.series("qp/norm")
    if norm:
        note = "Near 0: rewards oppose each other."
        if rule.never_opposes(run.config.balance):
            note = f"The cosine that every reward is guaranteed in its batch. {note}"
        lines = [Line("length", *thinned(norm.steps, norm.values), "ours")]
        title = "Length of the common direction"
        charts.append(line_chart(title, lines, references=[chance], include=[0.0], note=note))
    text = (
        "How well one direction serves all rewards: its cosine with each reward's gradient. Above 0 a reward gains, "
        "below 0 it loses. Grey: the plain weighted sum of the rewards on the same batches."
    )
    more = (
        "In high dimensions gradients that have nothing in common are nearly orthogonal, and the best direction for "
        f"{k} orthogonal gradients has the cosine 1/√{k} = {1 / math.sqrt(k):.2f} with each. So an in-batch value near "
        "that line proves nothing: pure noise reaches it, because a batch's noise agrees with itself. On unseen "
        "samples noise gives a mean cosine of 0 and a worst cosine below 0, the smallest of several that scatter "
        "around 0; that is why those charts come first. A worst cosine above 0 on average shows that every reward "
        "gains; below 0 it proves nothing by itself. "
    ) + (
        "A half batch is noisier than the whole, so the size of these cosines understates what an update achieves."
        if rule.keeps_halves
        else "The gradients of one batch are noisy, so the size of these cosines understates what an update achieves."
    )
    why = "Not measured: only rules with one gradient per reward measure it."
    return Section("harmony", "Harmony", text, charts, _unless_none_yet(run, why), more)


def signal(run: RunData) -> Section:
    measured = run.by_reward("signal")
    charts = []
    if measured:
        note = "1: no noise. 0: nothing but noise. The first values rest on one or two batches."
        charts.append(line_chart("Signal", _lines(measured, colours(run)), include=[0.0, 0.2], note=note))
    text = (
        "The share of each reward's squared gradient that is not noise: what independent samples agree on. Near 0 the "
        "reward cannot be learnt at this batch size, or nothing is left to learn."
    )
    why = "Not measured: it needs a rule with one gradient per reward, and two prompt groups in an update."
    return Section("signal", "Signal", text, charts, _unless_none_yet(run, why))


def _unless_none_yet(run: RunData, why: str) -> str:
    return "No refresh was logged yet." if run.config.uses_gradients and not run.lines else why


def _both(run: RunData, key: str) -> list[Line]:
    ours, theirs = run.series(key), run.series(f"ws_{key}")
    lines = []
    if ours:
        lines.append(Line("this run", *thinned(ours.steps, ours.values), "ours", "this run"))
    if theirs:
        x, y = thinned(theirs.steps, theirs.values)
        lines.append(Line("weighted sum", x, y, "theirs", "weighted sum", "dashed"))
    return lines


def _lines(by_reward: dict[str, Series], colour: dict[str, str]) -> list[Line]:
    return [Line(name, *thinned(s.steps, s.values), colour[name], shortened(name, 14)) for name, s in by_reward.items()]
