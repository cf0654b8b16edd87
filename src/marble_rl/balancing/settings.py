"""Settings of every balancing rule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from marble_rl.section import Section, Weights


class MarbleBalance(Section):
    """MARBLE: one direction that is good for every reward, found by a quadratic program."""

    type: Literal["marble"] = "marble"
    refresh_every: PositiveInt = 10
    """Optimizer steps between two solutions of the quadratic program; 1 solves it in every step."""
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.7
    """rho: smoothing of the coefficients over refreshes."""
    smooth: Literal["alpha", "gram"] = "alpha"
    """What is smoothed: `alpha` the solutions (the paper), `gram` the products of the unit gradients, before the
    problem is solved."""
    solver: Literal["min_norm", "noise_aware", "equal"] = "min_norm"
    """`min_norm`: the min-norm point of the hull of the unit gradients. `noise_aware`, an experiment: the shortest step
    that makes progress along what is not noise in them; needs `smooth: gram`. `equal`, an ablation: the mean of the
    unit gradients."""
    apply: Literal["alpha", "alpha_over_norm"] = "alpha"
    """Steps between refreshes. `alpha`: combine the advantages by the smoothed coefficients (the paper), so the reward
    with the larger gradient counts for more. `alpha_over_norm`: divide by cached gradient norms first."""
    gradients: Literal["fused", "passes"] = "fused"
    """`fused`: the gradients of all rewards from one backward pass. `passes`: one pass for each, to compare with."""
    normalize: bool = True
    """Unit gradients in the quadratic program. false is the paper's ablation, which it reports to fail."""
    metric: Literal["euclidean", "adam"] = "euclidean"
    """What the lengths and angles of gradients are. `euclidean`: the usual ones (the paper). `adam`, an experiment:
    those of the product a^T P^-1 b, where P is the diagonal that AdamW divides by, so that the direction found is good
    for every reward in the step that AdamW makes of it."""
    uniform_after: Annotated[int, Field(ge=0)] | None = None
    """From this step on use equal coefficients (the paper's late uniform stage); null never does."""
    probe_weights: Weights = {}
    """Weights of the weighted-sum direction that is measured beside ours (`ws_...` metrics); 1 where not given.
    They do not influence training."""


class WeightedSumBalance(Section):
    """The usual practice: one scalar reward sum_k w_k R_k, then one advantage."""

    type: Literal["weighted_sum"]
    weights: Weights = {}
    """w_k by reward name; 1 where not given."""


class FixedBalance(Section):
    """Constant coefficients on per-reward advantages."""

    type: Literal["fixed"]
    coefficients: Weights | None = None
    """By reward name, summing to 1; rewards not named get 0. null is 1/K each."""


class GdpoBalance(Section):
    """GDPO: normalise each reward's advantage in its group, sum, normalise the sum over the batch."""

    type: Literal["gdpo"]
    weights: Weights = {}
    """Weights in the sum by reward name; 1 where not given."""


class SingleBalance(Section):
    """Train one reward; the others are scored and logged."""

    type: Literal["single"]
    reward: str
    """Its name."""


class Stage(Section):
    """One stage of a sequential schedule."""

    reward: str
    """The reward trained."""
    steps: PositiveInt
    """For how many optimizer steps."""


class SequentialBalance(Section):
    """A hand-made schedule: one reward after the other. The last stage lasts to the end."""

    type: Literal["sequential"]
    stages: Annotated[list[Stage], Field(min_length=1)]
    """The stages in their order."""


class DropoutBalance(Section):
    """Reward dropout: each step trains a random subset with equal coefficients."""

    type: Literal["dropout"]
    rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Probability that a reward is left out of a step; at least one stays."""


class MinVarianceBalance(Section):
    """MARBLE's quadratic program on the advantages in place of the gradients: the mix of the rewards with the smallest
    variance. No gradient per reward is needed; shows what the gradients add (docs/results.md)."""

    type: Literal["min_variance"]
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.965
    """Smoothing of the coefficients over steps. 0.965 in every step is the paper's 0.7 every 10 steps."""


Balance = Annotated[
    MarbleBalance
    | WeightedSumBalance
    | FixedBalance
    | GdpoBalance
    | SingleBalance
    | SequentialBalance
    | DropoutBalance
    | MinVarianceBalance,
    Field(discriminator="type"),
]
