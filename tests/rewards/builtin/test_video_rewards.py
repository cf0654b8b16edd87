"""Rewards for videos: frames of any image reward, steadiness, motion; on videos whose answers are known."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers import CLIPModel

from marble_rl.errors import InputError, RewardFailed
from marble_rl.mini import WEIGHTS
from marble_rl.rewards.builtin.frames import Frames, chosen_frames
from marble_rl.rewards.builtin.motion import BLOCK, FASTEST, REACH, STILL_FIRST, STRIDE, search
from marble_rl.rewards.core.base import RewardBase, RewardBatch, Traits, traits_of
from marble_rl.rewards.core.calls import CalledReward
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt
from tools.mini.render import render
from tools.mini.scenes import Item, Scene

RED = "rewards_for_tests:RedShare"


def built(kind: str, **params: Any) -> Any:
    return build_rewards([RewardConfig(type=kind, name="r", params=params)])["r"]


def scores(reward: Any, *videos: np.ndarray) -> list[Any]:
    return list(reward.score(RewardBatch(np.stack(videos), [Prompt(i, f"red {i}", "s") for i in range(len(videos))])))


def reds(*levels: float) -> np.ndarray:
    """A video of plain frames with these shares of red. [F, 4, 4, 3]"""
    video = np.zeros((len(levels), 4, 4, 3), dtype=np.uint8)
    video[..., 0] = np.array(levels).reshape(-1, 1, 1) * 255
    return video


# frames


@pytest.mark.parametrize(
    ("frames", "expected"),
    [("all", range(9)), ("first", [0]), ("last", [8]), (2, [0, 8]), (3, [0, 4, 8]), (4, [0, 3, 5, 8]), (12, range(9))],
)
def test_frames_are_chosen_evenly_with_both_ends(frames: str | int, expected: list[int]) -> None:
    reward = built("frames", reward={"type": "brightness"}, frames=frames)
    video = np.zeros((9, 2, 2, 3), dtype=np.uint8) + np.arange(9, dtype=np.uint8).reshape(-1, 1, 1, 1)
    assert scores(reward, video) == pytest.approx([np.mean(list(expected)) / 255])


def test_every_frame_counts_once_however_few_there_are() -> None:
    for count in range(1, 12):
        for wanted in range(2, 14):
            chosen = chosen_frames(wanted, count)
            assert sorted(set(chosen)) == chosen
            assert (chosen[0], chosen[-1], len(chosen)) == (0, count - 1, min(count, wanted))


@pytest.mark.parametrize(
    ("reduce", "expected"), [("mean", 0.4), ("worst", 0.0), ("steady", 0.2), ("best", 0.8), ("last", 0.4)]
)
def test_where_higher_is_better_the_worst_frame_is_the_lowest(reduce: str, expected: float) -> None:
    assert scores(built("frames", reward={"type": "rewards_for_tests:steady"}, reduce=reduce), reds(0, 0.8, 0.4)) == [
        pytest.approx(expected)
    ]


@pytest.mark.parametrize(("reduce", "expected"), [("worst", 0.8), ("best", 0.2), ("last", 0.4)])
def test_where_lower_is_better_it_is_the_highest(reduce: str, expected: float) -> None:
    assert scores(built("frames", reward={"type": RED}, reduce=reduce), reds(0.2, 0.8, 0.4)) == [
        pytest.approx(expected)
    ]


@pytest.mark.parametrize(("reduce", "expected"), [("mean", 0.4), ("worst", 0.6), ("best", 0.2), ("last", 0.6)])
def test_frames_without_a_score_do_not_count(reduce: str, expected: float) -> None:
    reward = built("frames", reward={"type": RED}, reduce=reduce)
    silent_first, silent_last, silent = reds(0, 0.2, 0.6), reds(0.2, 0.6, 0), reds(0, 0, 0)
    assert scores(reward, silent_first, silent_last, silent) == [pytest.approx(expected), pytest.approx(expected), None]


def test_traits_prompts_and_weights_are_those_of_the_image_reward() -> None:
    reward = built("frames", reward={"type": RED, "params": {}})
    inner = traits_of(reward.reward)
    assert traits_of(reward) == Traits(
        device=inner.device,
        precision=inner.precision,
        range=inner.range,
        higher_is_better=inner.higher_is_better,
        deterministic=inner.deterministic,
        media="video",
        concurrency=inner.concurrency,
        retries=inner.retries,
    )
    assert [reward.applies_to(Prompt(0, text, "s")) for text in ("a red cup", "a cup")] == [True, False]
    reward.load(torch.device("meta"))
    assert reward.reward.loaded == torch.device("meta")


def test_frames_go_in_one_flat_batch_unless_the_reward_takes_fewer() -> None:
    reward = built("frames", reward={"type": RED})
    together = scores(reward, reds(0.2, 0.4, 0.6), reds(0.8, 0, 1))
    assert reward.reward.calls == [["red 0", "red 0"], ["red 0", "red 1"], ["red 1", "red 1"]]
    assert together == [scores(reward, reds(0.2, 0.4, 0.6))[0], scores(reward, reds(0.8, 0, 1))[0]]
    whole = built("frames", reward={"type": RED, "params": {"batch_size": None}})
    assert scores(whole, reds(0.2, 0.4, 0.6), reds(0.8, 0, 1)) == together
    assert whole.reward.calls == [["red 0"] * 3 + ["red 1"] * 3]


def test_the_mean_stays_in_range() -> None:
    """The sum of equal numbers divided by how many they are need not be that number in floating point."""
    reward = built("frames", reward={"type": "brightness"})
    for level in range(256):
        for count in (3, 10, 49):
            (score,) = scores(reward, np.full((count, 1, 1, 3), level, dtype=np.uint8))
            assert score == level / 255


@pytest.mark.parametrize(
    ("what", "message"), [("nan", "returned nan for image"), ("short", "returned 5 scores for 6 images")]
)
@pytest.mark.parametrize("reduce", ["mean", "worst", "best", "last"])
def test_a_bad_score_cannot_hide_among_the_other_frames(what: str, message: str, reduce: str) -> None:
    inner = {"type": "rewards_for_tests:After", "params": {"what": what, "calls": 0}}
    with pytest.raises(ValueError, match=message):
        scores(built("frames", reward=inner, reduce=reduce), reds(0.1, 0.2, 0.3), reds(0.4, 0.5, 0.6))


@pytest.mark.parametrize("frame", range(12))
@pytest.mark.parametrize("most", [None, 2, 5])
def test_a_bad_frame_is_told_as_its_video(frame: int, most: int | None) -> None:
    """The frame with no red at all is the one without a number."""

    class Unsure(RewardBase):
        traits = Traits(batch_size=most)

        def score(self, batch: RewardBatch) -> list[float]:
            return [1.0 if image.any() else math.nan for image in batch.images]

    reward = Frames(reward={"type": "brightness"})
    reward.reward = Unsure()
    reward.load(torch.device("cpu"))
    videos = np.ones((4, 3, 2, 2, 3), dtype=np.uint8)
    videos.reshape(12, -1)[frame] = 0
    batch = RewardBatch(videos, [Prompt(i, f"video {i}", "s") for i in range(4)])
    called = CalledReward(RewardConfig(type="x:y", name="r", retries=1, backoff=0.0), reward)
    with pytest.raises(RewardFailed, match=rf"prompt {frame // 3} \('video {frame // 3}'\): BadScore: returned nan"):
        called.score(batch)


def test_a_frame_out_of_range_is_an_error_whatever_the_mean() -> None:
    reward = built("frames", reward={"type": RED})
    reward.traits = replace(reward.traits, range=(0.0, 0.5))
    assert scores(reward, reds(0.2, 0.4)) == [pytest.approx(0.3)]
    with pytest.raises(ValueError, match=r"returned 0\.8 for image . of its batch, outside its range \[0\.0, 0\.5\]"):
        scores(reward, reds(0, 0.1, 0.8))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"reward": {"type": "brightnes"}}, r"reward\.type: unknown reward 'brightnes'. Did you mean 'brightness'"),
        ({"reward": {"type": "brightness", "params": {"tarket": 1}}}, r"reward\.params\.tarket: .*'tarket'.*'target'"),
        (
            {"reward": {"type": "colour", "params": {"colour": "x"}}},
            r"reward\.params\.colour: expected 'red', .* got \"x\"",
        ),
        ({"reward": {"type": "colour", "params": "x"}}, r"reward\.params: expected a mapping .* got \"x\""),
        ({"reward": {"type": "colour", "parms": {}}}, r"reward\.parms: unknown key 'parms'. Did you mean 'params'"),
        ({"reward": "colour"}, r"reward: expected a mapping .* got \"colour\""),
        ({"reward": {"params": {}}}, r"reward\.type: is missing; add it"),
        ({"reward": {"type": "motion"}}, r"reward\.type: 'motion' scores videos; use it by itself"),
        (
            {"reward": {"type": "colour"}, "frames": 1},
            "frames: expected 'all', 'first' or 'last' or a number greater than or equal to 2, got 1",
        ),
        ({"reward": {"type": "colour"}, "frames": True}, "frames: .* got true"),
        ({"reward": {"type": "colour"}, "frames": "some"}, 'frames: .* got "some"'),
        (
            {"reward": {"type": "colour"}, "reduce": "min"},
            "reduce: expected 'mean', 'worst', 'steady', 'best' or 'last', ",
        ),
    ],
)
def test_wrong_params_of_frames_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=r"rewards\.0 \(r\)\.params\." + message):
        built("frames", **params)


# temporal_consistency


def scene(colour: str, shape: str, x: float, light: str = "day") -> np.ndarray:
    drawn = Scene("", "composition", items=(Item(shape, colour, x, 0.6, 0.2),), light=light)
    return np.asarray(render(drawn, random.Random(0)))


@pytest.fixture(scope="module")
def scenes() -> dict[str, np.ndarray]:
    """Videos of eight frames in the embedded world."""
    star, marble = scene("red", "star", 0.5), scene("blue", "marble", 0.3)
    return {
        "still": np.stack([star] * 8),
        "moving": np.stack([scene("red", "star", 0.45 + 0.01 * i) for i in range(8)]),
        "cut": np.stack([star] * 4 + [marble] * 4),
        "flickering": np.stack([star, marble] * 4),
        "light on and off": np.stack([star, scene("red", "star", 0.5, "night")] * 4),
    }


@pytest.fixture(scope="module")
def steadiness() -> Any:
    reward = built("temporal_consistency", model="mini")
    reward.load(torch.device("cpu"))
    return reward


def test_consistency_is_the_mean_of_the_cosines(steadiness: Any, scenes: dict[str, np.ndarray]) -> None:
    """Against transformers' own embeddings, frame by frame, summed as VBench does."""
    clip = CLIPModel.from_pretrained(WEIGHTS / "clipscore").eval()
    for video in scenes.values():
        with torch.no_grad():
            pixels = torch.from_numpy(video).permute(0, 3, 1, 2) / 127.5 - 1
            embeddings = clip.visual_projection(clip.vision_model(pixels).pooler_output).numpy().astype(np.float64)
        total = 0.0
        for t in range(1, len(embeddings)):
            for other in (embeddings[t - 1], embeddings[0]):
                product = np.linalg.norm(embeddings[t]) * np.linalg.norm(other)
                total += float(embeddings[t] @ other) / product / 2
        assert scores(steadiness, video)[0] == pytest.approx(total / (len(embeddings) - 1), abs=1e-5)


def test_steadier_videos_score_higher(steadiness: Any, scenes: dict[str, np.ndarray]) -> None:
    score = dict(zip(scenes, scores(steadiness, *scenes.values()), strict=True))
    assert score["still"] == pytest.approx(1, abs=1e-6)
    assert score["still"] > score["moving"] > score["cut"] > score["flickering"]
    assert score["moving"] > score["light on and off"]
    low, high = traits_of(steadiness).range
    assert all(low <= value <= high for value in score.values())


def test_drift_shows_against_the_first_frame(steadiness: Any) -> None:
    """There and back is as steady between neighbours as going on, but nearer to where it began."""
    there = [scene("red", "star", 0.3 + 0.05 * i) for i in range(5)]
    on = [*there, *(scene("red", "star", 0.55 + 0.05 * i) for i in range(4))]
    back = [*there, *there[-2::-1]]
    returned, gone = scores(steadiness, np.stack(back), np.stack(on))
    assert returned > gone


# motion


def texture(height: int, width: int, grain: int, seed: int = 0) -> np.ndarray:
    """Soft random grey blots, `grain` pixels apart. [height, width] float"""
    rough = np.random.default_rng(seed).standard_normal((height // grain + 3, width // grain + 3))
    soft = Image.fromarray(rough.astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC)
    return 128 + 50 * np.asarray(soft)


def pictures(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey.round().clip(0, 255).astype(np.uint8)[..., None], 3, axis=-1)


def pan(height: int, width: int, x: int, y: int, count: int = 4) -> np.ndarray:
    """A window that moves by (x, y) pixels a frame over a texture."""
    room = max(abs(x), abs(y)) * count
    world = texture(height + 2 * room, width + 2 * room, max(height, width) // 32)
    rows, columns = ([room + i * by for i in range(count)] for by in (y, x))
    return pictures(np.stack([world[r : r + height, c : c + width] for r, c in zip(rows, columns, strict=True)]))


@pytest.mark.parametrize(("height", "width"), [(240, 416), (416, 240), (128, 128), (64, 64)])
@pytest.mark.parametrize(("x", "y"), [(0.02, 0), (0, -0.02), (-0.06, 0.03), (0.1, 0.05), (-0.1, -0.1)])
def test_motion_of_a_pan_is_its_displacement(height: int, width: int, x: float, y: float) -> None:
    """In shares of the longer side; slow, fast, along and across, whatever the picture's shape."""
    longer = max(height, width)
    pixels = round(x * longer), round(y * longer)
    (score,) = scores(built("motion"), pan(height, width, *pixels))
    assert score == pytest.approx(math.hypot(*pixels) / longer, rel=0.04)


def test_displacements_below_a_pixel_are_measured() -> None:
    """One pixel of 416 is 0.3 pixels of the reduced picture."""
    slow, slower = scores(built("motion"), pan(240, 416, 2, 0), pan(240, 416, 1, 0))
    assert slow == pytest.approx(2 / 416, rel=0.1)
    assert slower == pytest.approx(1 / 416, rel=0.1)


def not_moving() -> Iterator[tuple[str, np.ndarray]]:
    dice = np.random.default_rng(0)
    height, width = 120, 208
    levels = np.array([1.0, 0.6, 0.9, 0.5, 0.8, 0.7]).reshape(-1, 1, 1)
    still = np.stack([texture(height, width, 6)] * 6)
    slope = np.ones((6, height, 1)) * np.linspace(40, 160, width)
    edge = np.where(np.arange(width) < width / 2, 60.0, 180.0) * np.ones((6, height, 1))
    yield "still", still
    yield "still edge", edge
    yield "noise", 128 + 60 * dice.standard_normal((6, height, width))
    yield "faint noise", 128 + 5 * dice.standard_normal((6, height, width))
    yield "blots that come and go", np.stack([texture(height, width, 6, seed) for seed in range(6)])
    yield "brightness", still * levels
    yield "plain brightness", 0 * still + 200 * levels
    yield "brightness of a slope", slope * levels
    yield "contrast", 128 + (still - 128) * levels
    yield "grain on a picture", still + 10 * dice.standard_normal(still.shape)
    yield "grain on an edge", edge + 5 * dice.standard_normal(edge.shape)


@pytest.mark.parametrize(("what", "grey"), [pytest.param(what, grey, id=what) for what, grey in not_moving()])
def test_what_changes_without_moving_is_no_motion(what: str, grey: np.ndarray) -> None:
    """Exactly 0 where nothing changes; flicker scores less than a tenth of a slow pan, 1% of the width a frame."""
    (score,) = scores(built("motion"), pictures(grey))
    assert score < 0.001
    if what.startswith("still"):
        assert score == 0


def test_an_object_that_moves_counts_by_its_size_and_speed(scenes: dict[str, np.ndarray]) -> None:
    slow, fast = (np.stack([scene("red", "star", 0.4 + i * step) for i in range(5)]) for step in (0.01, 0.03))
    still, slower, faster, pan_over_all = scores(
        built("motion"), scenes["still"][:5], slow, fast, pan(64, 64, 2, 0, count=5)
    )
    assert 0 == still < slower < faster < pan_over_all


def test_the_search_finds_what_trying_everything_finds() -> None:
    dice = np.random.default_rng(3)
    before, after = dice.uniform(-50, 50, (2, 20, 24)).astype(np.float32)
    after[4:16, 5:20] = before[6:18, 2:17] + after[4:16, 5:20] / 4
    side, stride = BLOCK // 2, STRIDE // 2
    expected = []
    for top in range(0, 20 - side + 1, stride):
        for left in range(0, 24 - side + 1, stride):
            block = before[top : top + side, left : left + side].ravel()
            merits = {}
            for y in range(max(-REACH, -top), min(REACH, 20 - side - top) + 1):
                for x in range(max(-REACH, -left), min(REACH, 24 - side - left) + 1):
                    other = after[top + y : top + y + side, left + x : left + x + side].ravel()
                    merits[x, y] = np.corrcoef(block, other)[0, 1] - STILL_FIRST * math.hypot(x, y)
            expected.append(max(merits, key=lambda shift: merits[shift]))
    found = search(torch.from_numpy(before)[None, None], torch.from_numpy(after)[None, None])
    assert found[0].tolist() == [list(map(float, shift)) for shift in expected]
    assert (3.0, -2.0) in expected


def test_with_a_target_too_much_is_as_bad_as_too_little() -> None:
    videos = [pan(64, 64, x, 0) for x in (0, 2, 4)]
    plain = scores(built("motion"), *videos)
    reward = built("motion", target=0.03)
    wanted = scores(reward, *videos)
    assert wanted == pytest.approx([-abs(score - 0.03) for score in plain])
    assert wanted[1] > max(wanted[0], wanted[2])
    assert traits_of(reward).range == (pytest.approx(0.03 - FASTEST), 0)
    assert traits_of(built("motion")).range == (0, FASTEST)


def test_motion_stays_in_range_whatever_the_pictures_shape() -> None:
    dice = np.random.default_rng(5)
    for height, width in ((1, 1), (2, 300), (300, 2), (8, 8), (33, 129), (129, 130)):
        videos = dice.integers(0, 256, (2, 3, height, width, 3), dtype=np.uint8)
        assert all(0 <= score <= FASTEST for score in scores(built("motion"), *videos))


@pytest.mark.parametrize("target", [-0.1, 0.3, "much", True, math.nan])
def test_a_target_out_of_reach_is_refused(target: Any) -> None:
    with pytest.raises(InputError, match=r"target: expected a (finite|valid)? ?number( greater| less|, got)"):
        built("motion", target=target)


# both


def loaded(kind: str) -> Any:
    reward = built(kind, **({"model": "mini"} if kind == "temporal_consistency" else {}))
    reward.load(torch.device("cpu"))
    return reward


@pytest.mark.parametrize("kind", ["temporal_consistency", "motion"])
def test_one_frame_gets_no_score(kind: str, scenes: dict[str, np.ndarray]) -> None:
    assert scores(loaded(kind), scenes["moving"][:1], scenes["cut"][:1]) == [None, None]


@pytest.mark.parametrize("kind", ["temporal_consistency", "motion"])
def test_a_score_is_the_same_alone_and_in_any_batch(kind: str, scenes: dict[str, np.ndarray]) -> None:
    reward = loaded(kind)
    videos = [video[2:6] for video in scenes.values()]
    together = scores(reward, *videos)
    assert len(set(together)) == len(videos)
    assert together == [scores(reward, video)[0] for video in videos]
    assert scores(loaded(kind), *videos) == together
    assert traits_of(reward).deterministic
    assert traits_of(reward).media == "video"


@pytest.mark.parametrize("page", ["frames", "temporal_consistency", "motion"])
def test_the_example_of_the_page_can_be_built(page: str) -> None:
    text = (Path(__file__).parents[3] / "docs/rewards" / f"{page}.md").read_text()
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    rewards = build_rewards([RewardConfig(**entry) for entry in yaml.safe_load(example)["rewards"]])
    assert len(rewards) > 2
    assert {traits_of(reward).media for reward in rewards.values()} == {"video"}
