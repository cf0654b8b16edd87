"""Updates that are skipped because a loss or gradient is not finite."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from marble_rl.rollout.rollout import roll_out
from marble_rl.training.experience import ExperienceSource
from marble_rl.types import Rollout
from runs import lora_bytes, marble, metrics, train

SMALL = ("--set", "rollout.groups=2", "--set", "rollout.group_size=2")
"""For tests of what happens from step to step, whatever a step computes."""


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of the rollouts whose latents, once scored, are not finite."""
    numbers: set[int] = set()
    real = roll_out

    def poison(*arguments: Any, index: int, **settings: Any) -> Rollout:
        rollout = real(*arguments, index=index, **settings)
        return dataclasses.replace(rollout, x0=rollout.x0 * float("nan")) if index in numbers else rollout

    monkeypatch.setattr("marble_rl.training.experience.roll_out", poison)
    return numbers


SKIP = ("--set", "optimizer.non_finite=skip", *SMALL)


@pytest.mark.parametrize(
    "settings",
    [
        ("balance={type: marble, refresh_every: 3}",),
        pytest.param(("balance={type: min_variance}",), marks=pytest.mark.full),
        pytest.param(("balance={type: fair}", "rewards.1.guard={}"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_skipped_update_changes_nothing_and_resumes(
    config_file: Path, tmp_path: Path, poisoned: set[int], monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    """The run is, bit for bit, one to which the bad rollout never happened: no step, moment, EMA, old policy,
    coefficient, momentum, level."""
    poisoned.add(1)
    skip = (*SKIP, "--set", "rollout.group_size=4")  # advantages of two are +-1
    skip += tuple(word for setting in settings for word in ("--set", setting))
    train(config_file, tmp_path / "skipping", *skip)
    lines = metrics(tmp_path / "skipping")
    assert [line["guard/skipped"] for line in lines] == [0, 0, 1, 0, 0, 0, 0, 0]
    train(config_file, tmp_path / "resumed", *skip, "--set", "trainer.steps=3")  # in the rollout after the skip
    train(config_file, tmp_path / "resumed", *skip, "--resume")
    assert lora_bytes(tmp_path / "resumed") == lora_bytes(tmp_path / "skipping")

    poisoned.clear()
    gather = ExperienceSource.gather
    monkeypatch.setattr(ExperienceSource, "gather", lambda self, i, *rest: gather(self, i + (i >= 1), *rest))
    train(config_file, tmp_path / "without", *skip)
    assert lora_bytes(tmp_path / "skipping") == lora_bytes(tmp_path / "without")
    for part in ("adapters", "optimizer"):
        one, other = (
            load_file(tmp_path / run / "checkpoints" / "step-8" / f"{part}.safetensors")
            for run in ("skipping", "without")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert part != "adapters" or any(one[name].any() for name in one if "lora_B" in name), "nothing was trained"
    assert [{**line, "guard/skipped": 0} for line in lines] == metrics(tmp_path / "without")


def test_a_skipped_rollout_is_gone_before_the_next_is_drawn(
    config_file: Path, tmp_path: Path, poisoned: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned.update({1, 2, 3})
    gather = ExperienceSource.gather
    drawn: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(self: ExperienceSource, *arguments: Any) -> Any:
        alive.append(sum(rollout() is not None for rollout in drawn))
        experience = gather(self, *arguments)
        drawn.append(weakref.ref(experience.rollout))
        return experience

    monkeypatch.setattr(ExperienceSource, "gather", watched)
    train(config_file, tmp_path / "run", *SKIP, "--set", "trainer.steps=4")
    assert alive == [0] * 5


def test_by_default_it_stops(config_file: Path, tmp_path: Path, poisoned: set[int]) -> None:
    poisoned.add(1)
    outcome = marble("train", config_file, "--out", tmp_path / "run", *SMALL)
    assert outcome.code == 3
    assert "step 3: a loss or gradient is not finite; the update was not applied" in outcome.err
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-2" / "adapters.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    assert "guard/skipped" not in metrics(tmp_path / "run")[0]


def test_too_many_in_a_row_stop_the_run(config_file: Path, tmp_path: Path, poisoned: set[int]) -> None:
    poisoned.update(range(1, 100))
    outcome = marble("train", config_file, "--out", tmp_path / "run", *SKIP)
    assert outcome.code == 3
    assert "10 updates in a row were skipped, and now step 3: a loss or gradient is not finite" in outcome.err
    assert len(metrics(tmp_path / "run")) == 2
