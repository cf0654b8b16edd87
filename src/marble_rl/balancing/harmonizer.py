"""MARBLE's balancing rule without a trainer: Gram matrix in, coefficients out (docs/method.md, section 3, steps 3-11).

    d_final    = (sum_k alpha*_k ghat_k) * mean_k ||g_k||                  (3)-(5) direction.py
    A_bar      = sum_k alpha_bar_k A_k                                     (7) one backward pass between refreshes
    alpha_bar <- rho alpha_bar + (1 - rho) alpha*                          (10) smooth

An option of ours, off by default: ``apply="alpha_over_norm"``. Between refreshes the paper combines
*unnormalised* gradients by alpha_bar, so a reward with a small gradient gets less than its share. This setting divides
by n_k, the smoothed norm of g_k over refreshes: w_k = alpha_bar_k mean(n) / n_k.

Where we differ from the paper, or choose what it leaves open:

- alpha_bar starts uniform.
- Each A_k is clamped before they are combined, so that equation (7) is exact.
- A reward without a gradient in a batch leaves the QP and keeps its alpha_bar; the coefficients of the others sum to
  what remains of 1.
- In a Pareto-stationary batch alpha_bar stays as it is, because alpha* is not unique there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from marble_rl.balancing.direction import Direction, common_direction
from marble_rl.balancing.own_loop import OwnLoop
from marble_rl.gradients.accumulate import RewardGradients

MAX_BOOST = 10.0
"""Upper limit of the factor mean(n) / n_k, in case a smoothed norm is small by chance"""


@dataclass(frozen=True)
class Coefficients(Direction):
    """Result of a refresh: this batch's solution and the new smoothed state."""

    alpha_bar: Tensor
    """[K] float64, smoothed; always on the simplex."""
    norms: Tensor
    """[K] float64, smoothed lengths of the gradients; NaN for rewards that have not had a gradient yet."""


class Harmonizer(OwnLoop):
    """Balances K rewards in any training loop. Needs only torch and scipy.

    >>> harmonizer = Harmonizer(rewards=["ocr", "aesthetic"])
    >>> harmonizer.backward([loss_ocr, loss_aesthetic], params)  # in place of loss.backward()

    ``Harmonizer(rewards, rule="fair")`` is a `FairHarmonizer`. The parts of `backward`, for other loops:

    >>> if harmonizer.should_refresh(step):                   # every N optimizer steps: one gradient per reward
    ...     gram = g.double() @ g.double().T                  # g [K, P]: gradient of mean_i A_ki * slope_i
    ...     coefficients = harmonizer.refresh(gram)
    ...     update = coefficients.weights.float() @ g
    ... else:                                                 # in between: one backward pass in all
    ...     advantage = harmonizer.combine(advantages)        # [N, K] -> [N]
    """

    def __new__(cls, *args: Any, rule: str = "marble", **settings: Any) -> Any:
        if rule == "fair" and cls is Harmonizer:
            from marble_rl.balancing.fair_harmonizer import FairHarmonizer

            return FairHarmonizer(*args, **settings)
        return super().__new__(cls)

    def __init__(
        self,
        rewards: Sequence[str],
        refresh_every: int = 10,
        ema_decay: float = 0.7,
        apply: Literal["alpha", "alpha_over_norm"] = "alpha",
        uniform_after: int | None = None,
        adv_clip: float = 5.0,
        *,
        rule: Literal["marble"] = "marble",
    ) -> None:
        if rule != "marble":
            raise ValueError(f"rule must be 'marble' or 'fair', got {rule!r}")
        if not rewards or len(set(rewards)) != len(rewards):
            raise ValueError(f"rewards must be a non-empty list of distinct names, got {list(rewards)}")
        if refresh_every < 1:
            raise ValueError(f"refresh_every must be at least 1, got {refresh_every}")
        if not 0.0 <= ema_decay < 1.0:
            raise ValueError(f"ema_decay must be in [0, 1), got {ema_decay}")
        if uniform_after is not None and uniform_after < 0:
            raise ValueError(f"uniform_after must be at least 0 or None, got {uniform_after}")
        if adv_clip <= 0:
            raise ValueError(f"adv_clip must be positive, got {adv_clip}")
        if apply not in ("alpha", "alpha_over_norm"):
            raise ValueError(f"apply must be one of 'alpha', 'alpha_over_norm', got {apply!r}")
        self.rewards = tuple(rewards)
        self.refresh_every = refresh_every
        self.ema_decay = ema_decay
        self.apply = apply
        self.uniform_after = uniform_after
        self.adv_clip = adv_clip
        self._alpha_bar = self._uniform()
        self._norms = torch.full((len(self.rewards),), float("nan"), dtype=torch.float64)

    @property
    def alpha_bar(self) -> Tensor:
        """[K] float64: the smoothed solution, on the simplex."""
        return self._alpha_bar.clone()

    def should_refresh(self, step: int) -> bool:
        """Whether the next step needs one gradient per reward: at step 0, N, 2N, ... (``step``: optimizer updates
        done).

        Never in the late uniform stage (step >= uniform_after).
        """
        return not self.in_uniform_stage(step) and step % self.refresh_every == 0

    def in_uniform_stage(self, step: int) -> bool:
        return self.uniform_after is not None and step >= self.uniform_after

    def refresh(self, gram: Tensor, cross: Tensor | None = None) -> Coefficients:
        """Solve the QP for the raw Gram matrix [K, K] of this batch's per-reward gradients and smooth the result.

        ``cross`` is not used.
        """
        solution = self.solve(gram)
        self.commit(solution)
        return solution

    def solve(self, gram: Tensor) -> Coefficients:
        """What `refresh` would return, without storing it."""
        k = len(self.rewards)
        if tuple(gram.shape) != (k, k):
            raise ValueError(f"gram must be [{k}, {k}] for the rewards {self.rewards}, got {tuple(gram.shape)}")
        d = self.direction(gram)
        return Coefficients(**vars(d), alpha_bar=self._smoothed(d), norms=self._smoothed_norms(gram, d.active))

    def commit(self, solution: Coefficients) -> None:
        """Store a solution of `solve`: its alpha_bar and norms."""
        self._alpha_bar, self._norms = solution.alpha_bar.clone(), solution.norms.clone()

    def direction(self, gram: Tensor) -> Direction:
        """The direction for a raw Gram matrix [K, K]. It does not depend on earlier batches."""
        return common_direction(gram)

    def combine(self, advantages: Tensor, step: int | None = None) -> Tensor:
        """One advantage per sample: [N, K] -> [N]. Each is clamped to +-adv_clip first, then combined.

        A sample's loss is affine in its clamped advantage and the coefficients sum to 1, so the gradient of the loss
        under the combined advantage is the same combination of the per-reward gradients (Proposition 1).

        ``step`` (optimizer updates done) is needed only with ``uniform_after``. With ``apply="alpha_over_norm"`` the
        coefficients need not sum to 1, and the result may leave +-adv_clip: use it as base + A * slope, where base
        keeps its coefficient 1, and do not clamp it again.
        """
        if advantages.ndim != 2 or advantages.shape[1] != len(self.rewards):
            raise ValueError(f"advantages must be [N, {len(self.rewards)}], got {tuple(advantages.shape)}")
        return advantages.clamp(-self.adv_clip, self.adv_clip) @ self.applied(step).to(advantages)

    def applied(self, step: int | None = None) -> Tensor:
        """[K] float64: the coefficients that `combine` uses."""
        if step is None and self.uniform_after is not None:
            raise ValueError("uniform_after is set, so combine needs the step: combine(advantages, step)")
        if step is not None and self.in_uniform_stage(step):
            return self._uniform()
        if self.apply == "alpha":
            return self.alpha_bar
        return self._alpha_bar * norm_boost(self._norms)

    def smoothed(self, step: int) -> Tensor:
        """[K] float64: alpha_bar, or equal coefficients in the late uniform stage."""
        return self._uniform() if self.in_uniform_stage(step) else self.alpha_bar

    def state_dict(self) -> dict[str, Any]:
        state = {
            "rewards": list(self.rewards),
            "alpha_bar": self._alpha_bar.tolist(),
            "norms": norms_state(self._norms),
        }
        return {**state, "updates": self.updates} if self.updates else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if tuple(state["rewards"]) != self.rewards:
            raise ValueError(f"state is of the rewards {state['rewards']}, not {list(self.rewards)}")
        if len(state["alpha_bar"]) != len(self.rewards):
            raise ValueError(f"state has {len(state['alpha_bar'])} coefficients for {len(self.rewards)} rewards")
        self._alpha_bar = torch.tensor(state["alpha_bar"], dtype=torch.float64)
        if "norms" in state:
            self._norms = norms_from(state["norms"])
        self.updates = state.get("updates", 0)

    def _coefficients(self) -> Tensor | None:
        return None if self.should_refresh(self.updates) else self.applied(self.updates)

    def _weigh(self, gradients: RewardGradients) -> Tensor:
        return self.refresh(gradients.gram).weights

    def _smoothed(self, d: Direction) -> Tensor:
        """Step 10: the new alpha_bar. Rewards without a gradient keep theirs; the others sum to what remains of 1."""
        alpha_bar = self._alpha_bar.clone()
        if d.stationary or not d.active.any():
            return alpha_bar
        mass = (1.0 - alpha_bar[~d.active].sum()).clamp_min(0.0)
        moved = self.ema_decay * alpha_bar[d.active] + (1 - self.ema_decay) * mass * d.alpha[d.active]
        if moved.sum() > 0:  # else the rewards without a gradient already sum to 1
            alpha_bar[d.active] = moved * (mass / moved.sum())
        return alpha_bar

    def _smoothed_norms(self, gram: Tensor, active: Tensor) -> Tensor:
        return smoothed_norms(self._norms, gram, active, self.ema_decay)

    def _uniform(self) -> Tensor:
        return torch.full((len(self.rewards),), 1.0 / len(self.rewards), dtype=torch.float64)


def smoothed_norms(known: Tensor, gram: Tensor, active: Tensor, decay: float) -> Tensor:
    """[K]: running means of the gradients' norms. A reward's first norm starts its mean."""
    norms = gram.detach().diagonal().cpu().to(torch.float64).sqrt()
    before = torch.where(known.isnan(), norms, known)
    return torch.where(active, decay * before + (1 - decay) * norms, known)


def norm_boost(norms: Tensor) -> Tensor:
    """[K]: mean(n) / n_k, at most `MAX_BOOST`; 1 for rewards whose norm is not known (NaN)."""
    known = ~norms.isnan()
    boost = torch.ones_like(norms)
    boost[known] = (norms[known].mean() / norms[known]).clamp_max(MAX_BOOST)
    return boost


def norms_state(norms: Tensor) -> list[float | None]:
    """The norms as JSON values: None for NaN."""
    return [None if n != n else n for n in norms.tolist()]


def norms_from(state: Sequence[float | None]) -> Tensor:
    return torch.tensor([float("nan") if n is None else n for n in state], dtype=torch.float64)
