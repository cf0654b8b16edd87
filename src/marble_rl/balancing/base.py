"""Stage 7: what a balancing rule is. A new rule is one class in one file (docs/adding_a_rule.md).

A rule decides what an update optimises. In an ordinary step it combines the K advantages of each sample into one
(`combine`), which costs one backward pass. In a refresh, a step for which `needs_gradients` is true, it gets one
gradient per reward and returns a weight for each (`weigh`).

Neither call changes the rule. Each returns the new state, and `commit` stores it once the update was applied, so a
failed step changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from marble_rl.advantages import Scored
from marble_rl.errors import InputError, require_name
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.section import Section, SectionClass, Weights
from marble_rl.types import Metrics


class BalanceSettings(Section):
    """How the rewards are combined."""

    type: str

    @classmethod
    def describing(cls, tree: Any) -> SectionClass:
        from marble_rl.balancing.registry import RULES

        return RULES.settings_for(tree) if cls is BalanceSettings else cls


class GradientSettings(BalanceSettings):
    """Settings of all rules that use one gradient per reward."""

    gradients: Literal["fused", "passes"] = "fused"
    """`fused`: the gradients of all rewards from one backward pass. `passes`: one backward pass per reward, slower,
    for comparison."""
    probe_weights: Weights = {}
    """Weights of the weighted-sum direction that is logged next to the rule's own (`ws_...` metrics); 1 if not given.
    They do not influence training."""


@dataclass(frozen=True)
class Combination:
    """The result of `combine`: one advantage per sample, for an ordinary step."""

    advantage: Tensor
    """[N]: may exceed +-A_max; it is not clamped again"""
    coefficients: Tensor | None = None
    """[K]: coefficients of the per-reward advantages, for the log; None if the rule has none"""
    state: Any = None
    """New state of the rule, passed to `commit`"""


@dataclass(frozen=True)
class Elsewhere:
    """What a rule remembers of earlier batches, measured on this one. Their noise is independent, so this replaces the
    comparison of two halves of a batch."""

    unbiased: Tensor
    """[K] float64: product of the mean gradient so far and this batch's, an estimate of the squared norm of the
    expected gradient; NaN for rewards that one of them has no gradient of"""
    directions: Tensor
    """[2, K] float64: products of the direction made from earlier batches with this batch's gradients; first the
    rule's, then the weighted sum's"""
    squared_norms: Tensor
    """[2] float64: of these directions"""


@dataclass(frozen=True)
class Weighing:
    """The result of `weigh`: a rule's weights for the per-reward gradients of a refresh."""

    weights: Tensor
    """[K] float64 on the CPU: the reward update is sum_k weights_k g_k"""
    coefficients: Tensor | None = None
    """[K]: coefficients for the per-reward advantages in the ordinary steps after this one; for the log"""
    figures: Metrics = field(default_factory=dict)
    """Further metrics for the log, such as `qp/norm`"""
    state: Any = None
    """New state of the rule, passed to `commit`"""
    for_half: Callable[[Tensor], Tensor] | None = None
    """[K, K] -> [K]: the weights that the rule would take for the Gram matrix of half the batch, for the cosines with
    the other half; by default `Balancer.weights_for`"""
    elsewhere: Elsewhere | None = None
    """Of rules without `keeps_halves`; None in their first step"""


class Balancer(ABC):
    """A balancing rule."""

    Settings: ClassVar[type[BalanceSettings]]
    """Its section of the config; derived from `GradientSettings` if it ever needs gradients"""
    label: ClassVar[str]
    """Display name"""
    about: ClassVar[str]
    """Completes the sentence "trained on K rewards ...", such as "at once, as a weighted sum\""""
    solves: ClassVar[bool] = False
    """Whether the rule solves the QP, so that `qp/kkt_residual` should be near 0"""
    keeps_halves: ClassVar[bool] = True
    """Whether two halves of a batch are measured against each other, which tells signal from noise. A rule that
    remembers gradients can do without: it returns `Weighing.elsewhere` in place of it"""
    uses_priorities: ClassVar[bool] = False
    """Whether `rewards[].priority` means something to the rule; if not, a priority is refused"""

    def __init__(
        self,
        settings: Any,
        rewards: Sequence[str],
        *,
        adv_clip: float,
        seed: int,
        priorities: Mapping[str, float] | None = None,
        rewards_off: Callable[[int], Sequence[str]] = lambda step: (),
        guards: Sequence[str] = (),
    ) -> None:
        """``rewards_off``: rewards whose `schedule` leaves out the step after so many updates. ``guards``: those of
        ``rewards`` that are guards; only rules derived from `Guarding` get any."""
        self.settings = settings
        self.rewards = tuple(rewards)
        self.guards = tuple(guards)
        self.priorities = dict(priorities or {})
        self.rewards_off = rewards_off

    @classmethod  # noqa: B027  a rule may have nothing to check
    def check(cls, settings: Any, rewards: Sequence[str]) -> None:
        """Raise InputError where the settings do not fit the trained rewards. Called before a model is loaded."""

    @classmethod
    def check_complete(cls) -> None:
        """Raise InputError if a rule with `GradientSettings` does not implement both `weigh` and `weights_for`."""
        for name in ("weigh", "weights_for"):
            if cls.uses_gradients() and getattr(cls, name) is getattr(Balancer, name):
                raise InputError(
                    f"balance.type: {cls.__name__} needs gradients but does not implement `{name}`; "
                    "see docs/adding_a_rule.md"
                )

    @classmethod
    def uses_gradients(cls) -> bool:
        """Whether some steps need one gradient per reward."""
        return issubclass(cls.Settings, GradientSettings)

    @classmethod
    def bytes_per_parameter(cls, rewards: Sequence[str], guards: Sequence[str]) -> int:
        """Bytes that the rule keeps between steps for each trained parameter."""
        return 0

    @classmethod
    def sum_weights(cls, settings: Any) -> Mapping[str, float]:
        """Weights, by reward name, of the weighted-sum probe that the rule is compared with; 1 where not given."""
        return settings.probe_weights if cls.uses_gradients() else {}

    @classmethod
    def never_opposes(cls, settings: Any) -> bool:
        """Whether a refresh guarantees a direction that has no negative product with any reward's gradient in its
        batch."""
        return False

    @property
    def gradient_method(self) -> Literal["fused", "passes"]:
        """How the gradients that `weigh` gets are computed."""
        method: Literal["fused", "passes"] = self.settings.gradients
        return method

    def needs_gradients(self, step: int) -> bool:
        """Whether the next step is a refresh: one gradient per reward. ``step``: optimizer updates done."""
        return False

    @abstractmethod
    def combine(self, step: int, scored: Scored) -> Combination:
        """One advantage for each sample of the rollout. ``step``: optimizer updates done."""

    def weigh(self, step: int, gradients: RewardGradients) -> Weighing:
        """Weights for the gradients of the K rewards (``gradients`` holds no probe). ``step``: optimizer updates
        done."""
        raise AssertionError("check_complete refuses a rule that needs gradients and does not weigh them")

    def weights_for(self, gram: Tensor) -> Tensor:
        """[K] weights for gradients with this Gram matrix [K, K], from the matrix alone: the rule's state is not
        used."""
        raise AssertionError("check_complete refuses a rule that needs gradients and has no weights for them")

    def coefficients(self, step: int) -> Tensor | None:
        """[K]: coefficients of the per-reward advantages in the next step; None if the rule has none. ``step``:
        optimizer updates done."""
        return None

    def commit(self, state: Any) -> None:  # noqa: B027  a rule may remember nothing
        """The update was applied: store the state that `combine` or `weigh` returned."""

    def tensors(self) -> dict[str, Tensor]:
        """Large state, such as momenta, for checkpoints."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027  most rules have none
        """Continue from a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Small JSON values, for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  a rule may have no state
        """Restore the state from a checkpoint."""


class Scheduled(Balancer):
    """A rule whose coefficients depend on the step alone."""

    @abstractmethod
    def coefficients(self, step: int) -> Tensor: ...

    def combine(self, step: int, scored: Scored) -> Combination:
        """A = sum_k alpha_k A_k"""
        alpha = self.coefficients(step)
        return Combination(scored.advantages @ alpha.to(scored.advantages), alpha)


class Guarding(Balancer):
    """A rule that supports guards (guards.py). With guards it needs one gradient per reward in every step."""

    @classmethod
    def check_guards(cls, settings: Any, guards: Sequence[str]) -> None:
        """Raise InputError where the settings do not fit the guards. Called before a model is loaded."""

    @abstractmethod
    def weigh(self, step: int, gradients: RewardGradients, rates: Mapping[str, float] | None = None) -> Weighing:
        """``rates``: by guard, how it may change, from -1 (free to fall) to 1/2 (must recover); guards without a rate
        are free."""


def weight_vector(names: Sequence[str], weights: Mapping[str, float], missing: float = 1.0) -> Tensor:
    """[K] float64 from a mapping by reward name."""
    return torch.tensor([weights.get(name, missing) for name in names], dtype=torch.float64)


def one_hot(names: Sequence[str], name: str) -> Tensor:
    """[K] float64: all weight on one reward."""
    return weight_vector(names, {name: 1.0}, missing=0.0)


def check_weights(weights: Mapping[str, float], names: Sequence[str], key: str) -> None:
    """Raise InputError unless every name is a trained reward."""
    for name in weights:
        require_name(name, names, key)


def check_some_weight(weights: Mapping[str, float], names: Sequence[str], key: str) -> None:
    """Like `check_weights`, and at least one weight must be above 0."""
    check_weights(weights, names, key)
    if all(weights.get(name, 1.0) == 0 for name in names):
        raise InputError(f"{key}: every weight is 0, so there is nothing to train; set one above 0")
