"""The loss scale of float16."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from marble_rl.training.loss_scale import LossScale
from runs import lora_bytes, metrics, train

SMALL = ("--set", "rollout.groups=2", "--set", "rollout.group_size=2")
"""For tests of what happens from step to step, whatever a step computes."""


def overflowing(config: Path, run: Path, first: float, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(LossScale, "FIRST", first)
    train(config, run, *SMALL, "--set", "model.dtype=float16", "--set", "trainer.steps=4", *arguments)


@pytest.mark.full
def test_an_overflow_changes_nothing_but_the_scale(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that finds its scale by overflowing is, bit for bit, one that began with it."""
    overflowing(config_file, tmp_path / "high", 2.0**28, monkeypatch)
    first = metrics(tmp_path / "high")[0]
    assert first["guard/overflows"] == 28 - torch.tensor(first["guard/loss_scale"]).log2()
    assert first["guard/overflows"] > 3
    overflowing(config_file, tmp_path / "right", first["guard/loss_scale"], monkeypatch)
    assert lora_bytes(tmp_path / "high") == lora_bytes(tmp_path / "right")
    same = [{k: v for k, v in line.items() if k != "guard/overflows"} for line in metrics(tmp_path / "high")]
    assert same == [{k: v for k, v in line.items() if k != "guard/overflows"} for line in metrics(tmp_path / "right")]

    # A resumed run goes on with the scale it had, not with the first.
    overflowing(config_file, tmp_path / "resumed", 2.0**28, monkeypatch, "--set", "trainer.steps=2")
    overflowing(config_file, tmp_path / "resumed", 2.0**28, monkeypatch, "--resume")
    assert lora_bytes(tmp_path / "resumed") == lora_bytes(tmp_path / "high")
    assert metrics(tmp_path / "resumed")[2]["guard/overflows"] == 0


def test_the_scale_grows_back_and_is_saved() -> None:
    scale = LossScale(torch.float16)
    scale.value = 8.0
    for _ in range(LossScale.GROW_AFTER - 1):
        scale.update_done()
    again = LossScale(torch.float16)
    again.load_state_dict(scale.state_dict())
    assert again.value == 8.0
    again.update_done()
    assert again.value == 16.0
    for dtype in (torch.float32, torch.bfloat16):
        assert LossScale(dtype).value == 1.0


def test_a_run_that_is_continued_in_float16_begins_with_the_first_scale(config_file: Path, tmp_path: Path) -> None:
    steps = "trainer.steps={}".format
    train(config_file, tmp_path / "run", *SMALL, "--set", steps(1))
    train(config_file, tmp_path / "run", *SMALL, "--set", steps(2), "--set", "model.dtype=float16", "--resume")
    line = metrics(tmp_path / "run")[1]
    assert line["guard/loss_scale"] * 2 ** line["guard/overflows"] == LossScale.FIRST

    scale = LossScale(torch.float16)
    scale.load_state_dict({"value": 1.0, "clean": 77})  # as older versions saved it for other numbers
    assert scale.state_dict() == {"value": LossScale.FIRST, "clean": 0}
    assert LossScale(torch.bfloat16).state_dict() == {}


def test_gradients_that_no_scale_makes_finite_leave_it_as_it_was() -> None:
    scale, tried = LossScale(torch.float16), []
    scale.load_state_dict({"value": 8.0, "clean": 150})

    def never_finite(scale: float) -> Any:
        tried.append(scale)
        return SimpleNamespace(is_finite=False, losses_are_finite=True)

    assert not scale.with_retries(never_finite).is_finite
    assert tried == [8.0, 4.0, 2.0, 1.0]
    assert scale.state_dict() == {"value": 8.0, "clean": 150}
