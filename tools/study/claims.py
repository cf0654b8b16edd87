"""Every claim of the paper, and each of our own variants, with the rule by which the study judges it.

A claim "A is better than B" is judged by the composite (docs/compare.md): the difference A - B, paired by seed.
`confirmed`: its 95 % interval lies above 0, and that of some reward leaves out 0, too. `contradicted`: the same, below
0. `not confirmed`: otherwise. Fewer than three methods have no composite, and no verdict from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from marble_rl.compare.methods import tuned_weights
from marble_rl.compare.statistics import COMPOSITE
from marble_rl.compare.table import decided
from marble_rl.compare.writing import places_of
from marble_rl.intervals import Interval
from marble_rl.report.wording import listed, number
from tools.study.findings import Study

Verdict = Literal[
    "confirmed", "partly", "not confirmed", "contradicted", "measured elsewhere", "not testable here", "not measured"
]
DECIDED = ("confirmed", "partly", "not confirmed", "contradicted")
RIVALS = ("weighted_sum", "sequential", "gdpo", "uniform", "marble")
"""Methods that train all rewards in one run, as far as the paper knows them."""
NO_COMPOSITE = "There is no composite of fewer than three methods."
UNSCALED = "weights:1,1,26,1,1"
"""The weighted sum of the study's rewards as they are published: its config divides PickScore by 26."""


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    text: str
    """What it rests on."""
    details: str = ""
    """The same by reward, or by run."""


@dataclass(frozen=True)
class Claim:
    text: str
    paper: str
    """The figures that it rests on there."""
    judge: Callable[[Study], Finding]
    ours: bool = False
    """Asked by us beside a claim of the paper."""


def better(method: str, other: str) -> Callable[[Study], Finding]:
    """The rule for "``method`` is better than ``other``"."""

    def judge(study: Study) -> Finding:
        if not study.has(method, other):
            return _missing(study, method, other)
        differences = study.difference(method, other)
        composite = differences.get(COMPOSITE)
        if composite is None:
            return Finding("not measured", NO_COMPOSITE, _by_reward(differences, study.table.rewards))
        if decided(differences, COMPOSITE):
            verdict: Verdict = "confirmed" if composite.low > 0 else "contradicted"
            end = "" if composite.low > 0 else ": the other way round"
        else:
            verdict, end = "not confirmed", ": no clear difference"
        shown = shown_difference(composite, marked=verdict != "not confirmed")
        text = f"composite {shown}{end}; {composite.n} seeds."
        return Finding(verdict, text, _by_reward(differences, study.table.rewards))

    return judge


def all_of(judges: dict[str, Callable[[Study], Finding]]) -> Callable[[Study], Finding]:
    """Confirmed if all are, partly if some; else contradicted if one of them is."""

    def judge(study: Study) -> Finding:
        findings = {name: judge(study) for name, judge in judges.items()}
        texts = " ".join(f"{name}: {finding.text}" for name, finding in findings.items())
        details = " ".join(f"{name}: {finding.details}" for name, finding in findings.items() if finding.details)
        known = [f.verdict for f in findings.values() if f.verdict != "not measured"]
        if not known:
            return Finding("not measured", texts, details)
        if "confirmed" in known:
            return Finding("confirmed" if known.count("confirmed") == len(findings) else "partly", texts, details)
        return Finding("contradicted" if "contradicted" in known else "not confirmed", texts, details)

    return judge


def rewards_rise(study: Study) -> Finding:
    if not study.has("marble", "base"):
        return _missing(study, "marble", "base")
    return _rising(study.difference("marble", "base"), study.table.trained)


def held_out_rewards_rise(study: Study) -> Finding:
    if not study.has("marble", "base"):
        return _missing(study, "marble", "base")
    return _rising(study.difference("marble", "base"), study.table.held_out)


def best_joint_method(joint: Sequence[str]) -> Callable[[Study], Finding]:
    def judge(study: Study) -> Finding:
        if not study.has(*joint):
            return _missing(study, *joint)
        if not study.table.has_composite:
            return Finding("not measured", NO_COMPOSITE)
        order = study.ranking(joint)
        figures = [f"{name} {number(study.row(name).figures[COMPOSITE].mean, signed=True)}" for name in order]
        leads = all(_ahead(study, "marble", other) for other in joint if other != "marble")
        verdict: Verdict = "confirmed" if leads else "partly" if order[0] == "marble" else "not confirmed"
        end = "" if leads else ", but not significantly" if order[0] == "marble" else ""
        return Finding(verdict, f"rank {order.index('marble') + 1} of {len(order)}{end}: {', '.join(figures)}.")

    return judge


def no_specialist_wins(study: Study) -> Finding:
    """A specialist may win its own reward; over all rewards MARBLE is ahead of each."""
    names = [f"only-{reward}" for reward in study.table.trained]
    if not study.has("marble", *names):
        return _missing(study, "marble", *names)
    behind = [name for name in names if _ahead(study, "marble", name)]
    own = [r for r in study.table.trained if study.difference(f"only-{r}", "marble")[r].low > 0]
    verdict: Verdict = "confirmed" if len(behind) == len(names) else "partly" if behind else "not confirmed"
    composites = {name: study.difference(name, "marble")[COMPOSITE] for name in names}
    figures = ", ".join(f"{name} {shown_difference(d)}" for name, d in composites.items())
    wins = f"Specialists for {listed(own)} are ahead" if own else "No specialist is significantly ahead"
    return Finding(verdict, f"composite relative to MARBLE: {figures}. {wins} on their own reward.")


def _ahead(study: Study, method: str, other: str) -> bool:
    """By the composite."""
    differences = study.difference(method, other)
    return decided(differences, COMPOSITE) and differences[COMPOSITE].low > 0


def in_batch_harmony(study: Study) -> Finding:
    return _harmony(study, "in_batch")


def independent_harmony(study: Study) -> Finding:
    return _harmony(study, "independent")


def _harmony(study: Study, batches: Literal["in_batch", "independent"]) -> Finding:
    """MARBLE's direction has no conflict where the weighted sum's has: mean over the runs that were diagnosed."""
    if not study.diagnoses:
        return Finding("not measured", "No run was diagnosed.")
    rates, parts, clear = [], [], []
    for name, diagnosis in study.diagnoses.items():
        ours, theirs = (getattr(diagnosis.directions[d], batches) for d in ("marble", "weighted_sum"))
        rates.append(f"{theirs['conflict'].mean:.2f} -> {ours['conflict'].mean:.2f} ({name})")
        parts.append(
            f"{name} ({diagnosis.batches} mini-batches): worst cosine {shown_interval(theirs['min_cos'])} -> "
            f"{shown_interval(ours['min_cos'])}, conflict rate {shown_interval(theirs['conflict'])} -> "
            f"{shown_interval(ours['conflict'])}, mean cosine {shown_interval(theirs['mean_cos'])} -> "
            f"{shown_interval(ours['mean_cos'])}."
        )
        clear.append(_clear(ours["conflict"], theirs["conflict"], known_to_be_none=batches == "in_batch"))
    verdict: Verdict = "confirmed" if all(clear) else "partly" if any(clear) else "not confirmed"
    return Finding(verdict, f"conflict rate {', '.join(rates)}.", " ".join(parts))


def _clear(ours: Interval, theirs: Interval, *, known_to_be_none: bool) -> bool:
    """``known_to_be_none``: in its own batch the min-norm point conflicts with nothing, so that none seen is none."""
    if known_to_be_none:
        return ours.mean == 0 and theirs.low > 0
    return ours.mean < 0.05 and ours.high < theirs.low


def follows_difficulty(study: Study) -> Finding:
    """geneval gets more than its equal share, hpsv2 less."""
    shares = {name: study.training("marble", f"alpha_bar/{name}") for name in study.table.trained}
    known = {name: share for name, share in shares.items() if share is not None}
    if not {"geneval", "hpsv2"} <= set(known):
        return _missing(study, "marble")
    equal = 1 / len(study.table.trained)
    right = [known["geneval"].low > equal, known["hpsv2"].high < equal]
    wrong = [known["geneval"].high < equal, known["hpsv2"].low > equal]
    figures = ", ".join(
        f"{name} {share.mean:.3f} ({share.low:.3f} to {share.high:.3f})" for name, share in known.items()
    )
    reversed_ = [name for name, is_wrong in zip(("geneval", "hpsv2"), wrong, strict=True) if is_wrong]
    end = f" The other way round for {listed(reversed_)}." if reversed_ else ""
    return Finding(_of_all(right, wrong), f"Mean over the run; an equal share is {equal:.2f}: {figures}.{end}")


def fixed(verdict: Verdict, text: str) -> Callable[[Study], Finding]:
    """What no job of the study decides."""
    return lambda study: Finding(verdict, text)


def _rising(changes: dict[str, Interval], rewards: Sequence[str]) -> Finding:
    if not rewards:
        return Finding("not measured", "There are no such rewards.")
    up, down = [changes[name].low > 0 for name in rewards], [changes[name].high < 0 for name in rewards]
    return Finding(_of_all(up, down), _by_reward(changes, rewards))


def _of_all(right: Sequence[bool], wrong: Sequence[bool]) -> Verdict:
    """Of a claim in several parts, each of which is right, wrong or neither."""
    if any(right):
        return "confirmed" if all(right) else "partly"
    return "contradicted" if any(wrong) else "not confirmed"


def _by_reward(differences: dict[str, Interval], rewards: Sequence[str]) -> str:
    return ", ".join(f"{name} {shown_difference(differences[name])}" for name in rewards) + "."


def shown_difference(difference: Interval, *, marked: bool = True) -> str:
    """Mean and interval, with an arrow where the interval leaves out 0 and that counts (``marked``)."""
    sign = "" if not marked else "▲ " if difference.low > 0 else "▼ " if difference.high < 0 else ""
    places = min(4, places_of([difference]))
    mean, low, high = (f"{value:+.{places}f}" for value in (difference.mean, difference.low, difference.high))
    return f"{sign}{mean} ({low} to {high})"


def shown_interval(interval: Interval | None) -> str:
    """`?` where it is not known."""
    return "?" if interval is None else f"{interval.mean:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"


def _missing(study: Study, *methods: str) -> Finding:
    lacking = [method for method in methods if not study.has(method)]
    seeds = f"two seeds of {listed(lacking)}" if lacking else f"two common seeds of {listed(methods)}"
    crashed = [f" {study.crashed[method]} of {method} crashed." for method in methods if study.crashed[method]]
    return Finding("not measured", f"There are not {seeds} yet.{''.join(crashed)}")


PAPER = (
    Claim(
        "MARBLE beats the weighted sum",
        "composite +1.116 against +0.184, better on all eight rewards",
        better("marble", "weighted_sum"),
    ),
    Claim(
        "MARBLE beats hand-made sequential stages",
        "composite +1.116 against +1.015",
        better("marble", "sequential"),
    ),
    Claim("MARBLE has the best composite of the joint methods", "first of three", best_joint_method(RIVALS)),
    Claim("All trained rewards rise in one run", "all five, over the model without guidance", rewards_rise),
    Claim("Rewards that were not trained on rise too", "all three", held_out_rewards_rise),
    Claim(
        "No specialist comes near it over all rewards",
        "composites +0.120, +0.013 and +0.362 (FlowGRPO) against +1.116",
        no_specialist_wins,
    ),
    Claim(
        "The weighted sum points against some reward, MARBLE against none: in its own mini-batch",
        "conflict rate 0.8 -> 0.0, worst cosine -0.135 -> +0.372, mean 0.456 -> 0.401 (five mini-batches)",
        in_batch_harmony,
    ),
    Claim(
        "The same measured on independent mini-batches (the paper does not)",
        "not reported",
        independent_harmony,
        ours=True,
    ),
    Claim("Without normalisation it fails", "FAILS", better("marble", "marble_no_norm")),
    Claim(
        "Coefficients from the QP beat fixed ones",
        "geneval/ocr/hpsv2 .93/.96/.355 against .86/.89/.346",
        better("marble", "uniform"),
    ),
    Claim(
        "Refreshing every 10 steps is better than in every step",
        ".94/.96/.355 against .92/.92/.301",
        better("marble", "marble_every_step"),
    ),
    Claim(
        "Every 10 steps is better than every 5 or 20",
        "N = 5: .92/.96/.350; N = 20: .92/.93/.332",
        all_of({"N = 5": better("marble", "marble_n5"), "N = 20": better("marble", "marble_n20")}),
    ),
    Claim(
        "Smoothing with rho = 0.7 is better than 0.1 or 0.9",
        "0.1: .86/.80/.292; 0.9: .90/.89/.342",
        all_of({"rho 0.1": better("marble", "marble_rho01"), "rho 0.9": better("marble", "marble_rho09")}),
    ),
    Claim("Reward dropout is worse", ".80/.61/.270", better("marble", "dropout")),
    Claim(
        "Weights chosen by hand (1:1:1:2:2) do not help the weighted sum enough",
        ".90/.92/.285",
        better("marble", tuned_weights(5)),
    ),
    Claim(
        "A weighted sum of rewards as published falls behind: PickScore not divided by 26 (the paper does not ask)",
        "not reported",
        better("marble", UNSCALED),
        ours=True,
    ),
    Claim("A late stage with equal coefficients is best", "stated", better("marble_late_uniform", "marble")),
    Claim(
        "Coefficients follow difficulty: geneval gets much, hpsv2 little",
        "geneval near 0.3, hpsv2 below 0.2",
        follows_difficulty,
    ),
    Claim(
        "It costs what a single reward costs",
        "0.97x the speed of the weighted sum every 10 steps, 0.56x in every step; memory 1.14x",
        fixed("measured elsewhere", "By `marble bench`: [performance.md](../performance.md)."),
    ),
    Claim(
        "The scores on SD3.5 Medium",
        "the table of eleven models",
        fixed("not testable here", "Needs the published weights and GPUs; [the recipe](../recipes.md) is there."),
    ),
    Claim(
        "People prefer its images",
        "20 raters: 4.63/4.41 against 3.60/2.79",
        fixed("not testable here", "Needs people."),
    ),
)


def judge_paper(study: Study) -> list[dict[str, str]]:
    """Every claim of the paper: claim, paper, verdict, text, details."""
    return [judged(claim, study) for claim in PAPER]


def judged(claim: Claim, study: Study) -> dict[str, str]:
    """A claim with its finding, for the page."""
    return {"claim": claim.text, "paper": claim.paper, **asdict(claim.judge(study))}
