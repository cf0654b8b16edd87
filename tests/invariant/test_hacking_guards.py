"""Bounds, schedules and watched rewards, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runs import base_config, lora_bytes, marble, metrics, train, write_config


def entry(**more: Any) -> dict[str, Any]:
    return {"name": "bright", "type": "brightness", **more}


def config(path: Path, model: Path, *rewards: dict[str, Any], **changes: Any) -> Path:
    rollout = {**base_config(model)["rollout"], "updates": 1}
    return write_config(path, model, rewards=list(rewards), **{"rollout": rollout, **changes})


SMALL = {"name": "small", "type": "jpeg_compressibility"}


def test_beyond_its_bounds_a_reward_teaches_nothing(tiny_sd3: Path, tmp_path: Path) -> None:
    """All scores lie above the cap: no gradient is left of the reward, while the log shows its scores."""
    steps = ["--set", "trainer.steps=3"]
    capped = config(tmp_path / "capped.yaml", tiny_sd3, SMALL, entry(clip=[None, 0.01]))
    loose = config(tmp_path / "loose.yaml", tiny_sd3, SMALL, entry(clip=[-5, 5]))
    free = config(tmp_path / "free.yaml", tiny_sd3, SMALL, entry())
    for name in (capped, loose, free):
        train(name, tmp_path / name.stem, *steps)
    first = metrics(tmp_path / "capped")[0]
    assert first["guard/clipped/bright"] == 1.0
    assert first["guard/no_signal/bright"] == 1.0
    assert first["reward/bright"] == metrics(tmp_path / "free")[0]["reward/bright"] > 0.01
    assert lora_bytes(tmp_path / "loose") == lora_bytes(tmp_path / "free") != lora_bytes(tmp_path / "capped")
    assert "guard/clipped/bright" not in metrics(tmp_path / "loose")[0]


def test_a_reward_that_is_off_is_not_scored(tiny_sd3: Path, tmp_path: Path) -> None:
    scheduled = config(tmp_path / "c.yaml", tiny_sd3, SMALL, entry(schedule=[[0, 2], [4, None]]))
    train(scheduled, tmp_path / "run", "--set", "trainer.steps=6", "--set", "balance.refresh_every=1")
    lines = metrics(tmp_path / "run")
    assert [("reward/bright" in line) for line in lines] == [True, True, False, False, True, True]
    assert [line["guard/no_signal/bright"] for line in lines] == [0, 0, 1, 1, 0, 0]

    # It may be switched off in a run that goes on, which is then no longer the run that was begun.
    outcome = train(
        config(tmp_path / "off.yaml", tiny_sd3, SMALL, entry(schedule=[[0, 6]])),
        tmp_path / "run",
        *("--resume", "--set", "trainer.steps=8", "--set", "balance.refresh_every=1"),
    )
    assert "the run differs from the one that was started" in outcome.err
    assert "reward/bright" not in metrics(tmp_path / "run")[-1]


@pytest.mark.full
def test_a_watched_reward_stops_the_run_or_warns(tiny_sd3: Path, tmp_path: Path) -> None:
    """Held out is the opposite of what is trained, so it falls as that rises."""
    held = {"name": "dark", "type": "rewards_for_tests:darkness", "held_out": True}
    settings = {
        "rollout": {"groups": 4, "group_size": 8, "steps": 3},
        "optimizer": {"lr": 0.03},
        "trainer": {"steps": 60, "save_every": 50, "micro_batch": 32},
    }

    def watching(action: str) -> Path:
        watched = {**held, "watch": {"action": action, "window": 4}}
        return config(tmp_path / f"{action}.yaml", tiny_sd3, entry(), watched, **settings)

    stopped = marble("train", watching("stop"), "--out", tmp_path / "run")
    assert stopped.code == 3
    assert "evaluation-only reward 'dark' fell from" in stopped.err
    lines = metrics(tmp_path / "run")
    assert lines[-1]["guard/watch/dark"] == 1.0
    assert sum(line["guard/watch/dark"] for line in lines) == 1.0
    assert lines[0]["watch/dark"] == pytest.approx(1 - lines[0]["reward/bright"])
    assert len(lines) % 4 == 0
    assert (tmp_path / "run" / "checkpoints" / f"step-{len(lines)}").is_dir()

    more = ["--set", f"trainer.steps={len(lines) + 4}"]
    warned = train(watching("warn"), tmp_path / "run", "--resume", *more)
    assert "warning after step" in warned.err
    train(watching("warn"), tmp_path / "whole", *more)
    assert lora_bytes(tmp_path / "whole") == lora_bytes(tmp_path / "run")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")


@pytest.mark.full
def test_a_watched_reward_is_logged_once_a_rollout(tiny_sd3: Path, tmp_path: Path) -> None:
    held = {"name": "dark", "type": "rewards_for_tests:darkness", "held_out": True, "watch": {"window": 2}}
    rollout = {**base_config(tiny_sd3)["rollout"], "updates": 2}
    train(
        config(tmp_path / "c.yaml", tiny_sd3, entry(), held, rollout=rollout),
        tmp_path / "run",
        "--set",
        "trainer.steps=4",
    )
    for key in ("watch/dark", "guard/watch/dark"):
        assert [line["step"] for line in metrics(tmp_path / "run") if key in line] == [1, 3]
    assert marble("report", tmp_path / "run").code == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clip": [None, None]}, "rewards.1 (bright).clip: [None, None] bounds nothing"),
        ({"clip": [2, 1]}, "rewards.1 (bright).clip"),
        ({"schedule": [[5, 5]]}, "rewards.1 (bright).schedule: [5, 5] holds no step"),
        ({"schedule": []}, "rewards.1 (bright).schedule: is empty"),
        ({"schedule": [[-1, 5]]}, "rewards.1.schedule"),
        ({"watch": {}}, "rewards.1 (bright).watch: only evaluation-only rewards are watched"),
        ({"held_out": True, "clip": [0, 1]}, "rewards.1 (bright): is held out"),
        ({"held_out": True, "watch": {"windows": 3}}, "Did you mean 'window'?"),
        ({"held_out": True, "watch": {"window": 1}}, "rewards.1.watch.window"),
        ({"precision": "int8"}, "rewards.1.precision"),
        ({"device": "cuda:77"}, "rewards (bright).device: 'cuda:77' given, but torch finds the CPU only"),
    ],
)
def test_bad_settings_are_refused(tiny_sd3: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    outcome = marble("train", config(tmp_path / "c.yaml", tiny_sd3, SMALL, entry(**changes)), "--out", tmp_path / "run")
    assert outcome.code == 2
    assert says in outcome.err
    assert not (tmp_path / "run").exists()


def test_some_reward_must_be_on(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = ({**SMALL, "schedule": [[0, 2]]}, entry(schedule=[[3, None]]))
    outcome = marble("config", "check", config(tmp_path / "c.yaml", tiny_sd3, *rewards))
    assert outcome.code == 2
    assert "no reward's `schedule` covers step 2" in outcome.err


def test_none_from_a_reward_is_not_a_score(tiny_sd3: Path, tmp_path: Path) -> None:
    """A reward that has nothing to say about an image: its advantage is 0, and evaluations leave the image out."""
    rewards = (SMALL, {"name": "some", "type": "rewards_for_tests:two_of_three"})
    train(config(tmp_path / "c.yaml", tiny_sd3, *rewards), tmp_path / "run", "--set", "trainer.steps=2")
    outcome = marble("evaluate", tmp_path / "run", "--images", 4, "--json")
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    scores = [image["scores"]["some"] for image in report["weights"]["base"]["images"]]
    assert None in scores
    told = [score for score in scores if score is not None]
    assert report["weights"]["base"]["means"]["some"] == pytest.approx(sum(told) / len(told))
