"""What a run shows about each claim of the method, with the figures behind it; `unknown` where data is missing.

Every verdict follows from a rule that is written down here. None is a matter of taste.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Literal

from marble_rl.diagnose.record import Diagnosis
from marble_rl.intervals import Interval
from marble_rl.report.floors import BELOW, lines_without_direction, recent_rates
from marble_rl.report.guards import guards
from marble_rl.report.run_data import RunData
from marble_rl.report.statistics import LEAST_STEPS, mean_interval, rise
from marble_rl.report.wording import count_word, counted, interval, listed, number
from marble_rl.training.summary import LEAST_REFRESHES

Answer = Literal["yes", "partly", "no", "unknown"]
LEAST_SIGNAL = 0.1
"""Below this nine tenths of a reward's squared gradient are noise."""
REFRESHES_FOR_SIGNAL = 10
"""docs/metrics.md: the first values rest on one or two batches."""
NONE = "too few prompts have scores of two sets of weights"


@dataclass(frozen=True)
class Verdict:
    """An answer in one sentence, and the figures behind it."""

    claim: str
    answer: Answer
    text: str
    figures: list[str] = field(default_factory=list)


def verdicts(run: RunData) -> list[Verdict]:
    answers = [rewards_rise(run)]
    if run.config.guards:
        answers.append(floors_hold(run))
    if run.held_out:
        answers.append(held_out_rewards_follow(run))
    if run.config.uses_gradients:
        answers += [serves_every_reward(run), better_than_weighted_sum(run), enough_signal(run)]
    if run.diagnosis is not None:
        answers.append(fewer_conflicts(run.diagnosis))
    return [*answers, nothing_went_wrong(run)]


def rewards_rise(run: RunData) -> Verdict:
    """On held-out prompts where the run was evaluated, else on its training prompts."""
    claim = "Does every trained reward rise?" if not run.config.guards else "Does every objective rise?"
    evaluation = run.evaluation
    if evaluation is not None and evaluation.differences:
        changes = {name: d for name, d in evaluation.differences.items() if name in run.objectives}
        prompts = "held-out prompts" if run.config.prompts.heldout else "the training prompts"
        where = f"On {prompts}, {evaluation.after} weights against {evaluation.before}"
    else:
        curves = {name: rise(series.values) for name, series in run.by_reward("reward", run.objectives).items()}
        changes = {name: d for name, d in curves.items() if d is not None}
        where = "On training prompts, the last third of the steps against the first tenth"
    if not changes:
        evaluated = "no evaluation" if evaluation is None else f"{NONE} in its evaluation"
        return Verdict(
            claim,
            "unknown",
            f"Not known: {evaluated}, and {counted(run.steps_done, 'step')} of training, where "
            f"{LEAST_STEPS} are needed. Run marble evaluate.",
        )
    up = [name for name, d in changes.items() if d.sign > 0]
    down = [name for name, d in changes.items() if d.sign < 0]
    unclear = [name for name in run.objectives if name not in up and name not in down]
    if len(up) == len(run.objectives):
        text = f"all {count_word(len(up))} rose" if len(up) > 1 else f"{up[0]} rose"
    else:
        parts = {"rose": up, "fell": down, "did not clearly change": unclear}
        text = "; ".join(f"{listed(names)} {verb}" for verb, names in parts.items() if names)
    answer: Answer = "yes" if len(up) == len(run.objectives) else "partly" if up else "no" if down else "unknown"
    figures = [f"{name} {number(d.mean, signed=True)} ({interval(d)})" for name, d in changes.items()]
    return Verdict(claim, answer, f"{where}: {text}.", figures)


def floors_hold(run: RunData) -> Verdict:
    """The mean rate over the last third of the steps: above 0 a guard is below its floor, in units of its band."""
    claim = "Does every guard hold its floor?"
    rates = recent_rates(run)
    missing = [name for name in run.config.guards if name not in rates]
    if not rates:
        return Verdict(claim, "unknown", "Not known: no guard was measured yet.")
    below = [name for name, rate in rates.items() if rate > BELOW]
    levels = {name: run.series(f"floor/{name}/level").values[-1] for name in rates}
    figures = [
        f"{name} {number(level, signed=True)} against the base model, floor {number(guard.floor, signed=True)}"
        for name, level in levels.items()
        for guard in (run.config.guards[name],)
    ]
    text = f"{listed(below)} stood below the floor in the last third of the steps." if below else "All of them hold it."
    short = lines_without_direction(run)
    if short:
        text += f" In {short} of {counted(len(run.lines), 'step')} no direction satisfied all floors: lower one."
    if missing:
        text += f" Of {listed(missing)} nothing was measured."
    return Verdict(claim, "no" if below else "partly" if missing else "yes", text, figures)


def held_out_rewards_follow(run: RunData) -> Verdict:
    """Rewards that were never trained on: the check against exploitation."""
    claim = "Do rewards that were never trained on confirm it?"
    known = {} if run.evaluation is None else run.evaluation.differences
    changes = {name: d for name, d in known.items() if name in run.held_out}
    if not changes:
        why = (
            "without an evaluation. Run marble evaluate." if run.evaluation is None else f"from its evaluation: {NONE}."
        )
        return Verdict(claim, "unknown", f"Not known {why}")
    down = [name for name, d in changes.items() if d.sign < 0]
    up = [name for name, d in changes.items() if d.sign > 0]
    missing = [name for name in run.held_out if name not in changes]
    if down:
        text = f"The held-out {listed(down)} fell: the run may exploit its rewards. Look at the pictures."
    elif len(up) == len(run.held_out):
        text = f"The held-out {listed(up)} rose too: no sign that the trained rewards were exploited."
    elif up:
        text = f"None fell; {listed(up)} rose clearly."
    else:
        text = "None of them clearly changed."
    if missing:
        text += f" Of {listed(missing)} nothing was measured."
    answer: Answer = "no" if down else "yes" if len(up) == len(run.held_out) else "partly" if up else "unknown"
    figures = [f"{name} {number(d.mean, signed=True)} ({interval(d)})" for name, d in changes.items()]
    return Verdict(claim, answer, text, figures)


def serves_every_reward(run: RunData) -> Verdict:
    """Held-out worst cosine, averaged over refreshes. Above 0 each reward's mean cosine is. Below 0 nothing follows:
    the smallest of several cosines is negative on average where all of them are noise around 0."""
    claim = "Does an update serve every reward on samples it was not made from?"
    values = run.series("heldout/min_cos").values
    worst = mean_interval(values)
    if worst is None:
        return _too_few(claim, len(values))
    in_batch = run.series("harmony/min_cos").values
    figures = [
        f"worst cosine on unseen samples {number(worst.mean, signed=True)} ({interval(worst)}), {len(values)} refreshes"
    ]
    if in_batch:
        figures.append(f"in-batch {number(statistics.fmean(in_batch), signed=True)}")
    if worst.sign > 0:
        return Verdict(claim, "yes", "On average even the worst-served reward gains from an update.", figures)
    text = "Not known: noise alone gives a worst cosine below 0. See whose signal is low."
    return Verdict(claim, "unknown", text, figures)


def better_than_weighted_sum(run: RunData) -> Verdict:
    """Paired on the same batches."""
    claim = "Is harmony on unseen samples above the weighted sum's?"
    pairs = [
        (line["heldout/min_cos"], line["ws_heldout/min_cos"])
        for line in run.lines
        if "heldout/min_cos" in line and "ws_heldout/min_cos" in line
    ]
    difference = mean_interval([ours - theirs for ours, theirs in pairs])
    if difference is None:
        return _too_few(claim, len(pairs))
    means = [number(statistics.fmean(column), signed=True) for column in zip(*pairs, strict=True)]
    figures = [
        f"worst cosine {means[0]}, weighted sum {means[1]}",
        f"difference {number(difference.mean, signed=True)} ({interval(difference)}), {len(pairs)} refreshes",
    ]
    if difference.sign > 0:
        return Verdict(claim, "yes", "The direction serves the worst-served reward better than their sum.", figures)
    if difference.sign < 0:
        return Verdict(claim, "no", "The weighted sum would have served the worst-served reward better.", figures)
    text = "Not known: the difference is within the noise of these batches."
    return Verdict(claim, "unknown", text, figures)


def fewer_conflicts(diagnosis: Diagnosis) -> Verdict:
    """On batches that neither direction was made from. Intervals that touch say nothing."""
    claim = "On fresh batches, does MARBLE work against rewards less often than their weighted sum?"
    measured = {name: diagnosis.directions.get(name) for name in ("marble", "weighted_sum")}
    known = {name: of for name, of in measured.items() if of and {"min_cos", "conflict"} <= of.independent.keys()}
    if len(known) < 2:
        return Verdict(claim, "unknown", "Not known: the diagnosis did not measure both of them.")
    figures = []
    for name, of in known.items():
        own = of.in_batch.get("conflict")
        figures.append(
            f"{name}: conflict rate {_rate(of.independent['conflict'])} in another batch"
            f"{f', {_rate(own)} in its own' if own else ''}; worst cosine "
            f"{number(of.independent['min_cos'].mean, signed=True)} ({interval(of.independent['min_cos'])})"
        )
    figures.append(f"{diagnosis.batches} batches of {diagnosis.images} images")
    ours, theirs = (of.independent["conflict"] for of in known.values())
    if ours.high < theirs.low:
        text = "Its direction conflicts with a reward less often, beyond both intervals."
        return Verdict(claim, "yes", text, figures)
    if ours.low > theirs.high:
        return Verdict(claim, "no", "The weighted sum conflicts with a reward less often.", figures)
    return Verdict(claim, "unknown", "Not known: the intervals of the two conflict rates overlap.", figures)


def _rate(rate: Interval) -> str:
    ends = f" ({number(rate.low)} to {number(rate.high)})" if rate.high > rate.low else ""
    return f"{number(rate.mean)}{ends}"


def enough_signal(run: RunData) -> Verdict:
    """The last smoothed value of each reward. What was never measured is not logged: the series of a reward that had
    its first gradient late, or never, is short or not there, and such a reward has not shown any signal."""
    claim = "Is there enough signal at this batch size?"
    signals = run.by_reward("signal")
    known = {name: series for name, series in signals.items() if len(series.steps) >= REFRESHES_FOR_SIGNAL}
    if not known:
        refreshes = max((len(series.steps) for series in signals.values()), default=0)
        text = f"Not known: {counted(refreshes, 'refresh', 'refreshes')}, and the estimate is read after "
        return Verdict(claim, "unknown", f"{text}{REFRESHES_FOR_SIGNAL}.")
    weak = [name for name, series in known.items() if series.values[-1] < LEAST_SIGNAL]
    unread = {name: len(signals[name].steps) if name in signals else 0 for name in run.trained if name not in known}
    figures = [f"{name} {number(s.values[-1])} (highest {number(max(s.values))})" for name, s in known.items()]
    figures += [f"{name}: measured in {counted(count, 'refresh', 'refreshes')}" for name, count in unread.items()]
    if not weak and not unread:
        return Verdict(claim, "yes", "At least a tenth of every reward's squared gradient is not noise.", figures)
    text = _without_signal(run, weak, list(unread))
    return Verdict(claim, "no" if len(weak) == len(known) else "partly", text, figures)


def _without_signal(run: RunData, weak: list[str], unread: list[str]) -> str:
    sentences = []
    if weak:
        whom = "any reward" if len(weak) == len(run.trained) else listed(weak)
        sentences.append(
            f"By the end two halves of a batch hardly agree on the gradient of {whom}: nine tenths of its square or "
            "more are noise. Either nothing is left to learn, or the batch is too small."
        )
    if unread:
        sentences.append(
            f"Of {listed(unread)} it is not known: a gradient in both halves of a batch came late or never, and the "
            f"estimate is read {REFRESHES_FOR_SIGNAL} refreshes after the first."
        )
    return " ".join(sentences)


def nothing_went_wrong(run: RunData) -> Verdict:
    """Alarms and guards that docs/metrics.md calls unhealthy."""
    claim = "Did every guard stay quiet?"
    if not run.lines:
        return Verdict(claim, "unknown", "Not known: nothing was logged yet.")
    trouble = [f"{guard.what}: {guard.seen}" for guard in guards(run) if not guard.quiet]
    if trouble:
        return Verdict(claim, "no", "Some of them reported something; docs/metrics.md says what to do.", trouble)
    return Verdict(claim, "yes", "No alarm, no reward that dropped out often, no failed scoring.")


def _too_few(claim: str, refreshes: int) -> Verdict:
    count = counted(refreshes, "refresh", "refreshes")
    return Verdict(claim, "unknown", f"Not known: {count} measured, where {LEAST_REFRESHES} are needed.")
