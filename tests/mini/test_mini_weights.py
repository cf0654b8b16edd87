"""The weights inside the package: small enough, licensed, and good for what they are used for."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from marble_rl.mini import WEIGHTS
from marble_rl.rewards.builtin.clip import Aesthetic, ClipScore, Hpsv2, PickScore
from marble_rl.rewards.builtin.geneval import GenEval
from marble_rl.rewards.builtin.ocr import Ocr
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.types import Prompt
from tools.mini.build import draw
from tools.mini.prompts import splits
from tools.mini.scenes import Scene
from tools.mini.scorers import Lessons, make_lessons

pytestmark = pytest.mark.full

CPU = torch.device("cpu")
SIGN = (0.05, 0.2, 0.95, 0.72)


def prompts_of(scenes: list[Scene]) -> list[Prompt]:
    return [Prompt(i, scene.caption, scene.source, scene.metadata) for i, scene in enumerate(scenes)]


@pytest.fixture(scope="module")
def lessons() -> Lessons:
    """New ones, that nothing was trained on."""
    return make_lessons(120, seed=999)


def scores(reward: object, captions: tuple[str, ...], images: np.ndarray) -> np.ndarray:
    prompts = [Prompt(i, caption, "s") for i, caption in enumerate(captions)]
    return np.array(reward.score(RewardBatch(images, prompts)))  # type: ignore[attr-defined]


def test_they_are_small_and_say_their_licence() -> None:
    size = sum(file.stat().st_size for file in WEIGHTS.rglob("*") if file.is_file())
    assert size <= 25_000_000
    assert "Apache-2.0" in (WEIGHTS / "README.md").read_text()


@pytest.mark.parametrize("reward", [ClipScore(model="mini"), PickScore(model="mini")], ids=["clipscore", "pickscore"])
def test_what_the_caption_says_scores_higher(reward: ClipScore, lessons: Lessons) -> None:
    reward.load(CPU)
    right, wrong, bad = (scores(reward, lessons.captions, p) for p in (lessons.right, lessons.wrong, lessons.bad))
    assert (right > wrong).mean() > 0.85
    assert (right > bad).mean() > 0.9


@pytest.mark.parametrize("reward", [Hpsv2(model="mini"), Aesthetic(model="mini")], ids=["hpsv2", "aesthetic"])
def test_clean_pictures_of_anything_score_higher(reward: Hpsv2, lessons: Lessons) -> None:
    reward.load(CPU)
    pictures = (lessons.right, lessons.wrong, lessons.mild, lessons.bad)
    right, wrong, mild, bad = (scores(reward, lessons.captions, p) for p in pictures)
    assert (right > bad).mean() > 0.9
    assert (mild > bad).mean() > 0.6  # flaws of different kinds: which is worse is partly a matter of taste
    assert abs(right.mean() - wrong.mean()) < 0.2 * (right.mean() - bad.mean())


@pytest.mark.full
def test_no_scorer_is_pleased_by_a_blank_or_noisy_picture(lessons: Lessons) -> None:
    noise = np.random.default_rng(0).integers(0, 256, lessons.right.shape, dtype=np.uint8)
    blank = np.full_like(lessons.right, 235)
    for reward in (ClipScore(model="mini"), PickScore(model="mini"), Hpsv2(model="mini"), Aesthetic(model="mini")):
        reward.load(CPU)
        right = scores(reward, lessons.captions, lessons.right)
        for garbage in (noise, blank):
            assert (scores(reward, lessons.captions, garbage) < np.median(right)).mean() > 0.9, type(reward).__name__


@pytest.mark.full
def test_the_base_is_mediocre_but_above_chance() -> None:
    """What the rewards need: pictures of one prompt that differ in quality."""
    for source, reward, low, high in (("text", Ocr(region=SIGN), 0.1, 0.75), ("composition", GenEval(), 0.1, 0.75)):
        reward.load(CPU)
        scenes = random.Random(0).sample(splits()[source].held_out, 40)
        prompts = prompts_of(scenes)
        images = draw(Path(WEIGHTS / "pipeline"), [prompt.text for prompt in prompts], seed=3)
        drawn = np.array(reward.score(RewardBatch(images, prompts)))
        assert low < drawn.mean() < high, (source, drawn.mean())
        assert drawn.std() > 0.1
