"""Rewards that give all images of a prompt the same score."""

from __future__ import annotations

import json

import torch

from marble_rl.advantages import Scored
from marble_rl.training.constants import GROUPS, ConstantRewards
from marble_rl.types import RewardTable

NAMES = ("flat", "good", "rare")


def rollout(first: int, groups: int = 4, rare: int = 0, good: bool = True) -> Scored:
    """Groups of two images; the last reward applies to the first ``rare`` groups, with one score for both images."""
    ids = torch.arange(first, first + groups).repeat_interleave(2)
    values = torch.zeros(2 * groups, 3)
    values[:, 0] = ids.float()  # differs between prompts, not within one
    values[1::2, 1] = float(good)
    applicable = torch.ones(2 * groups, 3, dtype=torch.bool)
    applicable[2 * rare :, 2] = False
    return Scored(RewardTable(NAMES, values, applicable), ids, torch.zeros(2 * groups, 3), "group", 5.0)


def test_a_constant_reward_is_told_once_and_a_rare_one_counts_its_own_groups() -> None:
    constants = ConstantRewards(NAMES)
    told = [list(constants.observe(rollout(4 * i, rare=1))) for i in range(GROUPS + 5)]
    assert [i for i, messages in enumerate(told) if messages] == [GROUPS // 4 - 1, GROUPS - 1]
    assert "'flat' was constant in the last 20 groups" in told[GROUPS // 4 - 1][0]
    assert "'rare' was constant in the last 20 groups that it applies to" in told[GROUPS - 1][0]


def test_one_group_with_a_difference_begins_the_count_anew_and_a_resumed_run_goes_on_counting() -> None:
    constants = ConstantRewards(NAMES)
    assert not [
        *constants.observe(rollout(0, groups=GROUPS - 1, good=False)),
        *constants.observe(rollout(40, groups=1)),
    ][1:]
    resumed = ConstantRewards(NAMES)
    resumed.load_state_dict(json.loads(json.dumps(constants.state_dict())))
    (message,) = resumed.observe(rollout(50, groups=GROUPS, good=False))
    assert "'good'" in message, "the other was told before"
    ConstantRewards(NAMES).load_state_dict({})
