"""Scoring by several rewards, in the background."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from marble_rl.distributed.interrupts import Interrupts
from marble_rl.errors import RewardFailed, RewardsAbandoned
from marble_rl.rewards.core import background
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt
from rewards_for_tests import After


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
def test_what_would_end_a_thread_is_reported_as_the_rewards_failure(timeout: float | None) -> None:
    """Rows scored before it are no excuse for those after it."""
    for what, says in (("exit", "SystemExit: 1"), ("cancel", "CancelledError: cancelled"), ("interrupt", "Keyboard")):
        config = RewardConfig(type="x:y", name="odd", retries=0, timeout=timeout)
        scorer = Scorer([config], {"odd": After(what, calls=1)})
        prompts = [Prompt(i, f"prompt {i}", "s") for i in range(6)]
        with pytest.raises(RewardFailed, match=rf"reward 'odd' failed.*{says}"):
            scorer.score(["odd"], torch.zeros(6, 4, 4, 3, dtype=torch.uint8), prompts, batch_size=2)


def test_what_was_dropped_has_no_scores() -> None:
    scorer = Scorer([RewardConfig(type="x:y", name="r")], {"r": Recorder()})
    with scorer.in_background(["r"], [Prompt(0, "yes", "s"), Prompt(1, "no", "s")]) as scoring:
        scoring.close()
        scoring.add(torch.zeros(2, 4, 4, 3, dtype=torch.uint8))
        with pytest.raises(RewardFailed, match=r"reward 'r' left 1 image without a score, the first of prompt 0"):
            scoring.finish()


def test_a_rank_with_nothing_to_do_has_an_empty_table() -> None:
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


def test_a_hanging_reward_is_not_waited_for() -> None:
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


def test_scores_that_are_there_are_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago the process was asked to stop: the grace counts from when it begins to wait."""
    monkeypatch.setattr(background, "GRACE", 1.0)
    scorer = Scorer([RewardConfig(type="x:y", name="r")], {"r": Slow(0.3)})
    prompts = [Prompt(i, "yes", "s") for i in range(2)]
    with Interrupts(lambda text: None), scorer.in_background(["r"], prompts) as scoring:
        signal.raise_signal(signal.SIGINT)
        scoring.add(torch.zeros(1, 4, 4, 3, dtype=torch.uint8))
        time.sleep(1.2)  # sampling
        scoring.add(torch.zeros(1, 4, 4, 3, dtype=torch.uint8))
        assert scoring.finish().values[:, 0].tolist() == [0, 1]


def test_a_reward_that_does_not_answer_is_given_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "GRACE", 0.1)
    scorer = Scorer([RewardConfig(type="x:y", name="r")], {"r": Slow(5.0)})
    with Interrupts(lambda text: None), scorer.in_background(["r"], [Prompt(0, "yes", "s")]) as scoring:
        scoring.add(torch.zeros(1, 4, 4, 3, dtype=torch.uint8))
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(RewardsAbandoned, match="gave up waiting for reward 'r'"):
            scoring.finish()
