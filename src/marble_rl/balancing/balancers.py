"""Stage 7: what a step optimises, for MARBLE and for every baseline. One trainer, different settings.

A balancer turns per-reward advantages into the one advantage of an ordinary step. MARBLE also asks, every N steps,
for one gradient per reward.

    weighted_sum   R = sum_k w_k R_k, then one advantage                               the usual practice
    fixed          A = sum_k alpha_k A_k                                               constant coefficients
    single         A = A_k                                                             one specialist
    sequential     A = A_k(step)                                                       a hand-made schedule
    dropout        A = mean of A_k over a random subset, drawn anew in each step
    gdpo           A = batch-normalised sum_k w_k A_k
    min_variance   A = sum_k alpha_bar_k A_k, with alpha_bar from the QP on <A_k A_l>
    marble         A = sum_k alpha_bar_k A_k, with alpha_bar from the QP               docs/method.md, section 3
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marble_rl.advantages import EPSILON, Scored, second_moments
from marble_rl.balancing.harmonizer import Harmonizer
from marble_rl.balancing.settings import (
    DropoutBalance,
    FixedBalance,
    GdpoBalance,
    MarbleBalance,
    MinVarianceBalance,
    SequentialBalance,
    SingleBalance,
    WeightedSumBalance,
)
from marble_rl.config.run import RunConfig
from marble_rl.seeding import generator


class Balancer(ABC):
    """Chooses what a step optimises."""

    harmonizer: Harmonizer | None = None
    """Set by balancers that need one gradient per reward at times."""

    @abstractmethod
    def advantage(self, step: int, scored: Scored) -> Tensor:
        """The one advantage [N] of an ordinary step, within +-A_max."""

    def coefficients(self, step: int) -> Tensor | None:
        """[K] coefficients on the per-reward advantages, where the balancer has such; for the log."""
        return None

    def wants_reward_gradients(self, step: int) -> bool:
        """Whether this step needs one gradient per reward."""
        return self.harmonizer is not None and self.harmonizer.should_refresh(step)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.harmonizer is None else self.harmonizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.harmonizer is not None:
            self.harmonizer.load_state_dict(state)


class Marble(Balancer):
    def __init__(self, harmonizer: Harmonizer) -> None:
        self.harmonizer: Harmonizer = harmonizer

    def advantage(self, step: int, scored: Scored) -> Tensor:
        return self.harmonizer.combine(scored.advantages)

    def coefficients(self, step: int) -> Tensor:
        return self.harmonizer.alpha_bar


class MinVariance(Balancer):
    """What MARBLE does where gradients are noise (docs/diagnose.md), without a gradient."""

    def __init__(self, names: Sequence[str], ema_decay: float, adv_clip: float) -> None:
        # Not `harmonizer`: that one asks the trainer for gradients.
        self._rule = Harmonizer(names, refresh_every=1, ema_decay=ema_decay, adv_clip=adv_clip)

    def advantage(self, step: int, scored: Scored) -> Tensor:
        self._rule.refresh(second_moments(scored.advantages))
        return self._rule.combine(scored.advantages)

    def coefficients(self, step: int) -> Tensor:
        return self._rule.alpha_bar

    def state_dict(self) -> dict[str, Any]:
        return self._rule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rule.load_state_dict(state)


class WeightedSum(Balancer):
    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def advantage(self, step: int, scored: Scored) -> Tensor:
        return scored.weighted_sum(self._weights)


class Gdpo(Balancer):
    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def advantage(self, step: int, scored: Scored) -> Tensor:
        total = scored.advantages @ self._weights.to(scored.advantages)
        rated = total[scored.rated]
        normalised = (total - rated.mean()) / (rated.std(unbiased=False) + EPSILON)
        return torch.where(scored.rated, normalised.clamp(-scored.adv_clip, scored.adv_clip), 0.0)


class Scheduled(Balancer):
    """Coefficients that depend on the step alone: fixed, single, sequential and dropout."""

    @abstractmethod
    def coefficients(self, step: int) -> Tensor: ...

    def advantage(self, step: int, scored: Scored) -> Tensor:
        return scored.advantages @ self.coefficients(step).to(scored.advantages)


class Fixed(Scheduled):
    def __init__(self, coefficients: Tensor) -> None:
        self._coefficients = coefficients

    def coefficients(self, step: int) -> Tensor:
        return self._coefficients


class Sequential(Scheduled):
    def __init__(self, stages: Sequence[tuple[int, Tensor]]) -> None:
        self._stages = stages

    def coefficients(self, step: int) -> Tensor:
        for steps, coefficients in self._stages[:-1]:
            if step < steps:
                return coefficients
            step -= steps
        return self._stages[-1][1]


class Dropout(Scheduled):
    def __init__(self, rewards: int, rate: float, seed: int) -> None:
        self._rewards, self._rate, self._seed = rewards, rate, seed

    def coefficients(self, step: int) -> Tensor:
        draw = torch.rand(self._rewards, generator=generator(self._seed, "dropout", step), dtype=torch.float64)
        kept = (draw >= self._rate) | (draw == draw.max())
        return kept.to(torch.float64) / kept.sum()


def build_balancer(config: RunConfig) -> Balancer:
    """The balancer that the `balance` section asks for."""
    names = config.trained_rewards
    balance = config.balance
    if isinstance(balance, MarbleBalance):
        settings = balance.model_dump(exclude={"type", "probe_weights", "gradients", "metric"})
        return Marble(Harmonizer(names, adv_clip=config.loss.adv_clip, **settings))
    if isinstance(balance, WeightedSumBalance):
        return WeightedSum(weight_vector(names, balance.weights))
    if isinstance(balance, GdpoBalance):
        return Gdpo(weight_vector(names, balance.weights))
    if isinstance(balance, SingleBalance):
        return Fixed(weight_vector(names, {balance.reward: 1.0}, missing=0.0))
    if isinstance(balance, SequentialBalance):
        return Sequential([(s.steps, weight_vector(names, {s.reward: 1.0}, missing=0.0)) for s in balance.stages])
    if isinstance(balance, MinVarianceBalance):
        return MinVariance(names, balance.ema_decay, config.loss.adv_clip)
    if isinstance(balance, DropoutBalance):
        return Dropout(len(names), balance.rate, config.trainer.seed)
    assert isinstance(balance, FixedBalance)
    if balance.coefficients is None:
        return Fixed(weight_vector(names, {}) / len(names))
    return Fixed(weight_vector(names, balance.coefficients, missing=0.0))


def weight_vector(names: Sequence[str], weights: dict[str, float], missing: float = 1.0) -> Tensor:
    """[K] float64 from a mapping by reward name."""
    return torch.tensor([weights.get(name, missing) for name in names], dtype=torch.float64)
