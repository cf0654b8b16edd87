"""MARBLE's balancing rule without a trainer: Gram matrix in, coefficients out (docs/method.md, section 3, steps 3-11).

    ghat_k   = g_k / ||g_k||                                               (3) normalise
    alpha*   = argmin_{simplex} || sum_k alpha_k ghat_k ||^2               (4) harmonise
    d_final  = (sum_k alpha*_k ghat_k) * mean_k ||g_k||                    (5) rescale
    A_bar    = sum_k alpha_bar_k A_k                                       (7) one backward pass between refreshes
    alpha_bar <- rho alpha_bar + (1 - rho) alpha*                          (10) smooth

Ours, by choice (the defaults are the paper's):

- ``smooth="gram"`` averages the products of the unit gradients instead of alpha*, and solves for the average.
- ``apply="alpha_over_norm"``: between refreshes the paper combines *unnormalised* gradients by alpha_bar, so a reward
  with a small gradient gets less than its share. This divides by cached norms: w_k = alpha_bar_k mean(n) / n_k.
- ``solver="noise_aware"``: noise_aware.py. ``solver="equal"``: unit gradients with equal coefficients, no QP; an
  ablation that shows what the QP adds to unit length.

Where this differs from the paper, or decides what the paper leaves open:

- alpha_bar starts uniform.
- Each A_k is clamped before they are combined, so that step (7) holds without any condition.
- A reward without a gradient in a batch leaves the QP and keeps its alpha_bar; the others share the remaining mass.
- ||d*|| < 1e-6 is Pareto-stationary: no reward update in that step, and alpha_bar stays as it is, because alpha* is
  not unique there.
- Averaged products can be such as no gradients have (memory.py). Those nearest to them are solved for, and do not count
  as Pareto-stationary.
- ``normalize=False`` (an ablation, which the paper reports to fail) skips steps 3 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from marble_rl.balancing.averaging import GramMemory, nearest_gram
from marble_rl.balancing.min_norm import MinNorm, as_gram, equal_shares, min_norm
from marble_rl.balancing.noise_aware import noise_aware

Solver = Literal["min_norm", "noise_aware", "equal"]
MAX_BOOST = 10.0
"""A gradient that was small in the batches behind its cached norm must not be blown up without limit."""
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
    fallback: bool = False
    """The noise-aware problem had no solution; the plain one was solved."""


def common_direction(gram: Tensor, *, normalize: bool = True, solver: Solver = "min_norm") -> Direction:
    """Steps 3-5 for the *raw* Gram matrix [K, K] of the g_k. ``solver`` "equal" leaves out step 4."""
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
    solution: MinNorm = equal_shares(unit) if solver == "equal" else min_norm(unit)
    stationary = solution.norm < STATIONARY_NORM
    alpha[active] = solution.alpha
    if not stationary:
        weights = rescaled(alpha, norms) if normalize else alpha.clone()
    return Direction(alpha, weights, active, stationary, solution.norm, solution.kkt_residual)


def rescaled(alpha: Tensor, norms: Tensor) -> Tensor:
    """[K] Step 5: weights of the raw gradients that make sum_k alpha_k ghat_k * mean(norms); 0 where there is none."""
    active = norms > 0
    weights = torch.zeros_like(norms)
    weights[active] = alpha[active] * (norms[active].mean() / norms[active])
    return weights


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
        solver: Solver = "min_norm",
        apply: Literal["alpha", "alpha_over_norm"] = "alpha",
        uniform_after: int | None = None,
        adv_clip: float = 5.0,
        normalize: bool = True,
        smooth: Literal["alpha", "gram"] = "alpha",
    ) -> None:
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
        for name, value, choices in (
            ("solver", solver, get_args(Solver)),
            ("apply", apply, ("alpha", "alpha_over_norm")),
            ("smooth", smooth, ("alpha", "gram")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        if solver == "noise_aware" and smooth != "gram":
            raise ValueError("solver 'noise_aware' works on averaged products: it needs smooth 'gram'")
        if solver == "equal" and smooth != "alpha":
            raise ValueError(
                "solver 'equal' solves nothing that products could be smoothed for: it needs smooth 'alpha'"
            )
        if not normalize and (smooth, apply) != ("alpha", "alpha"):
            raise ValueError("normalize=False is an ablation of the paper's rule: it needs smooth and apply 'alpha'")
        self.rewards = tuple(rewards)
        self.refresh_every = refresh_every
        self.ema_decay = ema_decay
        self.solver = solver
        self.apply = apply
        self.uniform_after = uniform_after
        self.adv_clip = adv_clip
        self.normalize = normalize
        self._memory = GramMemory(len(self.rewards), ema_decay) if smooth == "gram" else None
        self._alpha_bar = self._uniform()
        self._norms = torch.full((len(self.rewards),), float("nan"), dtype=torch.float64)
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

        ``cross`` [K, K], the unbiased products of two half batches, is what the noise-aware solver needs; the others
        do not use it.
        """
        k = len(self.rewards)
        if tuple(gram.shape) != (k, k):
            raise ValueError(f"gram must be [{k}, {k}] for the rewards {self.rewards}, got {tuple(gram.shape)}")
        fallback = False
        if self._memory is None:
            d = common_direction(gram, normalize=self.normalize, solver=self.solver)
            if not d.stationary:
                self._smooth(d)
        else:
            d, fallback = self._averaged(self._memory, gram, cross)
        self._remember_norms(gram, d.active)
        return Coefficients(alpha_bar=self.alpha_bar, fallback=fallback, **vars(d))

    def weights_for(self, gram: Tensor) -> Tensor:
        """[K]: the weights that this rule gives to the gradients behind another raw Gram matrix, without learning
        from it."""
        if self._memory is None:
            return common_direction(gram, normalize=self.normalize, solver=self.solver).weights
        return rescaled(self._alpha_bar, torch.as_tensor(as_gram(gram)).diagonal().sqrt())

    def combine(self, advantages: Tensor) -> Tensor:
        """One advantage per sample: [N, K] -> [N]. Each is clamped to +-adv_clip first, then combined.

        A sample's loss is affine in its clamped advantage and the coefficients sum to 1, so the gradient of the loss
        under the combined advantage is the same combination of the per-reward gradients (Proposition 1).

        With ``apply="alpha_over_norm"`` the coefficients need not sum to 1, and the result may leave +-adv_clip: use
        it as base + A * slope, where base keeps its coefficient 1, and do not clamp it again.
        """
        if advantages.ndim != 2 or advantages.shape[1] != len(self.rewards):
            raise ValueError(f"advantages must be [N, {len(self.rewards)}], got {tuple(advantages.shape)}")
        return advantages.clamp(-self.adv_clip, self.adv_clip) @ self.applied.to(advantages)

    @property
    def applied(self) -> Tensor:
        """[K] float64: the coefficients that ``combine`` uses."""
        if self.apply == "alpha" or self._in_uniform_stage:
            return self.alpha_bar
        known = ~self._norms.isnan()
        boost = torch.ones_like(self._norms)
        boost[known] = (self._norms[known].mean() / self._norms[known]).clamp_max(MAX_BOOST)
        return self.alpha_bar * boost

    @property
    def alpha_bar(self) -> Tensor:
        """[K] float64: the smoothed solution, on the simplex; uniform in the late uniform stage."""
        return self._uniform() if self._in_uniform_stage else self._alpha_bar.clone()

    def state_dict(self) -> dict[str, Any]:
        norms = [None if n != n else n for n in self._norms.tolist()]
        state = {"rewards": list(self.rewards), "alpha_bar": self._alpha_bar.tolist(), "norms": norms}
        return state if self._memory is None else state | {"memory": self._memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if tuple(state["rewards"]) != self.rewards:
            raise ValueError(f"state is of the rewards {state['rewards']}, not {list(self.rewards)}")
        if len(state["alpha_bar"]) != len(self.rewards):
            raise ValueError(f"state has {len(state['alpha_bar'])} coefficients for {len(self.rewards)} rewards")
        self._alpha_bar = torch.tensor(state["alpha_bar"], dtype=torch.float64)
        if "norms" in state:
            norms = [float("nan") if n is None else n for n in state["norms"]]
            self._norms = torch.tensor(norms, dtype=torch.float64)
        if self._memory is not None and "memory" in state:
            self._memory.load_state_dict(state["memory"])

    def _averaged(self, memory: GramMemory, gram: Tensor, cross: Tensor | None) -> tuple[Direction, bool]:
        """Solve for the averaged products; rewards that never had a gradient keep their share."""
        g = torch.as_tensor(as_gram(gram))
        norms = g.diagonal().sqrt()
        active = norms > 0
        scale = norms.masked_fill(~active, 1.0)
        unit_cross = None if cross is None else cross.to(g) / scale[:, None] / scale[None, :]
        memory.add(g / scale[:, None] / scale[None, :], unit_cross, active)
        known = memory.known
        if not known.any():
            zeros = torch.zeros_like(norms)
            return Direction(zeros, zeros.clone(), active, stationary=False, norm=0.0, kkt_residual=0.0), False
        averages = memory.gram[known][:, known].nan_to_num(0.0)  # never seen together: taken as orthogonal
        mean = nearest_gram(averages)
        solution = min_norm(mean)
        part, stretch = solution.alpha, 1.0
        fallback = False
        if self.solver == "noise_aware":
            w = noise_aware(mean, memory.cross[known][:, known].nan_to_num(0.0))
            fallback = w is None
            if w is not None and w.sum() > 0:
                part = w / w.sum()
                stretch = float(w.sum() / (w @ mean @ w)) if solution.norm >= STATIONARY_NORM else 1.0
        # Averages that no gradients have do not show that the rewards cancel, though those nearest to them may do so.
        stationary = solution.norm < STATIONARY_NORM and mean is averages
        alpha = torch.zeros_like(norms)
        alpha[known] = part * (1.0 - self._alpha_bar[~known].sum())
        if not stationary:
            self._alpha_bar[known] = alpha[known]
        weights = torch.zeros_like(norms) if stationary else stretch * rescaled(alpha, norms)
        return Direction(alpha, weights, active, stationary, solution.norm, solution.kkt_residual), fallback

    def _remember_norms(self, gram: Tensor, active: Tensor) -> None:
        norms = gram.detach().diagonal().to("cpu", torch.float64).sqrt()
        before = torch.where(self._norms.isnan(), norms, self._norms)
        self._norms[active] = (self.ema_decay * before + (1 - self.ema_decay) * norms)[active]

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
