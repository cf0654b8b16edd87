"""Rollouts in the tunnel: samples of the old policy with their scores and advantages.

*Scouts* are candidates that are sampled in few steps and scored; of each prompt's candidates those whose advantages are
largest (the length of the vector over all rewards) are sampled again from the same noise, in all steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.advantages import Scored, group_advantages
from marble_rl.seeding import generator
from tools.tunnel.world import PROMPTS, SIZE, SOURCES, Flow, Prompts, Regime, prompts, scored

GROUP = 8
SAMPLING_STEPS = 6
SCOUT_STEPS = 2
CLIP = 5.0
SIGMAS = torch.linspace(1, 0, SAMPLING_STEPS + 1)


@dataclass(frozen=True)
class Rollout:
    """N samples."""

    batch: Prompts
    x0: Tensor
    """[N, SIZE]"""
    seen: Scored
    halves: Tensor
    """[N]"""
    index: Tensor
    """[N]: place of each sample's prompt in the split"""


def roll_out(model: Flow, regime: Regime, seed: int, number: int, scouts: int = 1) -> Rollout:
    """GROUP samples of each prompt. ``scouts``: candidates for each of them; 1: none."""
    g = generator(seed, "tunnel/prompts", number)
    chosen = []
    for source, count in enumerate(regime.groups):
        chosen.append(source * PROMPTS + torch.randperm(PROMPTS, generator=g)[:count])
    index = torch.cat(chosen)
    assert len(regime.groups) == SOURCES
    groups = torch.arange(len(index)).repeat_interleave(GROUP)
    index = index.repeat_interleave(GROUP)
    batch = prompts("train").rows(index)
    noise_of = generator(seed, "tunnel/rollout", number)
    if scouts > 1:
        noise = _scouted(model, regime, index[::GROUP], scouts, noise_of)
        x0 = _integrate(model, noise, batch, SIGMAS)
    else:
        x0 = sample(model, batch, noise_of)
    table = scored(regime.rewards, x0, batch)
    advantages = group_advantages(table.values, groups, table.applicable).clamp(-CLIP, CLIP)
    return Rollout(batch, x0, Scored(table, groups, advantages, "group", CLIP), groups % 2, index)


@torch.no_grad()
def sample(model: Flow, of: Prompts, g: torch.Generator) -> Tensor:
    """Euler steps from noise to x [N, SIZE]."""
    return _integrate(model, torch.randn(len(of.y), SIZE, generator=g), of, SIGMAS)


@torch.no_grad()
def _integrate(model: Flow, x: Tensor, of: Prompts, sigmas: Tensor) -> Tensor:
    for sigma, after in itertools.pairwise(sigmas):
        x = x + (after - sigma) * model(x, sigma.expand(len(x)), of.condition)
    return x


def _scouted(model: Flow, regime: Regime, of_groups: Tensor, scouts: int, g: torch.Generator) -> Tensor:
    """[groups * GROUP, SIZE]: the noise of the best and worst candidates."""
    each = GROUP * scouts
    candidates = prompts("train").rows(of_groups.repeat_interleave(each))
    noise = torch.randn(len(candidates.y), SIZE, generator=g)
    x0 = _integrate(model, noise, candidates, torch.linspace(1, 0, SCOUT_STEPS + 1))
    table = scored(regime.rewards, x0, candidates)
    ids = torch.arange(len(of_groups)).repeat_interleave(each)
    extreme = group_advantages(table.values, ids, table.applicable).square().sum(1).view(-1, each)
    best = extreme.topk(GROUP, dim=1).indices + each * torch.arange(len(of_groups))[:, None]
    return noise[best.flatten()]
