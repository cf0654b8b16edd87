"""`marble rewards check`: what it finds out about good rewards and bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from runs import Outcome, marble


def check(folder: Path, *rewards: dict[str, Any], more: tuple[object, ...] = ()) -> Outcome:
    config = folder / "rewards.yaml"
    config.write_text(yaml.safe_dump({"rewards": list(rewards)}))
    return marble("rewards", "check", config, *more)


@pytest.mark.full
def test_good_rewards(tmp_path: Path) -> None:
    rewards = [
        {"name": "size", "type": "jpeg_compressibility"},
        {"name": "red", "type": "colour"},
        {"name": "moves", "type": "motion"},
        {"name": "worst", "type": "frames", "params": {"reward": {"type": "brightness"}, "reduce": "worst"}},
    ]
    outcome = check(tmp_path, *rewards, more=("--json",))
    assert outcome.code == 0, outcome.err
    found = {entry["name"]: entry for entry in json.loads(outcome.out)}
    assert list(found) == [reward["name"] for reward in rewards]
    for entry in found.values():
        assert entry["deterministic"]
        assert entry["milliseconds"] > 0
        assert entry["memory_bytes"] >= 0
        assert entry["batch_difference"] < 1e-6
        assert entry["error"] is None
    assert "red" in found["red"]["prompt"], "the sample prompt is one that the reward applies to"
    assert found["moves"]["score"] > 0.001

    shown = check(tmp_path, *rewards)
    assert shown.code == 0
    for reward in rewards:
        assert str(reward["name"]) in shown.out


def test_a_picture_and_a_prompt_of_ones_own(tmp_path: Path) -> None:
    Image.fromarray(np.full((40, 60, 3), 51, np.uint8)).save(tmp_path / "dark.png")
    more = ("--image", tmp_path / "dark.png", "--prompt", "night", "--only", "bright", "--json")
    rewards = [{"name": "bright", "type": "brightness"}, {"name": "absent", "type": "rewards_for_tests:NoWeights"}]
    (found,) = json.loads(check(tmp_path, *rewards, more=more).out)
    assert found["score"] == pytest.approx(0.2)
    assert found["prompt"] == "night"


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({"type": "rewards_for_tests:NoWeights"}, "FileNotFoundError: weights.safetensors"),
        ({"type": "rewards_for_tests:After", "params": {"what": "nan", "calls": 1}}, "returned nan"),
        ({"type": "rewards_for_tests:After", "params": {"what": "raise", "calls": 0}}, "fell over"),
        ({"type": "rewards_for_tests:Fickle"}, "declares itself deterministic"),
        ({"type": "rewards_for_tests:constant"}, "gave 0.5 to 6 different pictures; a constant reward teaches nothing"),
        ({"type": "rewards_for_tests:in_words"}, "returned '0.5' (str) for image 0 of its batch, not a number"),
        ({"type": "rewards_for_tests:one_word"}, "returned 'good' in place of one score for each image"),
    ],
)
def test_bad_rewards_are_told_and_the_others_checked(tmp_path: Path, reward: dict[str, Any], says: str) -> None:
    rewards = ({"name": "bad", **reward}, {"name": "good", "type": "brightness"})
    assert says in check(tmp_path, *rewards).out
    outcome = check(tmp_path, *rewards, more=("--json",))
    assert outcome.code == 1
    bad, good = json.loads(outcome.out)
    assert says in bad["error"]
    assert (good["error"], good["finite"]) == (None, True)
    assert "1 of 2 rewards failed: bad" in outcome.err


def test_nothing_found_is_no_error_and_pictures_that_differ_settle_it(tmp_path: Path) -> None:
    """A reward for something that no test picture shows is at the end of its range for all of them."""
    reward = {"name": "finds", "type": "rewards_for_tests:FindsBlue"}
    outcome = check(tmp_path, reward)
    assert outcome.code == 0
    assert "finds: gave 0 to 6 different pictures" in outcome.out
    for colour, name in (((0, 0, 255), "good.png"), ((255, 0, 0), "bad.png")):
        Image.new("RGB", (30, 20 if name == "good.png" else 40), colour).save(tmp_path / name)
    more = ("--image", tmp_path / "good.png", "--image", tmp_path / "bad.png")
    (found,) = json.loads(check(tmp_path, reward, more=(*more, "--json")).out)
    assert (found["score"], found["lowest"], found["highest"], found["warning"]) == (1.0, 0.0, 1.0, None)


def test_a_path_with_a_dot_in_place_of_the_colon(tmp_path: Path) -> None:
    outcome = check(tmp_path, {"name": "mine", "type": "my_rewards.mine"})
    assert outcome.code == 2
    assert "Did you mean 'my_rewards:mine'?" in outcome.err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--only", "brigth"), "Did you mean 'bright'?"),
        (("--image", "nowhere.png"), "--image: cannot read nowhere.png"),
        (("--image", __file__), "--image: cannot read"),
        (("--device", "warp"), "unknown device 'warp'"),
    ],
)
def test_bad_arguments(tmp_path: Path, more: tuple[object, ...], says: str) -> None:
    outcome = check(tmp_path, {"name": "bright", "type": "brightness"}, more=more)
    assert outcome.code == 2
    assert says in outcome.err
