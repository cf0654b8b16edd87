"""Video rewards behind a real server give the scores that they give here."""

from __future__ import annotations

import numpy as np
import pytest

from clips import ball
from marble_rl.rewards.core.base import Reward, RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt
from reward_servers import CPU, client, serving

PARAMS = {
    "motion": {},
    "temporal_consistency": {"model": "mini"},
    "frames": {"reward": {"type": "brightness"}, "frames": 3},
}


def batch() -> RewardBatch:
    videos = np.stack([ball(frames=5, height=32, width=32, seed=seed).numpy() for seed in range(3)])
    videos[2] = videos[2, :1]  # one that stands still
    return RewardBatch(videos, [Prompt(i, "a ball rolls", "s") for i in range(3)])


@pytest.fixture(scope="module")
def local() -> dict[str, Reward]:
    rewards = build_rewards([RewardConfig(type=kind, name=kind, params=params) for kind, params in PARAMS.items()])
    for reward in rewards.values():
        reward.load(CPU)
    return rewards


def test_scores_of_videos_are_those_of_this_process(local: dict[str, Reward]) -> None:
    with serving(local) as url:
        for name, reward in local.items():
            remote = client(url, name, timeout=120.0)
            assert remote.traits.media == "video"
            scores = list(remote.score(batch()))
            assert scores == list(reward.score(batch()))
            assert len(set(scores)) > 1
