"""Motion as a prompt asks for it, by `trajectory` and by `optical_flow`, on clips whose answers are known."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from marble_rl.errors import InputError
from marble_rl.rewards.builtin.detection import Detection
from marble_rl.rewards.builtin.frames import Frames as OnFrames
from marble_rl.rewards.builtin.optical_flow import OpticalFlow, flow
from marble_rl.rewards.builtin.trajectory import Trajectory
from marble_rl.rewards.core.base import Images, NotedScore, RewardBatch
from marble_rl.types import Prompt
from tools.mini_video import flaws
from tools.mini_video.check import MODERATE, drawn, right_directions, scored, wrong
from tools.mini_video.render import Frames, render_clip
from tools.mini_video.scenes import KINDS, Clip, draw_clip

MARBLE = {"class": "marble", "color": "red"}


def prompt(**motion: Any) -> Prompt:
    return Prompt(0, "a thing moves", "motion", {"motion": motion})


def moving(*places: tuple[float, float] | None, side: int = 100) -> Images:
    """A video whose frames say where the detector `Reads` shall find the marble, in hundredths."""
    video = np.zeros((len(places), side, side, 3), dtype=np.uint8)
    for frame, place in zip(video, places, strict=True):
        if place is not None:
            frame[0, 0] = (1, round(place[0]), round(place[1]))
    return video


class Reads:
    """Finds what `moving` says."""

    def load(self, device: object) -> None:
        return None

    def detect(self, images: Images) -> list[list[Detection]]:
        found = []
        for image in images:
            there, x, y = map(int, image[0, 0])
            found.append([Detection("marble", "red", (x - 10, y - 10, x + 10, y + 10), 1.0)] if there else [])
        return found


def judged(places: list[tuple[float, float] | None], credit: str = "strict", **motion: Any) -> float:
    reward = Trajectory(detector=f"{__name__}:Reads", credit=credit)
    (score,) = reward.score(RewardBatch(moving(*places)[None], [prompt(objects=[MARBLE], **motion)]))
    assert isinstance(score, NotedScore)
    return float(score)


LEFT: dict[str, Any] = {"kind": "move", "direction": "left", "speed": "fast"}
LINE: list[tuple[float, float] | None] = [(80 - 55 * t / 12, 50) for t in range(13)]


def test_a_straight_even_path_is_right_and_its_relatives_are_not() -> None:
    assert judged(LINE, **LEFT) == judged(LINE, "dense", **LEFT) == 1
    assert judged(LINE[::-1], **LEFT) == 0
    assert judged(LINE[::-1], "dense", **LEFT) == pytest.approx(0.2)
    assert judged(LINE, **{**LEFT, "speed": "slow"}) == 0
    assert judged(LINE, **{**LEFT, "direction": "up"}) == 0
    assert judged(LINE, **{**LEFT, "kind": "stop"}) == 0
    assert judged(LINE, kind="bounce") == judged(LINE, kind="fall") == 0
    assert judged([(80, 50)] * 13, "dense", **LEFT) == pytest.approx(0.2), "it is there, and stands"


def test_missed_frames() -> None:
    two = [None if t in (4, 9) else place for t, place in enumerate(LINE)]
    assert judged(two, **LEFT) == 1
    assert judged(two, "dense", **LEFT) == pytest.approx(11 / 13)
    assert judged([None if t in (4, 5, 6) else place for t, place in enumerate(LINE)], **LEFT) == 0
    assert judged([*LINE[:9], None, None, None, None], **LEFT) == 0
    assert judged([None] * 13, "dense", **LEFT) == 0
    assert judged([*LINE[:3], *[None] * 10], "dense", **LEFT) == pytest.approx(3 / 13 / 5)


def test_a_jump_is_no_motion() -> None:
    jump: list[tuple[float, float] | None] = [(80, 50)] * 6 + [(25, 50)] * 7
    hidden = [*jump[:5], None, None, *jump[7:]]
    for places in (jump, hidden):
        assert judged(places, **LEFT) == 0
        assert judged(places, "dense", **LEFT) < 0.4


def test_several_bounces_are_bounces_and_shaking_is_none() -> None:
    heights = [20, 40, 70, 50, 35, 40, 70, 55, 45, 50, 70, 60, 55]
    assert judged([(50, y) for y in heights], kind="bounce") == 1
    assert judged([(50, 50 + 4 * (-1) ** t) for t in range(13)], kind="bounce") == 0
    assert judged([(30 + 4 * t, y) for t, y in enumerate(heights)], kind="bounce", direction="right") == 1
    assert judged([(30 + 4 * t, y) for t, y in enumerate(heights)], kind="bounce", direction="left") == 0


def test_two_alike_are_not_found() -> None:
    class Doubles(Reads):
        def detect(self, images: Images) -> list[list[Detection]]:
            return [found * 2 for found in super().detect(images)]

    reward = Trajectory(credit="dense")
    reward.detector = Doubles()
    assert reward.score(RewardBatch(moving(*LINE)[None], [prompt(objects=[MARBLE], **LEFT)])) == [0]


@pytest.mark.parametrize("kind", [Trajectory, OpticalFlow])
def test_prompts_without_motion_are_left_to_others(kind: type[Trajectory] | type[OpticalFlow]) -> None:
    assert kind().applies_to(prompt(objects=[MARBLE], **LEFT))
    assert not kind().applies_to(Prompt(0, "a red marble rolls", "s"))
    assert kind().score(RewardBatch(np.zeros((1, 2, 8, 8, 3), np.uint8), [prompt(objects=[MARBLE], **LEFT)])) == [None]


@pytest.mark.parametrize(
    ("motion", "says"),
    [
        ("left", 'motion: got "left"'),
        ({"kind": "fly", "objects": [MARBLE]}, 'motion.kind: got "fly"'),
        ({"kind": "move", "objects": [MARBLE]}, "`move` needs a `direction`"),
        ({"kind": "fall", "objects": [MARBLE], "direction": "left"}, "`fall` takes no `direction`"),
        ({"kind": "bounce", "objects": [MARBLE], "direction": "up"}, "`bounce` takes the `direction` left or right"),
        ({"kind": "meet", "objects": [MARBLE]}, "`meet` needs 2 in `objects`"),
        ({"kind": "fall", "objects": [MARBLE], "speed": "slow"}, "`fall` takes no `speed`"),
        ({"kind": "fall", "objects": [MARBLE], "colour": "red"}, "motion.colour"),
    ],
)
def test_another_form_is_refused_by_its_key(motion: Any, says: str) -> None:
    for reward in (Trajectory(), OpticalFlow()):
        with pytest.raises(InputError) as refused:
            reward.applies_to(Prompt(0, "x", "s", {"motion": motion}))
        assert says in str(refused.value)
        assert "docs/rewards/trajectory.md" in str(refused.value)


def test_what_the_detector_cannot_find_is_refused() -> None:
    with pytest.raises(InputError, match="asks for 'dog'"):
        Trajectory().applies_to(prompt(kind="fall", objects=[{"class": "dog"}]))
    assert OpticalFlow().applies_to(prompt(kind="fall", objects=[{"class": "dog"}]))


# Rendered clips


Rendered = dict[str, tuple[list[Clip], list[Frames]]]
"""Clips of each kind of motion, and their frames."""


def together(of_kinds: Rendered) -> tuple[list[Clip], list[Frames]]:
    pairs = of_kinds.values()
    return [clip for clips, _ in pairs for clip in clips], [video for _, videos in pairs for video in videos]


def rendered(count: int) -> Rendered:
    dice = random.Random(0)
    chosen = {kind: drawn(kind, count) for kind in KINDS}
    return {kind: (clips, [render_clip(clip, dice) for clip in clips]) for kind, clips in chosen.items()}


@pytest.fixture(scope="module")
def few() -> Rendered:
    return rendered(2)


@pytest.fixture(scope="module")
def many() -> Rendered:
    return rendered(20)


def test_a_few_clips_of_every_kind_are_judged_right(few: Rendered) -> None:
    clips, videos = together(few)
    scores = scored(videos, clips)
    assert scores["dense"].min() > 0.9
    assert scores["strict"].mean() > 0.9
    assert scores["optical_flow"].mean() > 0.7
    backwards = scored([video[::-1] for video in videos[:4]], clips[:4])
    assert backwards["strict"].max() == 0
    assert backwards["dense"].max() < 0.5
    assert backwards["optical_flow"].max() < 0.3


def test_flow_of_a_shifted_texture_is_its_shift_and_flicker_is_none() -> None:
    texture = np.random.default_rng(0).integers(60, 200, (8, 8)).repeat(8, 0).repeat(8, 1).astype(np.uint8)
    wide = np.pad(texture, 16, mode="wrap")
    pan = np.stack([wide[16:80, 16 - 2 * t : 80 - 2 * t] for t in range(5)])[..., None].repeat(3, -1)
    assert flow(pan)[:, 0] == pytest.approx(np.tile([2 / 64, 0], (4, 1)), abs=0.2 / 64)
    light = np.array([1, 0.8, 1.2, 0.9, 1.1])[:, None, None, None]
    assert not flow((pan[:1] * light).round().astype(np.uint8)).any()


@pytest.mark.full
def test_signs_stay_readable_while_the_camera_moves() -> None:
    dice = random.Random(3)
    clips = [draw_clip("text", dice) for _ in range(12)]
    videos = np.stack([render_clip(clip, dice) for clip in clips])
    prompts = [Prompt(i, clip.caption, clip.source, clip.metadata) for i, clip in enumerate(clips)]
    reader = {"type": "ocr", "params": {"region": [0.02, 0.14, 0.98, 0.78]}}
    reward = OnFrames(reward=reader, frames=4, reduce="steady")
    reward.load(torch.device("cpu"))
    assert all(map(reward.applies_to, prompts))
    assert not reward.applies_to(Prompt(0, "a red star bobs", "general"))
    right = np.array(reward.score(RewardBatch(videos, prompts)), dtype=float)
    assert right.mean() > 0.85
    assert np.mean(reward.score(RewardBatch(videos, [*prompts[1:], prompts[0]]))) < 0.3  # type: ignore[arg-type]
    videos[:, 0] = 128
    half = np.array(reward.score(RewardBatch(videos, prompts)), dtype=float)
    assert half[right == 1] == pytest.approx(0.375), "three frames of four, and the worst"


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_clean_clips_are_right(kind: str, many: Rendered) -> None:
    clips, videos = many[kind]
    scores = scored(videos, clips)
    assert scores["strict"].mean() >= 0.95
    assert scores["dense"].mean() >= 0.9
    if right := right_directions(clips, videos).tolist():
        assert np.mean(right) >= 0.9


@pytest.mark.full
@pytest.mark.parametrize("what", flaws.WRONG)
def test_clips_with_one_thing_wrong_are_not(what: str, many: Rendered) -> None:
    videos, clips = wrong(together(many)[0], what)
    scores = scored(videos, clips, ["strict", "dense"])
    assert scores["strict"].mean() <= 0.05
    assert scores["dense"].mean() <= 0.7


@pytest.mark.full
@pytest.mark.parametrize("flaw", MODERATE)
def test_moderate_flaws_do_not_hide_a_motion(flaw: str, many: Rendered) -> None:
    dice = random.Random(1)
    clips, videos = together(many)
    spoilt = [MODERATE[flaw](video, dice=dice) for video in videos]
    scores = scored(spoilt, clips, ["dense", "optical_flow"])
    assert scores["dense"].mean() >= 0.8
    assert right_directions(clips, spoilt).mean() >= 0.9
