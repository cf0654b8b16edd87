"""Stages 1 to 4 for one rollout: draw prompts, sample images, score them, turn scores into advantages.

Every rank draws the same groups, samples and scores its share of them, and gathers the scores of all ranks: advantages
may need the whole rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from marble_rl.advantages import Scored, group_advantages
from marble_rl.config import RunConfig
from marble_rl.distributed.world import World
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import LoraPolicy
from marble_rl.rollout.rollout import roll_out
from marble_rl.runs.inputs import RunInputs
from marble_rl.runs.log import Display
from marble_rl.training.base_images import BaseImages, Reading
from marble_rl.training.metrics import reward_metrics
from marble_rl.types import Group, Metrics, RewardTable, Rollout


@dataclass(frozen=True)
class Experience:
    """A scored rollout, for all its optimizer updates. N counts the samples of all ranks."""

    rollout: Rollout
    """This rank's share."""
    scored: Scored
    """Scores after each reward's `clip`, and their advantages"""
    unclipped: RewardTable
    """Scores of the trained rewards before `clip`, signed so that higher is better; for the log"""
    clamped: Tensor
    """[N] number of a sample's advantages that the clamp changed"""
    watched: Metrics
    """Mean of each watched reward"""
    readings: dict[str, Reading] = field(default_factory=dict)
    """By guard, its scores against the base model's"""

    @property
    def means(self) -> dict[str, float]:
        """Mean of each trained or watched reward over the rollout, by its name."""
        figures = {**reward_metrics(self.unclipped), **self.watched}
        return {key.partition("/")[2]: mean for key, mean in figures.items()}


class ExperienceSource:
    """Gathers experience with the old policy."""

    def __init__(
        self,
        config: RunConfig,
        inputs: RunInputs,
        model: DiffusionModel,
        policy: LoraPolicy,
        prompts: PromptCache,
        world: World,
        base: BaseImages | None = None,
    ) -> None:
        """``base``: without it guards are not read."""
        self._base = base
        self._config = config
        self._inputs = inputs
        self._model = model
        self._policy = policy
        self._prompts = prompts
        self._world = world
        self._trained = config.trained_rewards
        self._watched = [name for name in config.watched_rewards if name in inputs.scorer.names]

    def gather(self, index: int, step: int, display: Display) -> Experience:
        """Rollout number ``index``, sampled and scored for the updates from ``step`` on."""
        c = self._config
        drawn = self._inputs.train.draw(c.trainer.seed, index, c.rollout.groups, c.rollout.updates)
        rollout, own = self._sample_and_score(index, step, drawn, display)
        all_scores = gather_table(self._world, own, drawn, c.rollout.group_size)
        unclipped = all_scores.columns(self._trained)
        clipped = self._inputs.scorer.clipped(unclipped)
        group_ids = torch.tensor([group.prompt.index for group in drawn]).repeat_interleave(c.rollout.group_size)
        raw = group_advantages(clipped.values, group_ids, clipped.applicable, c.advantages.std)
        clip = c.loss.adv_clip
        scored = Scored(clipped, group_ids, raw.clamp(-clip, clip), c.advantages.std, clip)
        watched = reward_metrics(all_scores.columns(self._watched), "watch")
        readings = {} if self._base is None else self._base.read(unclipped, drawn, display)
        return Experience(rollout, scored, unclipped, (raw.abs() > clip).sum(dim=1), watched, readings)

    def _sample_and_score(
        self, index: int, step: int, drawn: tuple[Group, ...], display: Display
    ) -> tuple[Rollout, RewardTable]:
        """Sample this rank's groups; each is scored in the background while the next one is sampled."""
        c, scorer = self._config, self._inputs.scorer
        groups = shares_of_groups(drawn, self._world.size)[self._world.rank]
        prompts = [group.prompt for group in groups for _ in range(c.rollout.group_size)]
        off = c.rewards_off(step)
        seconds_before = scorer.seconds
        with scorer.in_background([*self._trained, *self._watched], prompts, off) as scoring:
            done = 0

            def on_group(images: Tensor) -> None:
                nonlocal done
                done += 1
                scoring.add(images)
                display.within(step, 0.5 * done / len(groups))

            with display.stage("rollout"):
                rollout = roll_out(
                    self._model,
                    self._policy,
                    self._prompts,
                    groups,
                    c.rollout,
                    seed=c.trainer.seed,
                    index=index,
                    drawn=drawn,
                    lockstep=self._world.lockstep,
                    on_group=on_group,
                )
            with display.stage("rewards"):
                table = scoring.finish()
        display.add_time("scoring", scorer.seconds - seconds_before)
        return rollout, table


def shares_of_groups(groups: Sequence[Group], ranks: int) -> list[tuple[Group, ...]]:
    """The groups that each rank samples, in slot order.

    Ranks get equally many groups of each update, as near as whole groups allow, and, where there is a choice, of each
    prompt source: sources differ in the rewards that score them, and the slowest rank sets the pace.
    """
    shares: list[list[Group]] = [[] for _ in range(ranks)]
    dealt = Counter[tuple[int, int | str]]()
    for group in sorted(groups, key=lambda group: (group.update, group.prompt.source)):
        update, source = group.update, group.prompt.source
        rank = min(range(ranks), key=lambda r: (dealt[r, update], dealt[r, source], len(shares[r])))
        dealt.update([(rank, update), (rank, source)])
        shares[rank].append(group)
    return [tuple(sorted(share, key=lambda group: group.slot)) for share in shares]


def gather_table(world: World, own: RewardTable, groups: Sequence[Group], group_size: int) -> RewardTable:
    """Gather the scores of all ranks into one table, in slot order. ``groups``: the groups of all ranks."""
    values = torch.zeros(len(groups) * group_size, len(own.names), dtype=own.values.dtype)
    applicable = torch.zeros(values.shape, dtype=torch.bool)
    for share, part in zip(shares_of_groups(groups, world.size), world.gather(own), strict=True):
        slots = torch.tensor([group.slot for group in share])
        rows = (slots[:, None] * group_size + torch.arange(group_size)).flatten()
        values[rows], applicable[rows] = part.values, part.applicable
    return RewardTable(own.names, values, applicable)
