"""Stage 3: score images with every reward that applies to them.

Images go to a reward in batches of consecutive rows: in training one group, in evaluations a fixed number. Of each
batch, the reward gets the images that it applies to. So a score does not depend on how work is divided over ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.rewards.core.background import PendingScores
from marble_rl.rewards.core.base import Reward
from marble_rl.rewards.core.calls import CalledReward, Counts
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Media, Prompt, RewardTable

UNLEARNT = "training prompt, so it could never be learnt"


class Scorer:
    """The rewards of a run. Their models are loaded once, for training and evaluation."""

    def __init__(self, configs: Sequence[RewardConfig], rewards: Mapping[str, Reward]) -> None:
        self._rewards = {config.name: CalledReward(config, rewards[config.name]) for config in configs}

    @property
    def names(self) -> tuple[str, ...]:
        """All rewards; after `load`, those that could be loaded."""
        return tuple(self._rewards)

    def __getitem__(self, name: str) -> CalledReward:
        return self._rewards[name]

    def load(self, device: torch.device) -> list[str]:
        """Load every reward's weights. Optional rewards that cannot be loaded are left out; returns a remark on
        each."""
        remarks = []
        for name, reward in list(self._rewards.items()):
            try:
                reward.load(device)
            except InputError as error:
                if not reward.config.optional:
                    raise
                del self._rewards[name]
                remarks.append(f"left out: optional reward {str(error).removeprefix('rewards: ')}")
        return remarks

    def check_applicability(self, names: Sequence[str], prompts: Sequence[Prompt], lost: str = UNLEARNT) -> None:
        """Raise InputError unless each of these rewards applies to at least one of the prompts. ``lost``: what they
        are, and what does not work without."""
        for name in names:
            if not any(self._rewards[name].applies_to(prompt) for prompt in prompts):
                raise InputError(
                    f"rewards: {name!r} applies to no {lost}; "
                    "add prompts that it applies to, name it in a source's `rewards`, or remove it"
                )

    def score(self, names: Sequence[str], images: Tensor, prompts: Sequence[Prompt], batch_size: int) -> RewardTable:
        """Scores of images [N, H, W, 3] uint8 by the rewards named, ``batch_size`` neighbouring rows at a time."""
        with self.in_background(names, prompts) as scoring:
            for batch in images.split(batch_size):
                scoring.add(batch)
            return scoring.finish()

    @contextmanager
    def in_background(
        self, names: Sequence[str], prompts: Sequence[Prompt], off: Collection[str] = ()
    ) -> Iterator[PendingScores]:
        """Score images in the background, in the batches that the caller adds. ``prompts``: one for each image, in
        order. Rewards in ``off`` keep their columns in the table, but apply to no image."""
        rewards = [self._rewards[name] for name in names]
        cells = [r.name not in off and r.applies_to(prompt) for prompt in prompts for r in rewards]
        applicable = torch.tensor(cells, dtype=torch.bool).reshape(len(prompts), len(rewards))
        scoring = PendingScores(rewards, prompts, applicable)
        try:
            yield scoring
        finally:
            scoring.close()

    def clipped(self, table: RewardTable) -> RewardTable:
        """The scores clamped to the bounds that `clip` sets for training."""
        values = table.values.clone()
        for column, name in enumerate(table.names):
            reward = self._rewards[name]
            if reward.config.clip is not None:
                low, high = reward.config.clip
                if not reward.traits.higher_is_better:  # the table holds negated scores
                    low, high = (None if high is None else -high), (None if low is None else -low)
                values[:, column].clamp_(low, high)
        # Cells where the reward does not apply stay 0.
        return replace(table, values=torch.where(table.applicable, values, table.values))

    def check_media(self, media: Media) -> None:
        """Raise InputError unless every reward scores what the model makes, images or videos."""
        for reward in self._rewards.values():
            reward.check_media(media)

    def check_devices(self, ranks: int = 1) -> None:
        """Raise InputError unless the devices that the config names exist, and are not one GPU for several ranks."""
        for reward in self._rewards.values():
            reward.check_device(ranks)

    @property
    def seconds(self) -> float:
        """Seconds spent in reward calls so far, summed over rewards."""
        return sum(reward.counts.seconds for reward in self._rewards.values())

    def counts(self) -> dict[str, Counts]:
        """Counts of each reward's calls so far."""
        return {name: reward.counts for name, reward in self._rewards.items()}
