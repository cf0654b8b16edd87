"""Stage 1: the prompts of a split, and the groups of a rollout.

Drawing is stateless: the groups of rollout r are a function of (seed, r), so a resumed run draws the prompts that
the uninterrupted one would have drawn. Each source is traversed in random order without repetition, then
reshuffled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from marble_rl.errors import InputError
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.seeding import generator
from marble_rl.types import HALVES, Group, Prompt


class PromptSet:
    """All prompts of a split, by source."""

    def __init__(self, sources: Sequence[tuple[PromptSourceConfig, list[Prompt]]]) -> None:
        self.sources = {config.name: tuple(prompts) for config, prompts in sources}
        self._shares = [config.share for config, _ in sources]

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for prompts in self.sources.values() for prompt in prompts]

    def draw(self, seed: int, rollout: int, groups: int, updates: int = 1) -> tuple[Group, ...]:
        """The groups of one rollout, sorted by update and half; each half has its share of every source.

        Groups are assigned round-robin to the halves of the updates, continuing from one source to the next, so
        halves differ by at most one group in total and per source.
        """
        drawn: list[tuple[int, int, Prompt]] = []
        for (name, prompts), count in zip(self.sources.items(), self.counts(groups), strict=True):
            for prompt in _walk(prompts, seed, name, rollout, count):
                hand = len(drawn) % (HALVES * updates)
                drawn.append((hand % updates, hand // updates, prompt))
        drawn.sort(key=lambda item: item[:2])
        return tuple(Group(slot, prompt, update, half) for slot, (update, half, prompt) in enumerate(drawn))

    def counts(self, groups: int) -> list[int]:
        """Groups of each source in a rollout, by largest remainder."""
        total = sum(self._shares)
        exact = [groups * share / total for share in self._shares]
        counts = [int(x) for x in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
        for i in by_remainder[: groups - sum(counts)]:
            counts[i] += 1
        return counts

    def check_groups(self, groups: int) -> None:
        """Every source must be present, and no prompt twice, in a rollout."""
        every = zip(self.sources.items(), self.counts(groups), self._shares, strict=True)
        for (name, prompts), count, share in every:
            if count == 0:
                enough = math.ceil(sum(self._shares) / min(self._shares))
                raise InputError(
                    f"rollout.groups: {groups} groups are too few for the prompt sources: {name!r}, whose share is "
                    f"{share:g} of {sum(self._shares):g}, gets none. Use {enough} groups, or raise its share"
                )
            if count > len(prompts):
                raise InputError(
                    f"rollout.groups: {groups} groups need {count} different prompts of the source {name!r}, "
                    f"which has {len(prompts)}; lower rollout.groups or the source's share, or add prompts"
                )


def _walk(prompts: Sequence[Prompt], seed: int, source: str, rollout: int, count: int) -> list[Prompt]:
    """``count`` prompts for this rollout: pass after pass over the source, each in its own random order.

    A pass ends when fewer than ``count`` prompts are left in it, so that no rollout holds a prompt twice.
    """
    if count == 0:
        return []
    rollouts_per_pass = len(prompts) // count
    number, position = divmod(rollout, rollouts_per_pass)
    order = torch.randperm(len(prompts), generator=generator(seed, f"prompts/{source}", number)).tolist()
    return [prompts[i] for i in order[position * count : (position + 1) * count]]
