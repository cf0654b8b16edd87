"""Stages 1 to 4: what a rollout holds, whoever samples it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reference
from marble_rl.distributed.world import World
from marble_rl.training.experience import gather_table, shares_of_groups
from marble_rl.types import Group, Prompt, RewardTable
from steps import parts


def test_advantages_are_those_of_the_scores_within_each_prompt(tiny_sd3: Path, tmp_path: Path) -> None:
    experience = parts(tiny_sd3, tmp_path).gather()
    table, scored = experience.unclipped, experience.scored
    assert table.names == ("small", "bright", "colour")
    assert len(table.values) == 16
    assert torch.equal(scored.table.values, table.values), "no reward has bounds here"
    rows = reference.group_advantages(
        table.values.tolist(), scored.group_ids.tolist(), table.applicable.tolist(), "group"
    )
    expected = torch.tensor(rows, dtype=torch.float64).clamp(-5, 5)
    torch.testing.assert_close(scored.advantages.double(), expected, rtol=1e-9, atol=1e-12)
    colours = torch.tensor([group.prompt.source == "colours" for group in experience.rollout.drawn])
    assert torch.equal(table.applicable[:, 2], colours.repeat_interleave(4)), "colour applies where one is named"


def test_the_same_rollout_twice_and_another_for_another_index(tiny_sd3: Path, tmp_path: Path) -> None:
    built = parts(tiny_sd3, tmp_path)
    first, again, other = built.gather(0), built.gather(0), built.gather(1)
    assert torch.equal(first.rollout.images, again.rollout.images)
    assert torch.equal(first.scored.advantages, again.scored.advantages)
    assert not torch.equal(first.rollout.images, other.rollout.images)


def test_scores_beyond_a_bound_bring_no_advantage_but_are_logged(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = [{"name": "bright", "type": "brightness", "clip": [None, -2.0]}]
    experience = parts(tiny_sd3, tmp_path, rewards=rewards).gather()
    assert (experience.unclipped.values > -2.0).all()
    assert (experience.scored.table.values == -2.0).all()
    assert (experience.scored.advantages == 0).all()


def test_a_reward_that_is_switched_off_is_not_scored(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = [
        {"name": "bright", "type": "brightness"},
        {"name": "small", "type": "jpeg_compressibility", "schedule": [[5, None]]},
    ]
    experience = parts(tiny_sd3, tmp_path, rewards=rewards).gather()
    assert experience.unclipped.applicable[:, 0].all()
    assert not experience.unclipped.applicable[:, 1].any()


def test_watched_rewards_are_scored_and_not_trained(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = [
        {"name": "bright", "type": "brightness"},
        {"name": "small", "type": "jpeg_compressibility", "held_out": True, "watch": {}},
    ]
    experience = parts(tiny_sd3, tmp_path, rewards=rewards).gather()
    assert experience.unclipped.names == ("bright",)
    assert experience.watched.keys() == {"watch/small"}
    assert experience.means.keys() == {"bright", "small"}


class OneOf(World):
    """Rank ``rank`` of three, with the tables of all."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parts: list[RewardTable] = []

    def gather(self, value: object) -> list:  # type: ignore[type-arg, override]
        return self.parts


@pytest.mark.parametrize("updates", [1, 2])
def test_ranks_share_the_groups_of_every_update_and_gather_all_scores(updates: int) -> None:
    groups = [Group(slot, Prompt(slot, "p", "s"), slot * updates // 8, 0) for slot in range(8)]
    worlds = [OneOf(rank) for rank in range(3)]
    shares = shares_of_groups(groups, 3)
    assert sorted(group.slot for share in shares for group in share) == list(range(8))
    for update in range(updates):
        counts = [sum(group.update == update for group in share) for share in shares]
        assert max(counts) - min(counts) <= 1
    tables = [
        RewardTable(
            ("r",),
            torch.tensor([[10.0 * group.slot + i] for group in share for i in range(2)], dtype=torch.float64),
            torch.ones(2 * len(share), 1, dtype=torch.bool),
        )
        for share in shares
    ]
    for world, own in zip(worlds, tables, strict=True):
        world.parts = tables
        whole = gather_table(world, own, groups, group_size=2)
        assert whole.values[:, 0].tolist() == [10.0 * slot + i for slot in range(8) for i in range(2)]
        assert whole.applicable.all()
