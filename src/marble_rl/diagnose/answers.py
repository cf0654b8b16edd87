"""What a diagnosis says, in words: is there enough signal, which rewards oppose each other, which rule serves the worst
reward best.

An answer is given only where its interval carries it; otherwise the text says how many batches would be enough. An
interval shrinks at least as fast as 1 / sqrt(M): to be half as wide it needs at most four times the batches M. Where
several comparisons are made to answer one question, each has the level 1 - 0.05 / (their number).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from marble_rl.diagnose.analysis import attenuated_cosines, worst_served
from marble_rl.diagnose.intervals import COSINE, DIFFERENCE, jackknife
from marble_rl.diagnose.record import Answer
from marble_rl.intervals import LEVEL, Interval

ENOUGH_SIGNAL = 0.1
"""Below it a reward hardly learns at this batch size."""
MOST = 1000
"""Batches that are ever asked for"""
RULES = {"weighted_sum": "weighted_sum", "uniform": "fixed", "marble": "marble", "fair": "fair"}
"""Directions that answer which rule to take, with their `balance.type`. Of marble: its refreshes."""


def answers(
    names: Sequence[str], products: Tensor, directions: dict[str, Tensor], signals: Sequence[Interval | None]
) -> list[Answer]:
    """``products`` [M, J, M, J] of K rewards and a probe, ``directions`` [M, J] by name, ``signals`` [K]."""
    found = [Answer("Is there enough signal?", _signal(names, signals, len(products)))]
    if len(names) > 1:
        found += [
            Answer("Which rewards oppose each other?", _opposed(names, products)),
            Answer("Which rule serves the worst reward best?", _best_rule(names, products, directions)),
        ]
    return found


def _signal(names: Sequence[str], signals: Sequence[Interval | None], batches: int) -> str:
    silent, enough, little, unknown, needed = [], [], [], [], 0
    for name, signal in zip(names, signals, strict=True):
        if signal is None:
            silent.append(name)
        elif signal.low >= ENOUGH_SIGNAL:
            enough.append(f"{name} ({signal.mean:.0%})")
        elif signal.high < ENOUGH_SIGNAL:
            little.append(f"{name} ({_more_groups(signal)})")
        else:
            unknown.append(name)
            needed = max(needed, _batches_for(signal, ENOUGH_SIGNAL, batches))
    parts = [
        f"Yes for {_and(enough)}." if enough else "",
        f"Too little for {_and(little)}." if little else "",
        f"No gradient at all for {_and(silent)}: constant scores, or no prompt that it applies to." if silent else "",
        f"For {_and(unknown)} {_cannot_tell(batches, needed)}." if unknown else "",
    ]
    return " ".join(filter(None, parts))


def _more_groups(signal: Interval) -> str:
    """How much larger batches would have enough: noise falls with their size."""
    if signal.low <= 0:
        return f"at most {signal.high:.1%}"
    size = ENOUGH_SIGNAL / (1 - ENOUGH_SIGNAL) * (1 - signal.mean) / signal.mean
    return f"{signal.mean:.1%}; about {size:.0f}x rollout.groups would do"


def _opposed(names: Sequence[str], products: Tensor) -> str:
    batches, k = len(products), len(names)
    pairs = list(combinations(range(k), 2))
    rows, columns = (torch.tensor(side) for side in zip(*pairs, strict=True))
    intervals = jackknife(
        lambda kept: attenuated_cosines(products[kept][:, :, kept], k)[rows, columns],
        torch.arange(batches),
        [COSINE] * len(pairs),
        level=1 - (1 - LEVEL) / len(pairs),
    )
    opposed: list[str] = []
    agree: list[str] = []
    unknown: list[tuple[int, str]] = []
    for (a, b), interval in zip(pairs, intervals, strict=True):
        pair = f"{names[a]} / {names[b]}"
        if interval is None or interval.low <= 0 <= interval.high:
            needed = MOST + 1 if interval is None else _batches_for(interval, 0.0, batches)
            unknown.append((needed, pair))
        else:
            (opposed if interval.high < 0 else agree).append(pair)
    text = f"{', '.join(opposed)}." if opposed else "No two of them for certain."
    text += f" In agreement: {', '.join(agree)}." if agree else ""
    if unknown:
        needed, nearest = min(unknown)
        which = "all pairs" if len(unknown) == len(pairs) > 1 else ", ".join(pair for _, pair in unknown)
        text += f" For {which} {_cannot_tell(batches, needed)}"
        text += f", where {nearest} would be the first to show." if needed <= MOST and len(unknown) > 1 else "."
    return text


def _best_rule(names: Sequence[str], products: Tensor, directions: dict[str, Tensor]) -> str:
    batches, k = len(products), len(names)
    figures = {name: worst_served(products, directions[name], k) for name in RULES if name in directions}
    everything = torch.arange(batches)
    order = sorted(figures, key=lambda name: -float(figures[name](everything).nan_to_num(-1.0)))
    best, others = order[0], order[1:]
    differences = jackknife(
        lambda kept: torch.stack([figures[best](kept) - figures[name](kept) for name in others]),
        everything,
        [DIFFERENCE] * len(others),
        level=1 - (1 - LEVEL) / len(others),
    )
    (own,) = jackknife(lambda kept: figures[best](kept)[None], everything, [COSINE])
    if own is None:
        return f"No gradients to tell from: {_cannot_tell(batches, MOST + 1)}."
    compared = list(zip(others, differences, strict=True))
    worse = [RULES[name] for name, d in compared if d is not None and d.low > 0]
    ties = [(name, d) for name, d in compared if d is None or d.low <= 0]
    served = "serves it" if own.low > 0 else "works against it" if own.high < 0 else "may serve it or not"
    if not ties:
        figure = f"cosine {own.mean:+.2f}, {own.low:+.2f} to {own.high:+.2f}"
        return (
            f"{RULES[best]}: better than {_and(worse)} for the reward that each serves worst, and {served} ({figure})."
        )
    needed = min(_batches_for(d, 0.0, batches) if d is not None else MOST + 1 for _, d in ties)
    tied = _and([RULES[best], *(RULES[name] for name, _ in ties)])
    text = f"Between {tied} {_cannot_tell(batches, needed)}."
    return text + (f" {_and(worse)} serves it worse than {RULES[best]}." if worse else "")


def _batches_for(interval: Interval, boundary: float, batches: int) -> int:
    """How many would tell on which side of the boundary the figure lies, if it is what it seems to be."""
    distance = abs(interval.mean - boundary)
    reach = max(interval.high - interval.mean, interval.mean - interval.low)
    return min(MOST + 1, math.ceil(batches * (reach / distance) ** 2 / 10) * 10) if distance > 0 else MOST + 1


def _cannot_tell(batches: int, needed: int) -> str:
    if needed > MOST:
        return f"{batches} batches cannot tell, and it would take more than {MOST}"
    return f"{batches} batches cannot tell; use --batches {max(needed, batches + 10)}"


def _and(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
