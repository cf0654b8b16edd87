"""The noise of an evaluation, on scores with a known one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from marble_rl.runs.scores import ImageScores, Scores, WeightsScores
from tools.study.noise import main, noise_of_gains


def scored(dice: random.Random, mean: float, spread: float) -> WeightsScores:
    images = [
        ImageScores(f"prompt {p}", "general", p, i, {"r": mean + p + spread * dice.gauss(0, 1), "rare": None})
        for p in range(400)
        for i in range(5)
    ]
    return WeightsScores({"r": mean}, images)


def test_it_is_what_images_of_one_prompt_differ_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dice = random.Random(0)
    weights = {"base": scored(dice, 0.0, 3.0), "ema": scored(dice, 1.0, 4.0)}
    scores = Scores(step=1, held_out_rewards=[], differences={}, weights=weights)
    assert noise_of_gains(scores) == pytest.approx({"r": 5 / 400**0.5}, rel=0.05)  # not what prompts differ by
    scores.write(tmp_path / "scores.json")
    assert main([str(tmp_path / "scores.json")]) == 0
    assert "rare" not in capsys.readouterr().out
