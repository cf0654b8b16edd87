"""`marble rewards check`: what it finds out about good rewards and bad ones."""

from __future__ import annotations

import json
import os
import struct
import zlib
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
        ({"type": "rewards_for_tests:one_word"}, "returned 'good' (str) in place of one score for each image"),
        ({"type": "rewards_for_tests:paints"}, "it writes to its images, which all rewards share"),
        ({"type": "rewards_for_tests:Exits", "params": {"where": "load"}}, "cannot be loaded: SystemExit: 0"),
        ({"type": "rewards_for_tests:Exits", "params": {"where": "applies_to"}}, "to say whether it applies to prompt"),
        ({"type": "rewards_for_tests:Exits", "params": {"where": "score"}}, "SystemExit: 0"),
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
        (("--image", "."), "--image: cannot read . as a picture (not a file)"),
        (("--device", "warp"), "unknown device 'warp'"),
    ],
)
def test_bad_arguments(tmp_path: Path, more: tuple[object, ...], says: str) -> None:
    outcome = check(tmp_path, {"name": "bright", "type": "brightness"}, more=more)
    assert outcome.code == 2
    assert says in outcome.err


def png_of(width: int, height: int) -> bytes:
    """A picture of one colour: however large, a few bytes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (png_of(40_000, 40_000), "exceeds limit"),
        (png_of(10_000, 10_000), "exceeds limit"),
        (png_of(64, 64), "image file is truncated"),
        (png_of(8, 8)[:40], "cannot read"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 40, "cannot read"),
        (b"", "cannot identify image file"),
        (None, "not a file"),
    ],
)
def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "odd.png"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    outcome = check(tmp_path, {"name": "bright", "type": "brightness"}, more=("--image", file))
    assert outcome.code == 2
    assert f"--image: cannot read {file} as a picture" in outcome.err
    assert says in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("where", ["import", "__init__", "params"])
@pytest.mark.parametrize("end", ["sys.exit(0)", "raise KeyboardInterrupt", "raise GeneratorExit"])
def test_a_module_that_ends_the_program_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, end: str
) -> None:
    """Never exit code 0 with nothing done."""
    module = f"ends_{where.strip('_')}_{abs(hash(end))}"
    (tmp_path / f"{module}.py").write_text(
        "import sys\nfrom marble_rl.rewards import RewardBase\n"
        + (f"{end}\n" if where == "import" else "")
        + "class Ends(RewardBase):\n"
        + (f"  def __init__(self): {end}\n" if where == "__init__" else "")
        + "  @classmethod\n  def params_model(cls, params):\n"
        + (f"    {end}\n" if where == "params" else "    return cls.Params\n")
        + "  def score(self, batch): return []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    outcome = check(tmp_path, {"name": "ends", "type": f"{module}:Ends"})
    assert outcome.code == 2
    assert "rewards.0 (ends)." in outcome.err
    assert {"s": "SystemExit: 0", "r": end.removeprefix("raise ")}[end[0]] in outcome.err


def test_traits_of_another_kind(tmp_path: Path) -> None:
    outcome = check(tmp_path, {"name": "odd", "type": "rewards_for_tests:OddTraits"})
    assert outcome.code == 2
    assert "rewards_for_tests:OddTraits: `traits` must be a marble_rl.rewards.Traits, but is {'range'" in outcome.err
