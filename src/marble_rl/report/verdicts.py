"""What a run shows about each claim of the method, with the figures behind it; `unknown` where data lacks.

Every verdict follows from a rule that is written down here. None is a matter of taste.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Literal

from marble_rl.bootstrap import Difference
from marble_rl.config.schema import MarbleBalance
from marble_rl.report.diagnosis import StoredDiagnosis
from marble_rl.report.guards import guards
from marble_rl.report.reading import RunData
from marble_rl.report.statistics import LEAST_REFRESHES, LEAST_STEPS, mean_interval, rank_correlation, rise
from marble_rl.report.wording import count_word, counted, interval, listed, number

Answer = Literal["yes", "partly", "no", "unknown"]
LEAST_SIGNAL = 0.1
"""Below this nine tenths of a reward's squared gradient are noise."""
REFRESHES_FOR_SIGNAL = 10
"""docs/metrics.md: the first values rest on one or two batches."""


@dataclass(frozen=True)
class Verdict:
    """An answer in one sentence, and the figures behind it."""

    claim: str
    answer: Answer
    text: str
    figures: list[str] = field(default_factory=list)


def verdicts(run: RunData) -> list[Verdict]:
    found = [rewards_rise(run)]
    if run.held_out:
        found.append(held_out_rewards_follow(run))
    if isinstance(run.config.balance, MarbleBalance):
        found += [serves_every_reward(run), better_than_weighted_sum(run), enough_signal(run), follows_difficulty(run)]
    if run.diagnosis is not None:
        found.append(fewer_conflicts(run.diagnosis))
    return [*found, nothing_went_wrong(run)]


def rewards_rise(run: RunData) -> Verdict:
    """On held-out prompts where the run was evaluated, else on its training prompts."""
    claim = "Does every trained reward rise?"
    evaluation = run.evaluation
    if evaluation is not None and evaluation.differences:
        found = {name: d for name, d in evaluation.differences.items() if name in run.trained}
        prompts = "held-out prompts" if run.config.prompts.heldout else "the training prompts"
        where = f"On {prompts}, {evaluation.after} weights against {evaluation.before}"
    else:
        curves = {name: rise(series.values) for name, series in run.by_reward("reward").items()}
        found = {name: d for name, d in curves.items() if d is not None}
        where = "On training prompts, the last third of the steps against the first tenth"
    if not found:
        return Verdict(
            claim,
            "unknown",
            f"Cannot be told: no evaluation, and {counted(run.steps_done, 'step')} of training, where "
            f"{LEAST_STEPS} are needed. Run marble evaluate.",
        )
    up = [name for name, d in found.items() if d.low > 0]
    down = [name for name, d in found.items() if d.high < 0]
    unclear = [name for name in run.trained if name not in up and name not in down]
    if len(up) == len(run.trained):
        text = f"all {count_word(len(up))} rose" if len(up) > 1 else f"{up[0]} rose"
    else:
        parts = {"rose": up, "fell": down, "did not clearly change": unclear}
        text = "; ".join(f"{listed(names)} {verb}" for verb, names in parts.items() if names)
    answer: Answer = "yes" if len(up) == len(run.trained) else "partly" if up else "no" if down else "unknown"
    figures = [f"{name} {number(d.mean, signed=True)} ({interval(d)})" for name, d in found.items()]
    return Verdict(claim, answer, f"{where}: {text}.", figures)


def held_out_rewards_follow(run: RunData) -> Verdict:
    """Rewards that were never trained on: the check against exploitation."""
    claim = "Do rewards that were never trained on confirm it?"
    known = {} if run.evaluation is None else run.evaluation.differences
    found = {name: d for name, d in known.items() if name in run.held_out}
    if not found:
        return Verdict(claim, "unknown", "Cannot be told without an evaluation. Run marble evaluate.")
    down = [name for name, d in found.items() if d.high < 0]
    up = [name for name, d in found.items() if d.low > 0]
    if down:
        text = f"The held-out {listed(down)} fell: the run may exploit its rewards. Look at the pictures."
    elif len(up) == len(found):
        text = f"The held-out {listed(up)} rose too: no sign that the trained rewards were exploited."
    else:
        text = "None fell, but not all of them rose beyond doubt."
    answer: Answer = "no" if down else "yes" if len(up) == len(found) else "partly"
    figures = [f"{name} {number(d.mean, signed=True)} ({interval(d)})" for name, d in found.items()]
    return Verdict(claim, answer, text, figures)


def serves_every_reward(run: RunData) -> Verdict:
    """Held-out worst cosine, averaged over refreshes, beside zero."""
    claim = "Does an update serve every reward on prompts it was not made from?"
    values = run.series("heldout/min_cos").values
    found = mean_interval(values)
    if found is None:
        return _too_few(claim, len(values))
    in_batch = run.series("harmony/min_cos").values
    figures = [f"held-out worst cosine {number(found.mean, signed=True)} ({interval(found)}), {len(values)} refreshes"]
    if in_batch:
        figures.append(f"in-batch {number(statistics.fmean(in_batch), signed=True)}")
    if found.low > 0:
        return Verdict(claim, "yes", "On average even the worst-served reward gains from an update.", figures)
    if found.high < 0:
        text = "On average at least one reward gets nothing reliable from an update; see its signal."
        return Verdict(claim, "no", text, figures)
    text = "Cannot be told: zero lies within the interval, so for the worst-served reward it may be chance."
    return Verdict(claim, "unknown", text, figures)


def better_than_weighted_sum(run: RunData) -> Verdict:
    """Paired on the same batches."""
    claim = "Is held-out harmony above the weighted sum's?"
    pairs = [
        (line["heldout/min_cos"], line["ws_heldout/min_cos"])
        for line in run.lines
        if "heldout/min_cos" in line and "ws_heldout/min_cos" in line
    ]
    found = mean_interval([ours - theirs for ours, theirs in pairs])
    if found is None:
        return _too_few(claim, len(pairs))
    means = [number(statistics.fmean(column), signed=True) for column in zip(*pairs, strict=True)]
    figures = [
        f"worst cosine {means[0]}, weighted sum {means[1]}",
        f"difference {number(found.mean, signed=True)} ({interval(found)}), {len(pairs)} refreshes",
    ]
    if found.low > 0:
        return Verdict(claim, "yes", "The direction serves the worst-served reward better than their sum.", figures)
    if found.high < 0:
        return Verdict(claim, "no", "The weighted sum would have served the worst-served reward better.", figures)
    text = "Cannot be told: the difference is within the noise of these batches."
    return Verdict(claim, "unknown", text, figures)


def fewer_conflicts(found: StoredDiagnosis) -> Verdict:
    """On batches that neither direction was made from. Intervals that touch say nothing."""
    claim = "On fresh batches, does MARBLE work against rewards less often than their weighted sum?"
    named = [found.direction(name) for name in ("marble", "weighted_sum")]
    known = [d for d in named if d is not None and {"min_cos", "conflict"} <= set(d.other)]
    if len(known) < 2:
        return Verdict(claim, "unknown", "Cannot be told: the diagnosis did not measure both of them.")
    figures = [
        f"{d.name}: conflict rate {_spanned(d.other['conflict'])} in another batch"
        f"{f', {_spanned(own)} in its own' if (own := d.own.get('conflict')) else ''}; "
        f"worst cosine {number(d.other['min_cos'].mean, signed=True)} ({interval(d.other['min_cos'])})"
        for d in known
    ]
    figures.append(f"{found.batches} batches of {found.images} images")
    ours, theirs = (d.other["conflict"] for d in known)
    if ours.high < theirs.low:
        return Verdict(
            claim, "yes", "Its direction conflicts with a reward less often, beyond both intervals.", figures
        )
    if ours.low > theirs.high:
        return Verdict(claim, "no", "The weighted sum conflicts with a reward less often.", figures)
    text = "Cannot be told: the intervals of the two conflict rates overlap."
    return Verdict(claim, "unknown", text, figures)


def _spanned(found: Difference) -> str:
    ends = f" ({number(found.low)} to {number(found.high)})" if found.high > found.low else ""
    return f"{number(found.mean)}{ends}"


def enough_signal(run: RunData) -> Verdict:
    """The last smoothed value of each reward."""
    claim = "Is there enough signal at this batch size?"
    signals = run.by_reward("signal")
    refreshes = max((len(series.steps) for series in signals.values()), default=0)
    if refreshes < REFRESHES_FOR_SIGNAL:
        text = f"Cannot be told: {refreshes} refresh{'' if refreshes == 1 else 'es'}, "
        return Verdict(claim, "unknown", f"{text}and the estimate is read after {REFRESHES_FOR_SIGNAL}.")
    last = {name: series.values[-1] for name, series in signals.items()}
    peak = {name: max(series.values) for name, series in signals.items()}
    weak = [name for name, value in last.items() if value < LEAST_SIGNAL]
    figures = [f"{name} {number(value)} (highest {number(peak[name])})" for name, value in last.items()]
    if not weak:
        return Verdict(claim, "yes", "Two halves of a batch agree on the gradient of every reward.", figures)
    whom = "any reward" if len(weak) == len(run.trained) else listed(weak)
    text = (
        f"By the end two halves of a batch hardly agree on the gradient of {whom}: nine tenths of it or more are "
        "noise. Either nothing is left to learn, or the batch is too small."
    )
    return Verdict(claim, "no" if len(weak) == len(last) else "partly", text, figures)


def follows_difficulty(run: RunData) -> Verdict:
    """Difficulty = a small gain, in units of the base scores' spread over prompts. Ranks only: with few rewards the
    size of a correlation says little."""
    claim = "Do the coefficients follow difficulty?"
    series = run.by_reward("alpha_bar")
    evaluation = run.evaluation
    if evaluation is None or not evaluation.differences:
        return Verdict(claim, "unknown", "Cannot be told without an evaluation: it says how much each reward gained.")
    gains = {
        name: evaluation.differences[name].mean / evaluation.spread[name]
        for name in series
        if name in evaluation.differences and evaluation.spread.get(name, 0) > 0
    }
    if len(gains) < 4:
        return Verdict(claim, "unknown", f"Cannot be told from {counted(len(gains), 'reward')}; it takes four or more.")
    shares = {name: statistics.fmean(series[name].values) for name in gains}
    rho, chance = rank_correlation(list(shares.values()), list(gains.values()))
    figures = [
        *(f"{name} coefficient {number(shares[name])}, gain {number(gains[name])} spreads" for name in gains),
        f"rank correlation {number(rho, signed=True)}; {100 * chance:.0f} % of random orders are as negative",
    ]
    if chance <= 0.05:
        return Verdict(claim, "yes", "Rewards that gained less had the larger coefficients.", figures)
    if chance >= 0.95:
        return Verdict(claim, "no", "Rewards that gained more had the larger coefficients.", figures)
    text = f"Cannot be told: with {counted(len(gains), 'reward')} chance does as much."
    return Verdict(claim, "unknown", text, figures)


def nothing_went_wrong(run: RunData) -> Verdict:
    """Alarms and guards that docs/metrics.md calls unhealthy."""
    claim = "Did every guard stay quiet?"
    if not run.lines:
        return Verdict(claim, "unknown", "Cannot be told: nothing was logged yet.")
    trouble = [f"{guard.what}: {guard.seen}" for guard in guards(run) if not guard.quiet]
    if trouble:
        return Verdict(claim, "no", "Some of them spoke up; docs/metrics.md says what to do.", trouble)
    return Verdict(claim, "yes", "No alarm, no reward that dropped out often, no failed scoring.")


def _too_few(claim: str, refreshes: int) -> Verdict:
    found = "no refresh" if refreshes == 0 else f"{refreshes} refresh{'' if refreshes == 1 else 'es'}"
    return Verdict(claim, "unknown", f"Cannot be told: {found} measured, where {LEAST_REFRESHES} are needed.")
