"""Rewards. Whoever writes one imports from here; see docs/adding_a_reward.md."""

from marble_rl.rewards.core.base import Images, NotedScore, RewardBase, RewardBatch, Scores, Traits
from marble_rl.section import FilePath, ModelPath, Section

__all__ = ["FilePath", "Images", "ModelPath", "NotedScore", "RewardBase", "RewardBatch", "Scores", "Section", "Traits"]
