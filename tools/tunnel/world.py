"""The tunnel's world: prompts, a flow network that was trained on imperfect data, and rewards with exact definitions.

A sample x has 16 numbers. A prompt has a source and a code; together they define the point y(prompt) that the sample
should be. The data that the network learns first are noisy and shrunk: 0.6 y + noise, so every reward can rise.

    text           source 0 only   1 if the first four numbers are all near y, else 0
    composition    source 1 only   1 if the next four are all near y, else 0
    match, ...     every prompt    minus a weighted squared distance to a point near y
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from marble_rl.gradients.fused import fuse
from marble_rl.seeding import generator
from marble_rl.types import RewardTable

SIZE = 16
CODE = 6
SOURCES = 3
PROMPTS = 200
"""Prompts of a source, in each split"""
NEAR = 0.9
WIDTH = 64
DATA_STEPS = 1500
DATA_BATCH = 256


@dataclass(frozen=True)
class Prompts:
    """Rows of a batch or a split."""

    source: Tensor
    """[N] long"""
    condition: Tensor
    """[N, SOURCES + CODE]: what the network sees"""
    y: Tensor
    """[N, SIZE]"""

    def rows(self, index: Tensor) -> Prompts:
        return Prompts(self.source[index], self.condition[index], self.y[index])


@dataclass(frozen=True)
class Reward:
    """A reward of the world."""

    name: str
    score: Callable[[Tensor, Prompts], Tensor]
    """x [N, SIZE] -> [N]"""
    source: int | None = None
    """The only source that it applies to; None: all"""


def specialist(name: str, source: int, numbers: slice) -> Reward:
    def score(x: Tensor, prompts: Prompts) -> Tensor:
        return ((x - prompts.y)[:, numbers].abs() < NEAR).all(dim=1).double()

    return Reward(name, score, source)


def general(name: str, numbers: slice, shrink: Mapping[int, float] | None = None, scale: float = 1.0) -> Reward:
    """Minus the squared distance to y, where some numbers of y are multiplied by ``shrink``."""
    factor = torch.ones(SIZE)
    for number, by in (shrink or {}).items():
        factor[number] = by

    def score(x: Tensor, prompts: Prompts) -> Tensor:
        return -scale * ((x - prompts.y * factor)[:, numbers] ** 2).mean(dim=1).double()

    return Reward(name, score)


def easy(name: str, numbers: slice) -> Reward:
    """Saturates: nothing is left to gain once the distance is below what little training reaches."""

    def score(x: Tensor, prompts: Prompts) -> Tensor:
        return -((x - prompts.y)[:, numbers] ** 2).mean(dim=1).clamp_min(0.3).double()

    return Reward(name, score)


def opposing(name: str, numbers: slice) -> Reward:
    """Wants these numbers to be 0, whatever the prompt."""

    def score(x: Tensor, prompts: Prompts) -> Tensor:
        return -(x[:, numbers] ** 2).mean(dim=1).double()

    return Reward(name, score)


TEXT = specialist("text", 0, slice(0, 4))
COMPOSITION = specialist("composition", 1, slice(4, 8))
MATCH = general("match", slice(6, 16))
QUALITY = general("quality", slice(8, 16), {8: 0.5, 9: 0.5})
STYLE = general("style", slice(4, 16), {4: 0.3, 5: 0.3})
USUAL = (TEXT, COMPOSITION, MATCH, QUALITY, STYLE)


@dataclass(frozen=True)
class Regime:
    """What is trained on, and from where."""

    name: str
    about: str
    rewards: tuple[Reward, ...] = USUAL
    groups: tuple[int, int, int] = (4, 4, 4)
    """Prompt groups of each source in a rollout"""
    trained: int = 0
    """Steps of `fixed` coefficients that the start has behind it"""


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("balanced", "two specialists and three general rewards, every source as often"),
        Regime("rare", "specialists in 1 of 12 prompts each", groups=(1, 1, 10)),
        Regime(
            "scales",
            "one general reward on a scale of 26",
            rewards=(TEXT, COMPOSITION, general("match", slice(6, 16), scale=26.0), QUALITY, STYLE),
        ),
        Regime(
            "easy",
            "general rewards that saturate early",
            rewards=(TEXT, COMPOSITION, easy("match", slice(6, 16)), easy("quality", slice(8, 16)), STYLE),
        ),
        Regime(
            "many",
            "ten rewards, of which six nearly agree",
            rewards=(
                *(TEXT, COMPOSITION, MATCH, QUALITY, STYLE),
                *(general(f"match{i}", slice(6, 16), {10 + i: 0.8}) for i in range(1, 6)),
            ),
        ),
        Regime(
            "opposed",
            "one reward that opposes two others",
            rewards=(TEXT, COMPOSITION, MATCH, STYLE, opposing("plain", slice(8, 16))),
        ),
        Regime("late", "late in training, with little signal left", trained=300),
    )
}


@lru_cache
def prompts(split: str) -> Prompts:
    """The prompts of ``train`` or ``heldout``, the same in every regime."""
    g = generator(0, f"tunnel/prompts/{split}", 0)
    code = torch.randn(SOURCES * PROMPTS, CODE, generator=g)
    source = torch.arange(SOURCES).repeat_interleave(PROMPTS)
    maps = torch.randn(SOURCES, CODE, SIZE, generator=generator(0, "tunnel/maps", 0))
    y = 1.5 * torch.tanh(torch.einsum("nc,ncs->ns", code, maps[source]) / 1.5)
    return Prompts(source, torch.cat([nn.functional.one_hot(source, SOURCES).float(), code], dim=1), y)


def scored(rewards: Sequence[Reward], x: Tensor, of: Prompts) -> RewardTable:
    """Scores of samples x [N, SIZE] for their prompts."""
    applicable = torch.stack(
        [torch.ones(len(x), dtype=torch.bool) if r.source is None else of.source == r.source for r in rewards], dim=1
    )
    values = torch.stack([reward.score(x, of) for reward in rewards], dim=1).masked_fill(~applicable, 0.0)
    return RewardTable(tuple(reward.name for reward in rewards), values, applicable)


class Flow(nn.Module):
    """v(x, t, condition)"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SIZE + 3 + SOURCES + CODE, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, SIZE),
        )

    def forward(self, x: Tensor, t: Tensor, condition: Tensor) -> Tensor:
        time = t[:, None]
        output: Tensor = self.layers(torch.cat([x, time, time**2, torch.sin(3 * time), condition], dim=1))
        return output


def train_base() -> Flow:
    """The network that every training starts from: flow matching on imperfect data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Flow()
    g = generator(0, "tunnel/base", 0)
    data = prompts("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DATA_STEPS)
    for _ in range(DATA_STEPS):
        some = data.rows(torch.randint(len(data.y), (DATA_BATCH,), generator=g))
        x0 = 0.6 * some.y + 0.5 * torch.randn(some.y.shape, generator=g)
        noise, t = torch.randn(x0.shape, generator=g), torch.rand(DATA_BATCH, generator=g)
        x_t = (1 - t)[:, None] * x0 + t[:, None] * noise
        loss = ((model(x_t, t, some.condition) - (noise - x0)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    fuse(model)
    return model
