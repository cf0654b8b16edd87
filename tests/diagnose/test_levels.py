"""The power of the noise level that the lengths of gradients follow."""

from __future__ import annotations

import pytest
import torch

from marble_rl.diagnose.levels import LevelDiagnosis, advice, fitted_power


def found(lengths: list[float], power: float | None) -> LevelDiagnosis:
    levels = [0.8, 0.4][: len(lengths)]
    return LevelDiagnosis(
        names=("a",),
        step=1,
        batches=3,
        images=8,
        noise="group",
        levels=levels,
        lengths=lengths,
        signals=[[None]] * len(lengths),
        power=power,
    )


def test_the_power_is_that_of_the_lengths() -> None:
    levels = torch.tensor([1.0, 0.7, 0.3, 0.001])
    assert fitted_power(levels, 3 * levels**1.5) == pytest.approx(1.5, rel=1e-5)
    assert fitted_power(levels, torch.tensor([1.0, 1.0, 1.0, 0.0])) == pytest.approx(0.0)
    assert fitted_power(levels[:1], torch.ones(1)) is None
    assert fitted_power(levels, torch.zeros(4)) is None


def test_advice() -> None:
    assert "loss.timestep_power: -1.5 evens them out" in advice(found([1.0, 0.35], 1.51))
    assert "loss.timestep_power: 0 suits them" in advice(found([1.0, 0.6], 0.7))
    assert "loss.timestep_power: 0 suits them" in advice(found([1.0], None))
