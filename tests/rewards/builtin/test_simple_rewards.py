"""`jpeg_compressibility`, `brightness` and `colour`."""

from __future__ import annotations

import numpy as np
import pytest

from marble_rl.rewards import RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt


def plain(*colour: int, size: int = 8) -> np.ndarray:
    return np.full((size, size, 3), colour, dtype=np.uint8)


def noise(size: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)


def score(kind: str, images: list[np.ndarray], texts: list[str] | None = None, **params: object) -> list[float]:
    (reward,) = build_rewards([RewardConfig(type=kind, name="r", params=params)]).values()
    prompts = [Prompt(i, text, "s") for i, text in enumerate(texts or ["x"] * len(images))]
    return list(reward.score(RewardBatch(np.stack(images), prompts)))


def test_brightness() -> None:
    assert score("brightness", [plain(0, 0, 0), plain(255, 255, 255), plain(255, 0, 0)]) == pytest.approx([0, 1, 1 / 3])
    assert score("brightness", [plain(255, 255, 255)], target=0.25) == pytest.approx([-0.75])


def test_colour() -> None:
    texts = ["a RED cup", "a red cup", "a blue-ish cup", "a yellow cup"]
    images = [plain(255, 0, 0), plain(0, 255, 0), plain(0, 0, 255), plain(128, 128, 128)]
    assert score("colour", images, texts) == pytest.approx([1.0, -0.5, 1.0, 0.0])
    assert score("colour", [plain(0, 0, 255)], colour="blue") == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("text", "applies"), [("a red cup", True), ("a cup", False), ("red and blue", False), ("bored", False)]
)
def test_colour_applies_to_prompts_that_name_one(text: str, applies: bool) -> None:
    (reward,) = build_rewards([RewardConfig(type="colour", name="r")]).values()
    assert reward.applies_to(Prompt(0, text, "s")) == applies


def test_jpeg_prefers_smooth_images() -> None:
    smooth, rough = score("jpeg_compressibility", [plain(90, 90, 90, size=64), noise(64)])
    assert rough < smooth < 0
    low, high = (score("jpeg_compressibility", [noise(64)], quality=q)[0] for q in (20, 95))
    assert high < low


@pytest.mark.parametrize("kind", ["brightness", "colour", "jpeg_compressibility"])
def test_scores_do_not_depend_on_the_batch(kind: str) -> None:
    images, texts = [plain(10, 200, 30), noise(), plain(250, 1, 99)], ["a red cup", "a green cup", "a blue cup"]
    together = score(kind, images, texts)
    assert together == [score(kind, [image], [text])[0] for image, text in zip(images, texts, strict=True)]
    assert np.isfinite(together).all()
