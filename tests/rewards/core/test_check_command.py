"""`marble rewards check` in process: which prompt is tried, and what is measured where."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from marble_rl.devices import resident
from marble_rl.rewards.builtin.detection import Detection
from marble_rl.rewards.core.base import Images
from marble_rl.rewards.core.check_command import RewardCheck, check_reward
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt

CPU = torch.device("cpu")


def checked(config: RewardConfig, device: torch.device = CPU, prompts: tuple[Prompt, ...] = ()) -> RewardCheck:
    return check_reward(Scorer([config], build_rewards([config]))[config.name], device, prompts)


def test_memory_on_the_cpu_is_not_compared_with_that_of_the_run_device() -> None:
    """A reward kept on the CPU of a machine with a GPU: what the process held before is not the reward's."""
    found = checked(RewardConfig(type="brightness", name="r", device="cpu"), torch.device("cuda"))
    assert found.error is None
    assert found.memory_bytes is not None
    assert found.memory_bytes < resident() / 2


@pytest.mark.full
def test_a_sample_prompt_from_outside_its_world_is_passed_over() -> None:
    found = checked(RewardConfig(type="geneval", name="objects"))
    assert found.error is None
    assert found.prompt == "a red marble"


def test_a_prompt_of_the_config_from_outside_its_world_is_told() -> None:
    dog = Prompt(0, "a dog", "mine", {"include": [{"class": "dog", "count": 1}]})
    found = checked(RewardConfig(type="geneval", name="objects"), prompts=(dog,))
    assert "detector: photo" in str(found.error)


@pytest.mark.parametrize(
    ("what", "says"),
    [("exit", "SystemExit: 1"), ("cancel", "CancelledError: cancelled"), ("interrupt", "KeyboardInterrupt")],
)
def test_a_reward_that_would_end_the_program_is_told(what: str, says: str) -> None:
    params = {"what": what, "calls": 1}
    assert checked(RewardConfig(type="rewards_for_tests:After", name="r", params=params)).error == says


def test_ctrl_c_ends_the_check(ctrl_c: Callable[[float], None]) -> None:
    ctrl_c(0.3)
    with pytest.raises(KeyboardInterrupt):
        checked(RewardConfig(type="rewards_for_tests:slow", name="r", params={"seconds": 30}))


class SeesNothing:
    def load(self, device: torch.device) -> None:
        return None

    def detect(self, images: Images) -> list[list[Detection]]:
        return [[] for _ in images]


@pytest.mark.parametrize("credit", ["strict", "dense"])
def test_nothing_found_is_no_error_also_where_scores_may_be_negative(credit: str) -> None:
    params = {"detector": f"{__name__}:SeesNothing", "credit": credit}
    found = checked(RewardConfig(type="geneval", name="objects", params=params))
    assert found.error is None
    assert "gave 0 to 6 different pictures" in str(found.warning)
