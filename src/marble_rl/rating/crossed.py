"""How sure a figure is if both the raters and the prompts are a sample: others would have answered other things.

Each rater sees each prompt, so that an answer holds something of both (a crossed design with random effects):

    y_rp = mu + rater_r + prompt_p + rest_rp .

A figure theta moves by psi_rp if the answers of rater r to prompt p get a little more weight (its influence). For the
mean of N answers, psi is (y - theta) / N, summed over the answers of r to p. With R raters, P prompts and

    V_R = R / (R - 1) sum_r (sum_p psi_rp)^2 ,        V_P = P / (P - 1) sum_p (sum_r psi_rp)^2 ,
    V_E = R P / ((R - 1) (P - 1)) sum_rp (psi_rp - mean_p psi_rp - mean_r psi_rp + mean psi)^2 ,

V_R and V_P both contain what is neither rater nor prompt, so that

    SE^2 = max(V_R, V_P, V_R + V_P - V_E) ,        theta +- t(0.975, f) SE ,

with Satterthwaite's degrees of freedom f. For complete answers this is the two-way analysis of variance. With one rater
the interval is over prompts alone, and the other way round. Where all answers are the same there is none: that they do
not differ does not mean that others would not.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from marble_rl.intervals import student_reach
from marble_rl.storage import Maybe

Array = npt.NDArray[np.float64]
NOTHING = 1e-20
"""A squared error below it is rounding; figures are of the order of 1."""


class Estimate(BaseModel):
    """A figure with its 95 % interval; None where it cannot be estimated."""

    model_config = ConfigDict(frozen=True)

    value: Maybe = None
    low: Maybe = None
    high: Maybe = None


UNKNOWN = Estimate()


def crossed_mean(sums: Array, counts: Array, lowest: float, highest: float) -> Estimate:
    """Of answers whose sums and numbers [R, P] are given by rater and prompt. The interval is cut at the lowest and the
    highest answer that is possible."""
    total = counts.sum()
    if total == 0:
        return UNKNOWN
    mean = float(sums.sum() / total)
    return with_interval(mean, (sums - mean * counts) / total, counts > 0, lowest, highest)


def with_interval(
    value: float,
    influence: Array,
    answered: npt.NDArray[np.bool_],
    lowest: float = -math.inf,
    highest: float = math.inf,
) -> Estimate:
    """``influence`` [R, P], and where there are answers at all [R, P]."""
    psi = influence[answered.any(axis=1)][:, answered.any(axis=0)]
    squared_error, freedom = _spread(psi)
    if squared_error < NOTHING or freedom == 0:
        return Estimate(value=value)
    reach = student_reach(squared_error, freedom)
    return Estimate(value=value, low=max(lowest, value - reach), high=min(highest, value + reach))


def _spread(psi: Array) -> tuple[float, float]:
    """Squared standard error, and its degrees of freedom: 0 for a single answer."""
    raters, prompts = psi.shape
    by_rater = _variance(psi.sum(axis=1))
    by_prompt = _variance(psi.sum(axis=0))
    if raters == 1 or prompts == 1:
        return by_rater + by_prompt, max(raters, prompts) - 1
    rest = psi - psi.mean(axis=1, keepdims=True) - psi.mean(axis=0, keepdims=True) + psi.mean()
    free = (raters - 1) * (prompts - 1)
    by_both = raters * prompts / free * float((rest**2).sum())
    total = max(by_rater, by_prompt, by_rater + by_prompt - by_both)
    if total < NOTHING:
        return 0.0, 0
    parts = by_rater**2 / (raters - 1) + by_prompt**2 / (prompts - 1) + by_both**2 / free
    return total, max(total**2 / parts, min(raters, prompts) - 1)


def _variance(sums: Array) -> float:
    n = len(sums)
    return n / (n - 1) * float((sums**2).sum()) if n > 1 else 0.0
