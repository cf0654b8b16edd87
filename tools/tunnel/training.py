"""One training in the tunnel: the stages of marble_rl/training/trainer.py on the small flow."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from marble_rl.advantages import Scored, group_advantages
from marble_rl.balancing.base import Balancer, Guarding
from marble_rl.balancing.registry import RULES
from marble_rl.config.run import OptimizerConfig
from marble_rl.gradients.accumulate import reward_gradients
from marble_rl.losses.base import Noised
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.rewards.core.settings import GuardConfig
from marble_rl.rollout.settings import OLD_POLICY_PRESETS
from marble_rl.seeding import generator
from marble_rl.training.base_images import Reading
from marble_rl.training.floors import Floors
from marble_rl.training.update import Updater
from marble_rl.types import RewardTable
from tools.tunnel.rules import StepsAlongMomenta
from tools.tunnel.world import PROMPTS, REGIMES, SIZE, SOURCES, Flow, Prompts, Regime, prompts, scored, train_base

STEPS = 200
GROUP = 8
SAMPLING_STEPS = 6
TIMESTEPS = 2
EVALUATION_IMAGES = 8
BASE_IMAGES = 32
"""Of each training prompt, for the base scores of guards: nearly exact"""
GUARD = "guard."
"""Prefix of a guard's floor among the settings of a rule: `fair:guard.plain=-0.1`"""
SIGMAS = torch.linspace(1, 0, SAMPLING_STEPS + 1)
OPTIMIZER = OptimizerConfig(lr=4e-4)
LOSS = Nft(NftSettings())


@dataclass
class Outcome:
    """What a training did."""

    gains: dict[str, float]
    """Held-out reward after training minus before"""
    length: float
    """Mean length of the applied change of the weights"""
    levels: dict[str, float] = field(default_factory=dict)
    """Of the guards, on the training prompts at the end"""


class Policy:
    """The flow's weights as one flat tensor, with the EMA that is evaluated: what `Updater` needs of a policy."""

    def __init__(self, model: Flow) -> None:
        self.parameters = list(model.parameters())
        self.names = [name for name, _ in model.named_parameters()]
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters])
        for p, part in zip(self.parameters, self.flat.split([p.numel() for p in self.parameters]), strict=True):
            p.data = part.view_as(p)
        self.ema = self.flat.clone()

    @torch.no_grad()
    def blend(self, target: str, source: str, decay: float) -> None:
        if target == "ema":
            self.ema.mul_(decay).add_(self.flat, alpha=1 - decay)


@torch.no_grad()
def sample(model: Flow, of: Prompts, g: torch.Generator) -> Tensor:
    """Euler steps from noise to x [N, SIZE]."""
    x = torch.randn(len(of.y), SIZE, generator=g)
    for sigma, after in itertools.pairwise(SIGMAS):
        x = x + (after - sigma) * model(x, sigma.expand(len(x)), of.condition)
    return x


def evaluated(model: Flow, regime: Regime) -> dict[str, float]:
    """Mean of each reward on the held-out prompts."""
    held_out = prompts("heldout")
    every = held_out.rows(torch.arange(len(held_out.y)).repeat_interleave(EVALUATION_IMAGES))
    table = scored(regime.rewards, sample(model, every, generator(0, "tunnel/evaluation", 0)), every)
    return {name: table.mean(name) or 0.0 for name in table.names}


@lru_cache
def start(regime_name: str) -> Flow:
    """The model that a regime's trainings start from."""
    regime = REGIMES[regime_name]
    if not regime.trained:
        return base()
    model = copy.deepcopy(base())
    rule = rule_named({"type": "fixed"}, regime)
    _train(model, rule, regime, seed=10_000, steps=regime.trained)
    return model


@lru_cache
def base() -> Flow:
    return train_base()


@lru_cache
def before(regime_name: str) -> dict[str, float]:
    return evaluated(start(regime_name), REGIMES[regime_name])


@lru_cache
def base_table(regime_name: str) -> RewardTable:
    """Scores of the starting model on every training prompt: row p * BASE_IMAGES + j is image j of prompt p."""
    train = prompts("train")
    every = train.rows(torch.arange(len(train.y)).repeat_interleave(BASE_IMAGES))
    return scored(
        REGIMES[regime_name].rewards, sample(start(regime_name), every, generator(0, "tunnel/base", 1)), every
    )


def reading(table: RewardTable, index: Tensor, base: RewardTable, name: str) -> Reading | None:
    """A guard's scores against the base model's. ``index`` [N]: the prompt of each sample."""
    column = table.names.index(name)
    own = base.values[:, column].view(-1, BASE_IMAGES)
    applicable = table.applicable[:, column]
    if not applicable.any():
        return None
    difference = (table.values[:, column] - own.mean(1)[index])[applicable].mean()
    return Reading(float(difference), float(own[index].var(1).sum()), len(index))


def rule_named(section: dict[str, Any], regime: Regime, seed: int = 0) -> Balancer:
    own = {key: value for key, value in section.items() if not key.startswith(GUARD)}
    settings = RULES.settings_for(own).model_validate(own)
    names = [reward.name for reward in regime.rewards]
    return RULES.part_of(settings)(settings, names, adv_clip=5.0, seed=seed, guards=list(floors_in(section)))


def floors_in(section: dict[str, Any]) -> dict[str, GuardConfig]:
    floors = {key.removeprefix(GUARD): value for key, value in section.items() if key.startswith(GUARD)}
    return {name: GuardConfig(floor=floor) for name, floor in floors.items()}


def run(section: dict[str, Any], regime_name: str, seed: int, steps: int = STEPS) -> Outcome:
    """Train with a balance section in a regime."""
    torch.set_num_threads(1)
    regime = REGIMES[regime_name]
    model = copy.deepcopy(start(regime_name))
    floors = Floors(floors_in(section))
    length = _train(model, rule_named(section, regime, seed), regime, seed, steps, floors)
    after, first = evaluated(model, regime), before(regime_name)
    levels = {name: level.value or 0.0 for name, level in floors.levels.by_guard.items()}
    return Outcome({name: after[name] - first[name] for name in first}, length, levels)


def _train(model: Flow, rule: Balancer, regime: Regime, seed: int, steps: int, floors: Floors | None = None) -> float:
    """Leaves the EMA weights in ``model`` and the levels of guards in ``floors``; mean length of a step."""
    floors = floors or Floors({})
    policy = Policy(model)
    updater = Updater(policy, OPTIMIZER, OLD_POLICY_PRESETS["on_policy"], steps)  # type: ignore[arg-type]
    lengths = 0.0
    for step in range(steps):
        batch, halves, group_ids, index = _draw(regime, seed, step)
        x0 = sample(model, batch, generator(seed, "tunnel/rollout", step))
        table = scored(regime.rewards, x0, batch)
        advantages = group_advantages(table.values, group_ids, table.applicable).clamp(-5, 5)
        seen = Scored(table, group_ids, advantages, "group", 5.0)
        readings = {name: reading(table, index, base_table(regime.name), name) for name in floors.guards}
        levels = floors.after({name: read for name, read in readings.items() if read is not None})
        gradient, state = _gradient(model, policy.parameters, rule, seen, x0, batch, halves, seed, step, levels.rates)
        floors.commit(levels, {})
        old = policy.flat.clone()
        rule.commit(state)
        if isinstance(rule, StepsAlongMomenta):
            _replace_first_moment(updater, gradient, rule.first_moment())
        updater.apply(gradient, 0.0, step)
        lengths += float((policy.flat - old).norm())
    policy.flat.copy_(policy.ema)
    return lengths / steps


def _replace_first_moment(updater: Updater, gradient: Tensor, moment: Tensor) -> None:
    """AdamW's first moment becomes ``moment`` [P] in the step with this gradient (not clipped here)."""
    for state in updater.optimizer.state.values():
        b = updater.optimizer.param_groups[0]["betas"][0]
        state["exp_avg"].copy_((moment - (1 - b) * gradient) / b)


def _gradient(
    model: Flow,
    params: Sequence[nn.Parameter],
    rule: Balancer,
    seen: Scored,
    x0: Tensor,
    batch: Prompts,
    halves: Tensor,
    seed: int,
    step: int,
    rates: dict[str, float],
) -> tuple[Tensor, Any]:
    """The update's gradient [P], and the rule's new state."""
    g = generator(seed, "tunnel/noise", step)
    rows = torch.arange(len(x0)).repeat_interleave(TIMESTEPS)
    t = SIGMAS[torch.randint(SAMPLING_STEPS, (len(rows),), generator=g)]
    noise = torch.randn(len(rows), SIZE, generator=g)
    x = x0[rows]
    sample_ = Noised(x, noise, (1 - t)[:, None] * x + t[:, None] * noise, t)
    loss = LOSS.terms(model(sample_.x_t, t, batch.condition[rows]), None, sample_)
    if rule.needs_gradients(step):
        gradients = reward_gradients(loss.slope, None, seen.advantages[rows].float(), params, halves=halves[rows])
        weighing = rule.weigh(step, gradients, rates) if isinstance(rule, Guarding) else rule.weigh(step, gradients)
        return weighing.weights.to(gradients.g) @ gradients.g, weighing.state
    combination = rule.combine(step, seen)
    total = (combination.advantage[rows].to(loss.slope) * loss.slope).mean()
    flat = torch.cat([part.flatten() for part in torch.autograd.grad(total, params)])
    return flat, combination.state


def _draw(regime: Regime, seed: int, step: int) -> tuple[Prompts, Tensor, Tensor, Tensor]:
    """The prompts of a rollout, GROUP samples each; their halves [N], group ids [N] and places in the split [N]."""
    g = generator(seed, "tunnel/prompts", step)
    chosen = []
    for source, count in enumerate(regime.groups):
        chosen.append(source * PROMPTS + torch.randperm(PROMPTS, generator=g)[:count])
    index = torch.cat(chosen)
    assert len(regime.groups) == SOURCES
    groups = torch.arange(len(index)).repeat_interleave(GROUP)
    index = index.repeat_interleave(GROUP)
    return prompts("train").rows(index), groups % 2, groups, index
