"""One training in the tunnel: the stages of marble_rl/training/trainer.py on the small flow."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from marble_rl.balancing.base import Balancer, Guarding
from marble_rl.balancing.registry import RULES
from marble_rl.config.run import OptimizerConfig
from marble_rl.errors import InputError, require_name
from marble_rl.gradients.accumulate import reward_gradients
from marble_rl.losses.base import Noised
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.rewards.core.settings import GuardConfig
from marble_rl.rollout.settings import OLD_POLICY_PRESETS, OldPolicyConfig
from marble_rl.seeding import generator
from marble_rl.training.base_images import Reading
from marble_rl.training.batch import regularized
from marble_rl.training.floors import Floors
from marble_rl.training.update import Updater
from marble_rl.types import RewardTable
from tools.tunnel.rollouts import GROUP, SAMPLING_STEPS, SIGMAS, Rollout, roll_out, sample
from tools.tunnel.rules import StepsAlongMomenta
from tools.tunnel.world import REGIMES, SIZE, Flow, Regime, prompts, scored, train_base

STEPS = 200
TIMESTEPS = 2
EVALUATION_IMAGES = 8
BASE_IMAGES = 32
"""Of each training prompt, for the base scores of guards: nearly exact"""
GUARD = "guard."
"""Prefix of a guard's floor among the settings of a rule: `fair:guard.plain=-0.1`"""
LOSS = "loss."
"""Prefix of a setting of the loss: `fair:loss.noise=group`"""
OLD_POLICY = "old_policy"
"""Setting that takes a preset: `fair:old_policy=slow`"""
EPOCHS, SCOUTS = "rollout.epochs", "rollout.scouts"
"""Settings of the rollouts: `fair:rollout.epochs=2`"""
OPTIMIZER = OptimizerConfig(lr=4e-4)


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
    """The flow's weights as one flat tensor, with the EMA that is evaluated and the old policy that samples: what
    `Updater` needs of a policy."""

    def __init__(self, model: Flow) -> None:
        self.parameters = list(model.parameters())
        self.names = [name for name, _ in model.named_parameters()]
        self.flat = _flattened(model)
        self.old_model = copy.deepcopy(model)
        self.averages = {"ema": self.flat.clone(), "old": _flattened(self.old_model)}

    @property
    def on_policy(self) -> bool:
        return torch.equal(self.flat, self.averages["old"])

    @torch.no_grad()
    def blend(self, target: str, source: str, decay: float) -> None:
        self.averages[target].mul_(decay).add_(self.flat, alpha=1 - decay)


def _flattened(model: Flow) -> Tensor:
    """One tensor [P] that the parameters become views of."""
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    return flat


@dataclass(frozen=True)
class Settings:
    """What a rule's name and settings ask for."""

    balance: dict[str, Any]
    floors: dict[str, GuardConfig]
    """By guard"""
    loss: Nft
    old_policy: OldPolicyConfig
    epochs: int = 1
    """How often a rollout is trained on"""
    scouts: int = 1
    """Candidates for each sample of a rollout"""

    @classmethod
    def of(cls, section: dict[str, Any]) -> Settings:
        def under(prefix: str) -> dict[str, Any]:
            return {key.removeprefix(prefix): value for key, value in section.items() if key.startswith(prefix)}

        other = (GUARD, LOSS, OLD_POLICY, EPOCHS, SCOUTS)
        require_name(section.get(OLD_POLICY, "on_policy"), list(OLD_POLICY_PRESETS), OLD_POLICY)
        return cls(
            {key: value for key, value in section.items() if not key.startswith(other)},
            {name: GuardConfig(floor=floor) for name, floor in under(GUARD).items()},
            Nft(NftSettings(**{**under(LOSS), "kl_weight": 0.0})),
            OLD_POLICY_PRESETS[section.get(OLD_POLICY, "on_policy")],
            _count(section, EPOCHS),
            _count(section, SCOUTS),
        )


def _count(section: dict[str, Any], key: str) -> int:
    value = section.get(key, 1)
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{key}: {value!r} is not a whole number above 0")
    return value


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
    _train(model, Settings.of({"type": "fixed"}), regime, seed=10_000, steps=regime.trained, floors=Floors({}))
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


def rule_named(balance: dict[str, Any], regime: Regime, seed: int = 0, guards: Sequence[str] = ()) -> Balancer:
    settings = RULES.settings_for(balance).model_validate(balance)
    names = [reward.name for reward in regime.rewards]
    return RULES.part_of(settings)(settings, names, adv_clip=5.0, seed=seed, guards=list(guards))


def run(section: dict[str, Any], regime_name: str, seed: int, steps: int = STEPS) -> Outcome:
    """Train with a rule and its settings in a regime."""
    torch.set_num_threads(1)
    regime = REGIMES[regime_name]
    model = copy.deepcopy(start(regime_name))
    settings = Settings.of(section)
    floors = Floors(settings.floors)
    length = _train(model, settings, regime, seed, steps, floors)
    after, first = evaluated(model, regime), before(regime_name)
    levels = {name: level.value or 0.0 for name, level in floors.levels.by_guard.items()}
    return Outcome({name: after[name] - first[name] for name in first}, length, levels)


def _train(model: Flow, settings: Settings, regime: Regime, seed: int, steps: int, floors: Floors) -> float:
    """Leaves the EMA weights in ``model`` and the levels of guards in ``floors``; mean length of a step."""
    rule = rule_named(settings.balance, regime, seed, list(settings.floors))
    policy = Policy(model)
    updater = Updater(policy, OPTIMIZER, settings.old_policy, steps)  # type: ignore[arg-type]
    lengths = 0.0
    for step in range(steps):
        number, epoch = divmod(step, settings.epochs)
        if epoch == 0:
            rollout = roll_out(policy.old_model, regime, seed, number, settings.scouts)
            table, index = rollout.seen.table, rollout.index
            readings = {name: reading(table, index, base_table(regime.name), name) for name in floors.guards}
        levels = floors.after({name: read for name, read in readings.items() if read is not None})
        noised = _noised(rollout.x0, settings.loss.settings, seed, step)
        gradient, state = _gradient(model, policy, settings.loss, rule, rollout, noised, step, levels.rates)
        if epoch + 1 == settings.epochs:
            floors.commit(levels, {})
        old = policy.flat.clone()
        rule.commit(state)
        if isinstance(rule, StepsAlongMomenta):
            _replace_first_moment(updater, gradient, rule.first_moment())
        updater.apply(gradient, 0.0, step)
        if epoch + 1 == settings.epochs:
            updater.update_old_policy(step + 1)
        lengths += float((policy.flat - old).norm())
    policy.flat.copy_(policy.averages["ema"])
    return lengths / steps


def _replace_first_moment(updater: Updater, gradient: Tensor, moment: Tensor) -> None:
    """AdamW's first moment becomes ``moment`` [P] in the step with this gradient (not clipped here)."""
    for state in updater.optimizer.state.values():
        b = updater.optimizer.param_groups[0]["betas"][0]
        state["exp_avg"].copy_((moment - (1 - b) * gradient) / b)


@dataclass(frozen=True)
class _Noised:
    """R = N * TIMESTEPS rows"""

    rows: Tensor
    """[R]: the sample of each"""
    sample: Noised
    shared: Tensor
    """[R]: of the shared part; 0 where it is left out (`loss.regularize_every`)"""


def _noised(x0: Tensor, settings: NftSettings, seed: int, step: int) -> _Noised:
    g = generator(seed, "tunnel/noise", step)
    rows = torch.arange(len(x0)).repeat_interleave(TIMESTEPS)
    if settings.noise == "group":
        drawn = [torch.randperm(SAMPLING_STEPS, generator=g)[:TIMESTEPS] for _ in range(len(x0) // GROUP)]
        levels = torch.stack(drawn).repeat_interleave(GROUP, dim=0).flatten()
        of_groups = torch.randn(len(drawn), 1, SIZE, generator=g) * torch.tensor([[1.0], [-1.0]])
        noise = of_groups.repeat_interleave(GROUP, dim=0).flatten(0, 1)
    else:
        # The trainer draws without replacement; two levels of a sample may be the same here.
        levels = torch.randint(SAMPLING_STEPS, (len(rows),), generator=g)
        noise = torch.randn(len(rows), SIZE, generator=g)
    t, x, every = SIGMAS[levels], x0[rows], settings.regularize_every
    shared = every * regularized(torch.arange(len(x0)) % GROUP, TIMESTEPS, every, seed, step).flatten()
    return _Noised(rows, Noised(x, noise, (1 - t)[:, None] * x + t[:, None] * noise, t), shared)


def _gradient(
    model: Flow,
    policy: Policy,
    loss: Nft,
    rule: Balancer,
    rollout: Rollout,
    noised: _Noised,
    step: int,
    rates: dict[str, float],
) -> tuple[Tensor, Any]:
    """The update's gradient [P], and the rule's new state."""
    rows, sample, seen = noised.rows, noised.sample, rollout.seen
    condition = rollout.batch.condition[rows]
    v_old = None
    if loss.needs_old(policy.on_policy):
        with torch.no_grad():
            v_old = policy.old_model(sample.x_t, sample.t, condition)
    terms = loss.terms(model(sample.x_t, sample.t, condition), v_old, sample)
    params = policy.parameters
    if rule.needs_gradients(step):
        base = None if v_old is None else noised.shared * terms.base
        gradients = reward_gradients(
            terms.slope, base, seen.advantages[rows].float(), params, halves=rollout.halves[rows]
        )
        weighing = rule.weigh(step, gradients, rates) if isinstance(rule, Guarding) else rule.weigh(step, gradients)
        return weighing.weights.to(gradients.g) @ gradients.g + gradients.shared, weighing.state
    combination = rule.combine(step, seen)
    total = terms.base.mean() + (combination.advantage[rows].to(terms.slope) * terms.slope).mean()
    flat = torch.cat([part.flatten() for part in torch.autograd.grad(total, params)])
    return flat, combination.state
