"""Bradley-Terry strengths: P(a is preferred to b) = 1 / (1 + exp(beta_b - beta_a)), with the betas' mean 0.

A tie is half a win for each. The likelihood has a finite maximum only if no group of models won every comparison with
the others (Ford's condition: the graph of "a won something against b" is strongly connected).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from marble_rl.rating.crossed import UNKNOWN, Array, Estimate, with_interval

STEPS = 200
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Strengths:
    """One for each model; all unknown if there is no finite one, with the reason."""

    values: list[Estimate]
    reason: str = ""


def strengths(wins: Array, names: Sequence[str]) -> Strengths:
    """From ``wins`` [R, P, M, M] by rater and prompt: what the row's model won against the column's, ties half."""
    total = wins.sum(axis=(0, 1))
    if reason := _separation(total, names):
        return Strengths([UNKNOWN] * len(names), reason)
    beta = _fit(total)
    chance = _chances(beta)
    compared = wins + wins.swapaxes(2, 3)
    scores = (wins - compared * chance).sum(axis=3)  # [R, P, M]: derivative of a cell's log likelihood
    influence = scores @ np.linalg.pinv(_information(total + total.T, chance))
    answered = compared.sum(axis=(2, 3)) > 0
    return Strengths([with_interval(float(b), influence[..., m], answered) for m, b in enumerate(beta)])


def _fit(total: Array) -> Array:
    """Maximum likelihood, by Newton's method with halved steps where the full one overshoots."""
    beta = np.zeros(len(total))
    compared = total + total.T
    for _ in range(STEPS):
        chance = _chances(beta)
        slope = (total - compared * chance).sum(axis=1)
        step = np.linalg.pinv(_information(compared, chance)) @ slope
        while _likelihood(beta + step, total) < _likelihood(beta, total) and abs(step).max() > TOLERANCE:
            step = step / 2
        beta = beta + step
        if abs(step).max() <= TOLERANCE:
            break
    return np.asarray(beta - beta.mean())


def _chances(beta: Array) -> Array:
    """[M, M]: that the row's model is preferred."""
    return np.asarray(1 / (1 + np.exp(beta[None, :] - beta[:, None])))


def _likelihood(beta: Array, total: Array) -> float:
    return -float((total * np.logaddexp(0, beta[None, :] - beta[:, None])).sum())


def _information(compared: Array, chance: Array) -> Array:
    weights = compared * chance * (1 - chance)
    np.fill_diagonal(weights, 0)
    return np.asarray(np.diag(weights.sum(axis=1)) - weights)


def _separation(total: Array, names: Sequence[str]) -> str:
    """Which models the answers separate from the others, so that no finite strength exists; empty if none."""
    from scipy.sparse.csgraph import connected_components  # slow to import

    groups, group = connected_components(total > 0, directed=True, connection="strong")
    if groups == 1:
        return ""
    for g in range(groups):
        own = group == g
        lost, won = total[np.ix_(~own, own)].sum(), total[np.ix_(own, ~own)].sum()
        listed = ", ".join(name for name, is_own in zip(names, own, strict=True) if is_own)
        if lost == 0:
            how = "won every comparison with the others" if won else "was never compared with the others"
            return f"{listed} {how}, so there are no finite strengths"
    raise AssertionError("one of the groups has no arrow from the others")
