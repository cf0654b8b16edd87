"""All rewards score the same images: none can change them for the others."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from marble_rl.errors import RewardFailed
from marble_rl.rewards.core.base import FunctionReward, Reward, RewardBase, RewardBatch, Scores, Traits
from marble_rl.rewards.core.calls import CalledReward
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt

FIX = r"Change a copy \(`images.copy\(\)`\), or declare `traits = Traits\(writes_images=True\)`"


def by_numpy(images: list[np.ndarray]) -> None:
    images[0][:2] = 255


def by_an_operator(images: list[np.ndarray]) -> None:
    images[-1] += 1


def by_opencv(images: list[np.ndarray]) -> None:
    cv2.rectangle(images[0], (1, 1), (3, 3), (255, 0, 0), -1)


def by_torch(images: list[np.ndarray]) -> None:
    torch.from_numpy(images[0]).fill_(255)


class Paints(RewardBase):
    def __init__(self, paint, writes_images: bool = False, media: str = "image") -> None:  # type: ignore[no-untyped-def]
        self.paint = paint
        self.traits = Traits(writes_images=writes_images, media=media)  # type: ignore[arg-type]
        self.calls = 0

    def score(self, batch: RewardBatch) -> Scores:
        self.calls += 1
        self.paint(list(batch.images))
        return [float(image.mean()) for image in batch.images]


class Keeps(RewardBase):
    """Remembers the images that it got."""

    def __init__(self, media: str = "image") -> None:
        self.traits = Traits(media=media)  # type: ignore[arg-type]
        self.kept: list[np.ndarray] = []

    def score(self, batch: RewardBatch) -> Scores:
        self.kept.append(batch.images)
        return [float(image.mean()) for image in batch.images]


def scored(rewards: dict[str, Reward], images: torch.Tensor) -> torch.Tensor:
    configs = [RewardConfig(type="x:y", name=name, backoff=0.0) for name in rewards]
    prompts = [Prompt(i, f"prompt {i}", "s") for i in range(len(images))]
    return Scorer(configs, rewards).score(list(rewards), images, prompts, batch_size=2).values


def noise(video: bool) -> torch.Tensor:
    shape = (4, 3, 8, 8, 3) if video else (4, 8, 8, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("media", ["image", "video"])
@pytest.mark.parametrize("paint", [by_numpy, by_an_operator])
def test_a_reward_that_writes_fails_by_name_and_changes_nothing(paint, media: str) -> None:  # type: ignore[no-untyped-def]
    images, before, painter = noise(media == "video"), noise(media == "video"), Paints(paint, media=media)
    says = rf"reward 'paints' failed on .* prompt 0 .*: ImagesWritten: it writes to its images, .*read-only.*{FIX}"
    with pytest.raises(RewardFailed, match=says):
        scored({"paints": painter, "plain": Keeps(media)}, images)
    assert torch.equal(images, before)
    assert painter.calls == 1, "a retry would write again"


@pytest.mark.parametrize("paint", [by_numpy, by_an_operator, by_opencv])
def test_functions_too(paint) -> None:  # type: ignore[no-untyped-def]
    def draws(images: list[np.ndarray], prompts: list[str]) -> list[float]:
        paint(images)
        return [0.0] * len(images)

    with pytest.raises(RewardFailed, match=f"it writes to its images.*{FIX}"):
        scored({"draws": FunctionReward(draws)}, noise(video=False))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_what_heeds_no_flag_is_found_by_the_checksum() -> None:
    """Also where the reward hides it behind an error of its own. A second attempt would write the same again, and look
    harmless."""
    painter = Paints(by_torch)
    with pytest.raises(RewardFailed, match=f"'paints' failed .*changed while it scored them.*from_numpy.*{FIX}"):
        scored({"paints": painter}, noise(video=False))
    assert painter.calls == 1

    def paints_and_fails(images: list[np.ndarray]) -> None:
        by_torch(images)
        raise RuntimeError("something else")

    with pytest.raises(RewardFailed, match="changed while it scored them"):
        scored({"paints": Paints(paints_and_fails)}, noise(video=False))


@pytest.mark.parametrize("media", ["image", "video"])
@pytest.mark.parametrize("paint", [by_numpy, by_torch])
def test_a_reward_that_says_so_writes_to_a_copy(paint, media: str) -> None:  # type: ignore[no-untyped-def]
    images, before = noise(media == "video"), noise(media == "video")
    keeper, painter = Keeps(media), Paints(paint, writes_images=True, media=media)
    values = scored({"paints": painter, "plain": keeper, "again": Keeps(media)}, images)
    assert torch.equal(images, before)
    assert torch.equal(values[:, 1], values[:, 2])
    assert not torch.equal(values[:, 0], values[:, 1])
    assert np.array_equal(np.concatenate(keeper.kept), before.numpy()), "what a reward keeps does not change later"


def test_readers_get_the_images_themselves() -> None:
    images, keeper = noise(video=False), Keeps()
    scored({"plain": keeper}, images)
    assert all(np.shares_memory(kept, images.numpy()) for kept in keeper.kept)
    assert not any(kept.flags.writeable for kept in keeper.kept)


def test_drawing_on_a_picture_of_pillow_is_no_writing() -> None:
    """Pillow copies what it may not change."""

    def draws(images: list[np.ndarray]) -> None:
        picture = Image.fromarray(images[0])
        ImageDraw.Draw(picture).rectangle((0, 0, 4, 4), fill="red")

    assert torch.equal(
        scored({"draws": Paints(draws)}, noise(video=False)), scored({"plain": Keeps()}, noise(video=False))
    )


def test_another_error_about_something_read_only_is_left_as_it_is() -> None:
    def saves(images: list[np.ndarray]) -> None:
        raise OSError(30, "Read-only file system", "scores.csv")

    config = RewardConfig(type="x:y", name="r", retries=0)
    with pytest.raises(RewardFailed, match=r"OSError: .*Read-only file system") as failed:
        CalledReward(config, Paints(saves)).score(RewardBatch(noise(False).numpy(), [Prompt(0, "a", "s")] * 4))
    assert "writes to its images" not in str(failed.value)


def test_metadata_of_a_function_is_its_own() -> None:
    def pops(images: list[np.ndarray], prompts: list[str], metadata: list[dict[str, list[int]]]) -> list[float]:
        return [float(row["objects"].pop()) for row in metadata]

    prompt = Prompt(0, "a cup", "s", {"objects": [1, 2]})
    FunctionReward(pops).score(RewardBatch(noise(False).numpy()[:1], [prompt]))
    assert prompt.metadata["objects"] == [1, 2]
