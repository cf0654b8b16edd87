"""Krippendorff's alpha against a published example, and against a calculation by hand."""

from __future__ import annotations

import pytest

from marble_rl.rating.agreement import Metric, krippendorff_alpha

# K. Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), section C: four observers, twelve units,
# missing data.
PUBLISHED = [
    "1 2 3 3 2 1 4 1 2 . . .",
    "1 2 3 3 2 2 4 1 2 5 . 3",
    ". 3 3 3 2 3 4 2 2 5 1 .",
    "1 2 3 3 2 4 4 1 2 5 1 .",
]


@pytest.mark.parametrize(("metric", "alpha"), [("nominal", 0.743), ("ordinal", 0.815)])
def test_published_example(metric: Metric, alpha: float) -> None:
    units = [[float(a) for a in column if a != "."] for column in zip(*(o.split() for o in PUBLISHED), strict=True)]
    assert krippendorff_alpha(units, metric) == pytest.approx(alpha, abs=5e-4)


def test_by_hand() -> None:
    """Two raters, units (1,1), (1,2), (2,2): o_11 = 2, o_22 = 2, o_12 = o_21 = 1, n_1 = n_2 = 3, n = 6. So the observed
    disagreement is 2, the expected one 2 * 3 * 3 / 5 = 18 / 5, and alpha = 1 - 10 / 18. With two values all metrics
    agree."""
    units = [[1.0, 1.0], [1.0, 2.0], [2.0, 2.0]]
    assert krippendorff_alpha(units, "nominal") == pytest.approx(4 / 9)
    assert krippendorff_alpha(units, "ordinal") == pytest.approx(4 / 9)


def test_complete_agreement_and_opposition() -> None:
    assert krippendorff_alpha([[1, 1, 1], [5, 5, 5], [3, 3]], "ordinal") == pytest.approx(1)
    opposed = krippendorff_alpha([[1, 5], [5, 1]], "ordinal")
    assert opposed is not None
    assert opposed < 0


@pytest.mark.parametrize("units", [[], [[1], [2]], [[3, 3], [3, 3]]], ids=["none", "one rater", "no variation"])
def test_unknown(units: list[list[float]]) -> None:
    assert krippendorff_alpha(units, "ordinal") is None
