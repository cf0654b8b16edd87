"""The built-in rewards, and the rules of scoring."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt
from rewards_for_tests import After


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


@pytest.mark.parametrize("function", ["steady", "two_arguments", "three_arguments"])
def test_functions_take_what_they_name(function: str) -> None:
    (reward,) = build_rewards([RewardConfig(type=f"rewards_for_tests:{function}", name="r")]).values()
    prompts = [Prompt(0, "x", "s", {"bonus": 0.5}), Prompt(1, "y", "s")]
    scores = reward.score(RewardBatch(np.stack([plain(255, 0, 0), plain(0, 0, 0)]), prompts))
    assert list(scores) == ([0.5, 0.0] if function == "three_arguments" else [1.0, 0.0])


@pytest.mark.parametrize("function", ["images_only", "prompts_by_name_only", "images_and_others"])
def test_a_function_without_room_for_images_and_prompts_is_refused(function: str) -> None:
    found = rf"rewards\.0 \(r\)\.type: the function rewards_for_tests:{function} takes \(images.*\) -> "
    with pytest.raises(InputError, match=found) as refused:
        build_rewards([RewardConfig(type=f"rewards_for_tests:{function}", name="r")])
    assert "(images, prompts, ...)" in str(refused.value)


def test_a_function_that_takes_anything_will_do() -> None:
    assert score("rewards_for_tests:anything", [plain(255, 0, 0)], bonus=1) == [1.0]


def test_a_function_that_does_not_say_what_it_takes_is_refused() -> None:
    with pytest.raises(InputError, match=r"\(r\)\.type: .*builtins:max"):
        build_rewards([RewardConfig(type="builtins:max", name="r")])


class Recorder:
    """Notes what it was asked to score."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def applies_to(self, prompt: Prompt) -> bool:
        return "no" not in prompt.text

    def load(self, device: torch.device) -> None:
        return None

    def score(self, batch: RewardBatch) -> list[float]:
        self.batches.append([p.index for p in batch.prompts])
        return [float(p.index) for p in batch.prompts]


def test_only_applicable_samples_are_scored_in_batches_of_neighbours() -> None:
    recorder = Recorder()
    scorer = Scorer([RewardConfig(type="x:y", name="r")], {"r": recorder})
    prompts = [
        Prompt(0, "yes", "s"),
        Prompt(1, "no", "s"),
        Prompt(2, "yes", "s", rewards=frozenset({"other"})),
        Prompt(3, "yes", "s", rewards=frozenset({"r"})),
        Prompt(4, "yes", "s"),
        Prompt(5, "no", "s"),
    ]
    table = scorer.score(["r"], torch.zeros(6, 4, 4, 3, dtype=torch.uint8), prompts, batch_size=2)
    assert recorder.batches == [[0], [3], [4]]
    assert table.applicable[:, 0].tolist() == [True, False, False, True, True, False]
    assert table.values[:, 0].tolist() == [0, 0, 0, 3, 4, 0]
    assert table.mean("r") == pytest.approx(7 / 3)


@pytest.mark.parametrize("what", ["raise", "nan", "short", "exit", "cancel"])
def test_a_bad_score_names_reward_and_sample_and_is_never_zero(what: str) -> None:
    reward = After(what, calls=1)
    scorer = Scorer([RewardConfig(type="x:y", name="odd", retries=2)], {"odd": reward})
    prompts = [Prompt(i, f"prompt {i}", "s") for i in range(4)]
    with pytest.raises(RewardFailed, match=r"reward 'odd' failed after 3 attempts on an image of prompt [23]"):
        scorer.score(["odd"], torch.zeros(4, 4, 4, 3, dtype=torch.uint8), prompts, batch_size=2)
    assert reward.calls == -3


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_what_would_end_a_thread_is_told_as_the_rewards_failure(timeout: float | None) -> None:
    """Rows scored before it are no excuse for those after it."""
    for what, says in (("exit", "SystemExit: 1"), ("cancel", "CancelledError: cancelled"), ("interrupt", "Keyboard")):
        config = RewardConfig(type="x:y", name="odd", retries=0, timeout=timeout)
        scorer = Scorer([config], {"odd": After(what, calls=1)})
        prompts = [Prompt(i, f"prompt {i}", "s") for i in range(6)]
        with pytest.raises(RewardFailed, match=rf"reward 'odd' failed.*{says}"):
            scorer.score(["odd"], torch.zeros(6, 4, 4, 3, dtype=torch.uint8), prompts, batch_size=2)


def test_what_was_given_up_has_no_scores() -> None:
    scorer = Scorer([RewardConfig(type="x:y", name="r")], {"r": Recorder()})
    with scorer.in_background(["r"], [Prompt(0, "yes", "s"), Prompt(1, "no", "s")]) as scoring:
        scoring.close()
        scoring.add(torch.zeros(2, 4, 4, 3, dtype=torch.uint8))
        with pytest.raises(RewardFailed, match=r"reward 'r' left 1 image without a score, the first of prompt 0"):
            scoring.finish()


def test_a_process_with_nothing_to_do_has_an_empty_table() -> None:
    scorer = Scorer([RewardConfig(type="x:y", name="r")], {"r": Recorder()})
    with scorer.in_background(["r"], []) as scoring:
        assert scoring.finish().values.shape == (0, 1)


class Slow(Recorder):
    """Takes its time, and notes the thread that it runs in."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.threads: set[int] = set()

    def score(self, batch: RewardBatch) -> list[float]:
        self.threads.add(threading.get_ident())
        assert torch.get_num_threads() == 1
        time.sleep(self.seconds)
        return super().score(batch)


def test_rewards_are_scored_while_the_next_images_are_made() -> None:
    """Sampling 5 x 0.2 s with a reward that takes as long: little more than the sampling alone, not twice as much."""
    reward = Slow(0.2)
    scorer = Scorer([RewardConfig(type="x:y", name="r")], {"r": reward})
    prompts = [Prompt(i, "yes", "s") for i in range(10)]
    began = time.perf_counter()
    with scorer.in_background(["r"], prompts) as scoring:
        for _ in range(5):
            time.sleep(0.2)
            scoring.add(torch.zeros(2, 4, 4, 3, dtype=torch.uint8))
        table = scoring.finish()
    assert time.perf_counter() - began < 1.7
    assert scorer.seconds >= 1.0
    assert table.values[:, 0].tolist() == list(range(10))
    assert len(reward.threads) == 1
    assert threading.get_ident() not in reward.threads


def test_sampling_stops_soon_after_a_reward_failed() -> None:
    scorer = Scorer([RewardConfig(type="x:y", name="odd", retries=0)], {"odd": After("raise", calls=0)})
    prompts = [Prompt(i, f"prompt {i}", "s") for i in range(100)]
    added = []

    def sample_slowly() -> None:
        with scorer.in_background(["odd"], prompts) as scoring:
            for prompt in prompts:
                scoring.add(torch.zeros(1, 4, 4, 3, dtype=torch.uint8))
                added.append(prompt)
                time.sleep(0.02)

    with pytest.raises(RewardFailed, match="odd"):
        sample_slowly()
    assert len(added) < 50


def test_a_hanging_reward_is_left_behind() -> None:
    hanging = Slow(30.0)
    scorer = Scorer([RewardConfig(type="x:y", name="r")], {"r": hanging})

    def be_stopped() -> None:
        with scorer.in_background(["r"], [Prompt(0, "yes", "s")]) as scoring:
            scoring.add(torch.zeros(1, 4, 4, 3, dtype=torch.uint8))
            raise KeyboardInterrupt

    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        be_stopped()
    assert time.perf_counter() - began < 5
