"""MARBLE's balancing rule without a trainer: Gram matrix in, coefficients out (docs/method.md, section 3, steps 3-11).

    ghat_k   = g_k / ||g_k||                                               (3) normalise
    alpha*   = argmin_{simplex} || sum_k alpha_k ghat_k ||^2               (4) harmonise
    d_final  = (sum_k alpha*_k ghat_k) * mean_k ||g_k||                    (5) rescale
    A_bar    = sum_k alpha_bar_k A_k                                       (7) one backward pass between refreshes
    alpha_bar <- rho alpha_bar + (1 - rho) alpha*                          (10) smooth

Where this differs from the paper, or decides what the paper leaves open:

- alpha_bar starts uniform.
- Each A_k is clamped before they are combined, so that step (7) holds without any condition.
- A reward without a gradient in a batch leaves the QP and keeps its alpha_bar; the others share the remaining mass.
- ||d*|| < 1e-6 is Pareto-stationary: no reward update in that step, and alpha_bar stays as it is, because alpha* is
  not unique there.
- ``normalize=False`` (an ablation, which the paper reports to fail) skips steps 3 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from marble_rl.coefficients.min_norm import MinNorm, as_gram, min_norm

STATIONARY_NORM = 1e-6
"""Below this length, relative to the gradients that took part, the min-norm point counts as zero."""


@dataclass(frozen=True)
class Direction:
    """What one Gram matrix alone says about the update; no history in it."""

    alpha: Tensor
    """[K] float64: solution of the QP, 0 for rewards that took no part."""
    weights: Tensor
    """[K] float64: the reward update is sum_k weights_k g_k."""
    active: Tensor
    """[K] bool: the reward has a gradient in this batch."""
    stationary: bool
    """The rewards cancel exactly: no direction is good for all of them."""
    norm: float
    """Length of the min-norm point, in units of the unit gradients."""
    kkt_residual: float


@dataclass(frozen=True)
class Coefficients:
    """A refresh: this batch's solution and what is kept of it."""

    alpha: Tensor
    """[K] float64, this batch's alpha*."""
    alpha_bar: Tensor
    """[K] float64, smoothed; always on the simplex."""
    weights: Tensor
    """[K] float64, zero where inactive: the refreshed step's reward update is sum_k weights_k g_k."""
    active: Tensor
    """[K] bool"""
    stationary: bool
    norm: float
    kkt_residual: float


def common_direction(gram: Tensor, *, normalize: bool = True) -> Direction:
    """Steps 3-5 for the *raw* Gram matrix [K, K] of the g_k."""
    g = torch.as_tensor(as_gram(gram))
    norms = g.diagonal().sqrt()
    active = norms > 0
    alpha = torch.zeros_like(norms)
    weights = torch.zeros_like(norms)
    if not active.any():
        return Direction(alpha, weights, active, stationary=False, norm=0.0, kkt_residual=0.0)

    n = norms[active]
    # Dividing by the norms one after the other cannot underflow where their product would.
    unit = g[active][:, active] / n[:, None] / n[None, :] if normalize else g[active][:, active] / n.mean() ** 2
    solution: MinNorm = min_norm(unit)
    stationary = solution.norm < STATIONARY_NORM
    alpha[active] = solution.alpha
    if not stationary:
        weights[active] = solution.alpha * (n.mean() / n) if normalize else solution.alpha
    return Direction(alpha, weights, active, stationary, solution.norm, solution.kkt_residual)


class Harmonizer:
    """Balances K rewards in anyone's training loop. Needs only torch and scipy.

    >>> harmonizer = Harmonizer(rewards=["ocr", "aesthetic"])
    >>> if harmonizer.should_refresh(step):                   # every N optimizer steps: one gradient per reward
    ...     gram = g.double() @ g.double().T                  # g [K, P]: gradient of mean_i A_ki * slope_i
    ...     coefficients = harmonizer.refresh(gram)
    ...     update = coefficients.weights.float() @ g
    ... else:                                                 # in between: one backward pass in all
    ...     advantage = harmonizer.combine(advantages)        # [N, K] -> [N]
    """

    def __init__(
        self,
        rewards: Sequence[str],
        refresh_every: int = 10,
        ema_decay: float = 0.7,
        solver: Literal["min_norm"] = "min_norm",
        apply: Literal["alpha"] = "alpha",
        uniform_after: int | None = None,
        adv_clip: float = 5.0,
        normalize: bool = True,
    ) -> None:
        if not rewards or len(set(rewards)) != len(rewards):
            raise ValueError(f"rewards must be a non-empty list of distinct names, got {list(rewards)}")
        if refresh_every < 1:
            raise ValueError(f"refresh_every must be at least 1, got {refresh_every}")
        if not 0.0 <= ema_decay < 1.0:
            raise ValueError(f"ema_decay must be in [0, 1), got {ema_decay}")
        if solver != "min_norm":
            raise ValueError(f"solver must be 'min_norm', got {solver!r}")
        if apply != "alpha":
            raise ValueError(f"apply must be 'alpha', got {apply!r}")
        if uniform_after is not None and uniform_after < 0:
            raise ValueError(f"uniform_after must be at least 0 or None, got {uniform_after}")
        if adv_clip <= 0:
            raise ValueError(f"adv_clip must be positive, got {adv_clip}")
        self.rewards = tuple(rewards)
        self.refresh_every = refresh_every
        self.ema_decay = ema_decay
        self.uniform_after = uniform_after
        self.adv_clip = adv_clip
        self.normalize = normalize
        self._alpha_bar = self._uniform()
        self._in_uniform_stage = False

    def should_refresh(self, step: int) -> bool:
        """Whether the step after ``step`` optimizer updates needs one gradient per reward: 0, N, 2N, ...

        In the late uniform stage (step >= uniform_after) nothing is refreshed. Ask before every step: ``combine``
        relies on the stage noted here.
        """
        self._in_uniform_stage = self.uniform_after is not None and step >= self.uniform_after
        return not self._in_uniform_stage and step % self.refresh_every == 0

    def refresh(self, gram: Tensor, cross: Tensor | None = None) -> Coefficients:
        """Solve the QP for the raw Gram matrix [K, K] of this batch's per-reward gradients and smooth the result.

        ``cross`` [K, K], the unbiased products of two half batches, is for noise-aware solvers; ``min_norm`` does
        not use it.
        """
        del cross
        k = len(self.rewards)
        if tuple(gram.shape) != (k, k):
            raise ValueError(f"gram must be [{k}, {k}] for the rewards {self.rewards}, got {tuple(gram.shape)}")
        d = common_direction(gram, normalize=self.normalize)
        if not d.stationary:
            self._smooth(d)
        return Coefficients(d.alpha, self.alpha_bar, d.weights, d.active, d.stationary, d.norm, d.kkt_residual)

    def combine(self, advantages: Tensor) -> Tensor:
        """One advantage per sample: [N, K] -> [N]. Each is clamped to +-adv_clip first, then combined.

        A sample's loss is affine in its clamped advantage and the coefficients sum to 1, so the gradient of the loss
        under the combined advantage is the same combination of the per-reward gradients (Proposition 1).
        """
        if advantages.ndim != 2 or advantages.shape[1] != len(self.rewards):
            raise ValueError(f"advantages must be [N, {len(self.rewards)}], got {tuple(advantages.shape)}")
        coefficients = self.alpha_bar.to(advantages)
        return advantages.clamp(-self.adv_clip, self.adv_clip) @ coefficients

    @property
    def alpha_bar(self) -> Tensor:
        """[K] float64: the coefficients that ``combine`` uses."""
        return self._uniform() if self._in_uniform_stage else self._alpha_bar.clone()

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": list(self.rewards), "alpha_bar": self._alpha_bar.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if tuple(state["rewards"]) != self.rewards:
            raise ValueError(f"state is of the rewards {state['rewards']}, not {list(self.rewards)}")
        if len(state["alpha_bar"]) != len(self.rewards):
            raise ValueError(f"state has {len(state['alpha_bar'])} coefficients for {len(self.rewards)} rewards")
        self._alpha_bar = torch.tensor(state["alpha_bar"], dtype=torch.float64)

    def _smooth(self, d: Direction) -> None:
        """Step 10. Rewards without signal keep their share; the active ones move within the rest of the mass."""
        if not d.active.any():
            return
        mass = (1.0 - self._alpha_bar[~d.active].sum()).clamp_min(0.0)
        moved = self.ema_decay * self._alpha_bar[d.active] + (1 - self.ema_decay) * mass * d.alpha[d.active]
        if moved.sum() > 0:  # the others may hold all of the mass
            self._alpha_bar[d.active] = moved * (mass / moved.sum())

    def _uniform(self) -> Tensor:
        return torch.full((len(self.rewards),), 1.0 / len(self.rewards), dtype=torch.float64)
