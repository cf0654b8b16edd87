"""How rewards are called: what they declare is honoured, what they return is checked, what they did is counted."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from marble_rl.distributed.interrupts import Stopping
from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.core.base import FunctionReward, RewardBase, RewardBatch, Scores, Traits
from marble_rl.rewards.core.calls import CalledReward
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt, RewardTable
from rewards_for_tests import After, NeedsTarget


def batch(count: int, seed: int = 0, frames: int | None = None) -> RewardBatch:
    shape = (count, 4, 4, 3) if frames is None else (count, frames, 4, 4, 3)
    images = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return RewardBatch(images, [Prompt(i, f"prompt {i}", "s") for i in range(count)])


class Mean(RewardBase):
    """Mean pixel, with traits to order, and a note of every batch."""

    def __init__(self, **traits: Any) -> None:
        self.traits = Traits(**traits)
        self.sizes: list[int] = []

    def score(self, batch: RewardBatch) -> Scores:
        self.sizes.append(len(batch.prompts))
        return [float(image.mean()) for image in batch.images]


def called(reward: Any, **settings: Any) -> CalledReward:
    return CalledReward(RewardConfig(type="x:y", name="r", backoff=0.0, **settings), reward)


@pytest.mark.parametrize(
    ("declared", "configured", "sizes"),
    [(None, None, [7]), (3, None, [3, 3, 1]), (3, 5, [5, 2]), (None, 2, [2, 2, 2, 1])],
)
def test_batches_are_as_large_as_declared_unless_the_config_says_otherwise(
    declared: int | None, configured: int | None, sizes: list[int]
) -> None:
    reward = Mean(batch_size=declared)
    scores = called(reward, batch_size=configured).score(batch(7))
    assert reward.sizes == sizes
    assert scores == Mean().score(batch(7))


def test_lower_is_better_counts_with_the_opposite_sign() -> None:
    down = called(Mean(higher_is_better=False))
    assert down.score(batch(3)) == [-float(score) for score in down.score_unsigned(batch(3))]  # type: ignore[arg-type]


@pytest.mark.parametrize(("low", "high", "fine"), [(0, 255, True), (0, 1, False), (200, 255, False)])
def test_a_score_out_of_its_range_is_an_error(low: float, high: float, fine: bool) -> None:
    reward = called(Mean(range=(low, high)), retries=0)
    if fine:
        reward.score(batch(2))
    else:
        with pytest.raises(RewardFailed, match=rf"outside its range \[{low}, {high}\]"):
            reward.score(batch(2))


def test_traits_of_functions() -> None:
    def minus(images: list[np.ndarray], prompts: list[str]) -> list[float]:
        return [float(image.mean()) for image in images]

    minus.traits = Traits(higher_is_better=False)  # type: ignore[attr-defined]
    assert called(FunctionReward(minus)).score(batch(1))[0] == -batch(1).images[0].mean()


def test_none_says_that_a_reward_does_not_apply() -> None:
    def dark_only(images: list[np.ndarray], prompts: list[str]) -> list[float | None]:
        return [None if image.mean() > 100 else 1.0 for image in images]

    images = torch.zeros(4, 2, 2, 3, dtype=torch.uint8)
    images[1] = 255
    scorer = Scorer([RewardConfig(type="x:y", name="r")], {"r": FunctionReward(dark_only)})
    table = scorer.score(["r"], images, batch(4).prompts, batch_size=2)
    assert table.applicable[:, 0].tolist() == [True, False, True, True]
    assert table.values[:, 0].tolist() == [1, 0, 1, 1]
    assert table.mean("r") == 1.0


@pytest.mark.parametrize(("media", "frames"), [("image", 3), ("video", None)])
def test_images_and_videos_are_not_confused(media: str, frames: int | None) -> None:
    with pytest.raises(InputError, match=f"scores {media}s, but was given"):
        called(Mean(media=media)).score(batch(2, frames=frames))


def test_precision_is_that_of_its_torch_operations() -> None:
    class Product(RewardBase):
        def score(self, batch: RewardBatch) -> Scores:
            self.dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            return [0.0] * len(batch.prompts)

    for precision, dtype in ((None, torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        reward = Product()
        called(reward, precision=precision).score(batch(1))
        assert reward.dtype is dtype


def test_a_reward_is_loaded_where_it_wants_to_be() -> None:
    class Where(RewardBase):
        def load(self, device: torch.device) -> None:
            self.device = device

    for declared, configured, expected in ((None, None, "meta"), ("cpu", None, "cpu"), (None, "cpu", "cpu")):
        reward = Where()
        reward.traits = Traits(device=declared)
        called(reward, device=configured).load(torch.device("meta"))
        assert str(reward.device) == expected


def test_a_device_that_is_not_there_is_found_before_anything_is_loaded() -> None:
    scorer = Scorer([RewardConfig(type="x:y", name="r", device="warp:9")], {"r": Mean()})
    with pytest.raises(InputError, match=r"rewards \(r\).device: unknown device 'warp:9'"):
        scorer.check_devices()


@pytest.mark.parametrize(("configured", "declared"), [("cuda:1", None), (None, "cuda:1"), ("cuda:1", "cpu")])
def test_one_gpu_is_refused_for_the_rewards_of_several_ranks(configured: str | None, declared: str | None) -> None:
    """Each rank would load a copy there."""
    reward = Mean()
    reward.traits = Traits(device=declared)
    scorer = Scorer([RewardConfig(type="x:y", name="r", device=configured)], {"r": reward})
    with pytest.raises(InputError, match=r"rewards \(r\)\.device: 'cuda:1' is the same .* 8 ranks.*`type: remote`"):
        scorer.check_devices(8)


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", "auto"])
def test_several_ranks_may_have_rewards_on_their_own_gpu_and_on_the_cpu(device: str | None) -> None:
    Scorer([RewardConfig(type="x:y", name="r", device=device)], {"r": Mean()}).check_devices(8)


# Failures


def test_failures_and_retries_are_counted() -> None:
    reward = called(After("once", calls=1), retries=3)
    reward.score(batch(2))
    reward.score(batch(2, seed=1))
    counts = reward.counts
    assert (counts.calls, counts.images, counts.failures, counts.retries) == (3, 4, 1, 1)
    assert counts.seconds > 0
    assert counts.since(counts).calls == 0


def test_what_a_reward_repeats_itself_is_counted_too() -> None:
    reward = Mean()
    reward.repeats = 5
    assert (called(reward).counts.failures, called(reward).counts.retries) == (5, 5)


def test_each_reason_is_told() -> None:
    reasons = ["out of memory", "out of memory", "out of paper"]

    class Moody(RewardBase):
        def score(self, batch: RewardBatch) -> Scores:
            raise RuntimeError(reasons.pop(0))

    with pytest.raises(RewardFailed, match=r"3 attempts .* out of memory \(2 times\); RuntimeError: out of paper"):
        called(Moody(), retries=2).score(batch(1))


def test_pauses_double() -> None:
    reward = CalledReward(RewardConfig(type="x:y", name="r", retries=2, backoff=0.1), After("raise", calls=0))
    began = time.perf_counter()
    with pytest.raises(RewardFailed):
        reward.score(batch(1))
    assert 0.3 <= time.perf_counter() - began < 3


def test_a_call_that_takes_too_long_is_a_failure() -> None:
    with pytest.raises(RewardFailed, match=r"no answer within 0\.2 seconds"):
        (hangs := called(After("hang", calls=0), retries=0, timeout=0.2)).score(batch(1))
    assert hangs.counts.failures == 1


def test_a_call_with_a_timeout_that_ends_its_thread_is_told_at_once() -> None:
    began = time.perf_counter()
    with pytest.raises(RewardFailed, match=r"failed on .*: SystemExit: 1"):
        called(After("exit", calls=0), retries=0, timeout=20).score(batch(1))
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_ctrl_c_is_no_failure_to_be_tried_again(timeout: float | None, ctrl_c: Callable[[float], None]) -> None:
    reward = called(After("hang", calls=0), retries=3, timeout=timeout)
    ctrl_c(0.2)
    with pytest.raises(KeyboardInterrupt):
        reward.score(batch(1))
    assert reward.counts.calls == 1


def test_a_keyboard_interrupt_that_a_reward_raises_is_its_failure() -> None:
    with pytest.raises(RewardFailed, match=r"reward 'r' failed after 2 attempts .*: KeyboardInterrupt"):
        called(After("interrupt", calls=0), retries=1).score(batch(1))


class Loud(BaseException):
    """Its message is longer than a terminal."""

    def __str__(self) -> str:
        return 5_000_000 * "x"


class Mute(Exception):
    def __str__(self) -> str:
        sys.exit(0)


def endless() -> None:
    endless()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sys.exit(0), "SystemExit: 0"),
        (lambda: _raise(GeneratorExit()), "GeneratorExit"),
        (lambda: _raise(StopIteration()), "StopIteration"),
        (endless, "RecursionError: maximum recursion"),
        (lambda: _raise(Loud()), r"Loud: x+\.\.\. \(5,000,000 characters\)"),
        (lambda: _raise(Mute()), "Mute: its message cannot be shown: SystemExit"),
        (lambda: _raise(KeyboardInterrupt()), "KeyboardInterrupt"),
    ],
)
def test_whatever_user_code_raises_is_a_failure_with_its_name(call: Callable[[], None], says: str) -> None:
    """In whichever method, and whatever would end the program: here as it is under the command line."""

    class Ends(RewardBase):
        def applies_to(self, prompt: Prompt) -> bool:
            call()
            return True

        def load(self, device: torch.device) -> None:
            call()

        def score(self, batch: RewardBatch) -> Scores:
            call()
            return []

    reward = called(Ends(), retries=0)
    with Stopping():
        with pytest.raises(RewardFailed, match=f"reward 'r' failed on an image .*: {says}") as failed:
            reward.score(batch(1))
        assert len(str(failed.value)) < 3000
        with pytest.raises(InputError, match=f"reward 'r' failed to say whether it applies .*: {says}"):
            reward.applies_to(Prompt(0, "a cup", "s"))
        with pytest.raises(InputError, match=f"rewards: 'r' cannot be loaded: {says}"):
            reward.load(torch.device("cpu"))


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("row", [-1, 3, None])
def test_an_error_about_a_row_that_is_not_there_still_names_its_reward(row: Any) -> None:
    class Lost(RewardBase):
        def score(self, batch: RewardBatch) -> Scores:
            error = RuntimeError("lost")
            error.row = row  # type: ignore[attr-defined]
            raise error

    with pytest.raises(RewardFailed, match=r"reward 'r' failed .* prompt 0 .*: RuntimeError: lost"):
        called(Lost(), retries=0).score(batch(3))


# Which prompts


def test_a_rule_for_prompts_that_raises_is_bad_input_until_the_run_begins() -> None:
    reward = called(NeedsTarget())
    assert reward.applies_to(Prompt(0, "a sign", "s", {"target": "K7"}))
    broken = r"reward 'r' failed to say whether it applies to prompt 4 \('a cup'\): KeyError: 'target'"
    with pytest.raises(InputError, match=broken) as found:
        reward.applies_to(Prompt(4, "a cup", "s"))
    assert isinstance(found.value.__cause__, KeyError)
    reward.load(torch.device("cpu"))
    with pytest.raises(RewardFailed, match=broken):
        reward.applies_to(Prompt(4, "a cup", "s"))


def test_a_fault_that_a_reward_finds_in_a_prompt_is_told_with_its_name() -> None:
    class Strict(Mean):
        def applies_to(self, prompt: Prompt) -> bool:
            raise InputError("target: found 7; give a text")

    for loaded in (False, True):
        reward = called(Strict())
        if loaded:
            reward.load(torch.device("cpu"))
        with pytest.raises(InputError, match=r"^rewards \(r\): target: found 7; give a text$"):
            reward.applies_to(Prompt(0, "a cup", "s"))


# Lanes


class Waits(Mean):
    """Takes a while, as a reward on another machine does."""

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.inside = self.most = 0
        self.lock = threading.Lock()

    def score(self, batch: RewardBatch) -> Scores:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.1)
        with self.lock:
            self.inside -= 1
        return super().score(batch)


def test_batches_wait_for_other_machines_at_the_same_time() -> None:
    """Eight batches of 0.1 s for a reward with four under way, beside one that computes here and takes turns."""
    far, here = Waits(concurrency=4), Waits()
    scorer = Scorer([RewardConfig(type="x:y", name=name) for name in ("far", "here")], {"far": far, "here": here})
    whole = batch(16)
    table = scorer.score(["far", "here"], torch.from_numpy(whole.images), whole.prompts, batch_size=2)
    assert (far.most, here.most) == (4, 1)
    assert table.values[:, 0].tolist() == table.values[:, 1].tolist() == Mean().score(whole)


def test_rewards_on_one_device_take_turns() -> None:
    class Shared(Waits):
        inside_all = most_all = 0

        def score(self, batch: RewardBatch) -> Scores:
            Shared.inside_all += 1
            Shared.most_all = max(Shared.most_all, Shared.inside_all)
            time.sleep(0.01)
            Shared.inside_all -= 1
            return Mean.score(self, batch)

    rewards = {name: Shared() for name in "abc"}
    scorer = Scorer([RewardConfig(type="x:y", name=name) for name in rewards], rewards)
    scorer.score(list(rewards), torch.from_numpy(batch(8).images), batch(8).prompts, batch_size=2)
    assert Shared.most_all == 1


# Bounds


@pytest.mark.parametrize(
    ("clip", "higher", "expected"),
    [
        ((None, 2.0), True, [-3.0, 1.0, 2.0]),
        ((-1.0, None), True, [-1.0, 1.0, 5.0]),
        ((0.0, 2.0), True, [0.0, 1.0, 2.0]),
        ((None, 2.0), False, [-2.0, 1.0, 5.0]),  # own units: at most 2, and the table holds minus that
        ((-4.0, None), False, [-3.0, 1.0, 4.0]),
    ],
)
def test_scores_are_clipped_in_the_rewards_own_units(clip: Any, higher: bool, expected: list[float]) -> None:
    reward = Mean(higher_is_better=higher)
    scorer = Scorer([RewardConfig(type="x:y", name="r", clip=clip)], {"r": reward})
    values = torch.tensor([[-3.0], [1.0], [5.0], [0.0]], dtype=torch.float64)
    applicable = torch.tensor([[True], [True], [True], [False]])
    clipped = scorer.clipped(RewardTable(("r",), values, applicable))
    assert clipped.values[:, 0].tolist() == [*expected, 0.0]
    assert values[:, 0].tolist() == [-3.0, 1.0, 5.0, 0.0]
