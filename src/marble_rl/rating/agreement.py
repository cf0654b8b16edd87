"""Krippendorff's alpha: how far raters agree beyond chance. 1: always; 0: no more than chance; below: less.

K. Krippendorff, Content Analysis, chapter "Reliability". With o_ck the coincidences of values c and k (each unit with
m >= 2 answers counts every ordered pair of them 1 / (m - 1) times), n_c = sum_k o_ck and n = sum_c n_c,

    alpha = 1 - (n - 1) sum_ck o_ck d_ck^2 / sum_ck n_c n_k d_ck^2 ,

nominal: d = 0 or 1; ordinal: d_ck = sum_{g=c..k} n_g - (n_c + n_k) / 2. Answers may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Metric = Literal["nominal", "ordinal"]


def krippendorff_alpha(units: Iterable[Sequence[float]], metric: Metric) -> float | None:
    """Of the answers to each unit (what was rated), in any order of raters. None where no unit has two answers, or all
    answers are the same, so that chance cannot be told from agreement."""
    paired = [list(answers) for answers in units if len(answers) > 1]
    values = sorted({answer for answers in paired for answer in answers})
    if len(values) < 2:
        return None
    coincidences = np.zeros((len(values), len(values)))
    for answers in paired:
        counts = np.array([answers.count(value) for value in values], dtype=float)
        coincidences += (np.outer(counts, counts) - np.diag(counts)) / (len(answers) - 1)
    totals = coincidences.sum(axis=1)
    distance = _squared_distances(totals, metric)
    expected = float(totals @ distance @ totals) / (float(totals.sum()) - 1)
    return 1 - float((coincidences * distance).sum()) / expected


def _squared_distances(totals: npt.NDArray[np.float64], metric: Metric) -> npt.NDArray[np.float64]:
    if metric == "nominal":
        return 1 - np.eye(len(totals))
    middle = np.cumsum(totals) - totals / 2  # the distance is the number of answers between the middles of c and k
    squared: npt.NDArray[np.float64] = (middle[:, None] - middle[None, :]) ** 2
    return squared
