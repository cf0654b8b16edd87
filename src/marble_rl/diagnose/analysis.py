"""Everything that can be told from the products of gradients alone.

M independent mini-batches give M x J gradients g_mj (K rewards, then the weighted-sum probe), and their products
Gamma [M, J, M, J]. A direction made from batch m is d_m = sum_j w_mj g_mj (directions.py). Its cosines
with the rewards' gradients are taken three ways:

- in-batch: with the gradients it was made from (the paper's figure; a reward's noise counts as agreement with itself);
- independent: with the gradients of one other batch, averaged over all others (the headline);
- rest: with the mean gradient of all other batches, which is nearer to the true one.

Products of different batches are unbiased: E g_mk.g_m'l = mu_k.mu_l for m != m', mu_k being the true gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from marble_rl.bootstrap import resampled_mean
from marble_rl.coefficients.harmonizer import common_direction
from marble_rl.coefficients.min_norm import min_norm
from marble_rl.harmony import Harmony, harmony, in_batch_harmony

FIGURES = tuple(Harmony.__annotations__)
NEAR_ZERO = 0.05
"""Of the unit gradients' min-norm point: below it the batch has next to no common direction."""


@dataclass(frozen=True)
class Estimate:
    """A mean over batches with its 95 % interval, by resampling batches."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        return cls(*resampled_mean(np.asarray(values, dtype=np.float64)))


@dataclass(frozen=True)
class DirectionFigures:
    """How one way to combine the rewards serves each of them; figure -> estimate."""

    in_batch: dict[str, Estimate]
    independent: dict[str, Estimate]
    rest: dict[str, Estimate]
    each: list[Estimate]
    """[K] cosine with each reward's mean gradient of the other batches"""


def direction_figures(products: Tensor, weights: Tensor, rewards: int) -> DirectionFigures:
    """Of d_m = sum_j weights_mj g_mj."""
    batches = range(len(products))
    in_batch = [in_batch_harmony(products[m, :, m], weights[m], rewards) for m in batches]
    independent = [_independent(products, weights[m], m, rewards) for m in batches]
    rest = [_rest(products, weights[m], m, rewards) for m in batches]
    cosines = torch.stack([cosine for cosine, _ in rest])
    return DirectionFigures(
        _estimates(in_batch),
        _estimates(independent),
        _estimates([found for _, found in rest]),
        [Estimate.of(column[~column.isnan()].tolist() or [float("nan")]) for column in cosines.T],
    )


def _estimates(found: Sequence[Harmony | None]) -> dict[str, Estimate]:
    told = [one for one in found if one is not None]
    return {name: Estimate.of([getattr(one, name) for one in told]) for name in FIGURES} if told else {}


def _independent(products: Tensor, weights: Tensor, made: int, rewards: int) -> Harmony | None:
    """Mean over the other batches of the harmony with each."""
    length = weights @ products[made, :, made] @ weights
    found = [
        harmony(
            (products[other, :, made] @ weights)[:rewards],
            products[other, :, other].diagonal()[:rewards],
            length,
        )
        for other in range(len(products))
        if other != made
    ]
    told = [one for one in found if one is not None]
    return Harmony(*(sum(getattr(one, n) for one in told) / len(told) for n in FIGURES)) if told else None


def _rest(products: Tensor, weights: Tensor, made: int, rewards: int) -> tuple[Tensor, Harmony | None]:
    """[K] cosines with the mean gradient of the other batches (NaN where there is none), and their harmony."""
    others = [m for m in range(len(products)) if m != made]
    along = (products[others][:, :, made] @ weights).mean(0)[:rewards]
    squared = products[others][:, :, others].mean((0, 2)).diagonal()[:rewards]
    length = weights @ products[made, :, made] @ weights
    cosines = along / (squared * length).sqrt()
    return torch.where(squared > 0, cosines, torch.nan), harmony(along, squared, length)


def merged(products: Tensor, size: int) -> Tensor:
    """[M // size, J, M // size, J]: of mini-batches ``size`` times as large. The gradient of a large batch is the mean
    of those of its parts."""
    count, columns = len(products) // size, products.shape[1]
    whole = products[: count * size, :, : count * size]
    return whole.reshape(count, size, columns, count, size, columns).mean((1, 4))


def unbiased_products(products: Tensor) -> Tensor:
    """[J, J]: estimate of mu_k.mu_l, the mean over pairs of different batches."""
    count = len(products)
    everything = products.sum((0, 2))
    same = torch.einsum("mjmi->ji", products)
    return (everything - same) / (count * (count - 1))


def true_cosines(products: Tensor, rewards: int) -> Tensor:
    """[K, K]: cosines between the rewards' true gradients; NaN for a reward whose estimated signal is not positive."""
    mu = unbiased_products(products)[:rewards, :rewards]
    length = mu.diagonal().clamp_min(0).sqrt()
    return torch.where((length[:, None] * length) > 0, mu / (length[:, None] * length), torch.nan)


def signal(products: Tensor, rewards: int, size: float = 1.0) -> Tensor:
    """[K]: |mu_k|^2 / E|g_k|^2 for batches ``size`` times as large as those measured.

    Noise adds |g|^2 - |mu|^2 to a batch of this size, and 1/size of it to one that is ``size`` times as large.
    """
    mu = unbiased_products(products).diagonal()[:rewards]
    raw = torch.einsum("mjmj->j", products)[:rewards] / len(products)
    return mu / (mu + (raw - mu) / size)


@dataclass(frozen=True)
class QpFacts:
    """Of the plain QP on unit gradients, over batches."""

    norm: list[float]
    """Length of the min-norm point: the cosine that it guarantees every reward in its own batch"""
    combined: list[float]
    """Length of the combined gradient, in units of the rewards' mean gradient length"""
    near_zero: float
    """Share of batches with a min-norm point shorter than 0.05"""


def qp_facts(products: Tensor, weights: Tensor, rewards: int) -> QpFacts:
    """``weights`` [M, J]: of the combined gradients."""
    norms, combined = [], []
    for m in range(len(products)):
        gram = products[m, :rewards, m, :rewards]
        lengths = gram.diagonal().sqrt()
        active = lengths > 0
        unit = gram[active][:, active] / lengths[active][:, None] / lengths[active]
        norms.append(min_norm(unit).norm if active.any() else 0.0)
        length = float((weights[m] @ products[m, :, m] @ weights[m]).clamp_min(0).sqrt())
        combined.append(length / float(lengths[active].mean()) if active.any() else 0.0)
    return QpFacts(norms, combined, sum(norm < NEAR_ZERO for norm in norms) / len(norms))


@dataclass(frozen=True)
class AdvantageFacts:
    """Are the cosines between gradients those of parameters, or only the correlations of the rewards' advantages?

    g_k = mean_i A_ki s_i. Where the samples' s_i have nothing in common, as in noise, g_k.g_l is
    mean_i A_ki A_li |s_i|^2 / N: the products of gradients are those of advantages, and the min-norm point is the mix
    of advantages with the smallest variance. It could be found without any gradient, and says nothing of what the
    parameters can do for a reward.
    """

    correlations: list[list[float]]
    """[K, K] between the rewards' advantages, mean over batches"""
    agreement: Estimate | None
    """Correlation, over pairs of rewards, of gradients' cosines with advantages' correlations in the same batch; None
    for less than three rewards"""
    alpha: list[Estimate]
    """[K] of the min-norm point of the gradients"""
    alpha_of_advantages: list[Estimate]
    """[K] of the advantages"""


def advantage_facts(products: Tensor, advantages: Tensor, rewards: int) -> AdvantageFacts:
    """``advantages`` [M, K, K]: mean_i A_ki A_li of each batch."""
    grams = torch.einsum("mjmi->mji", products)[:, :rewards, :rewards]
    pairs = torch.triu_indices(rewards, rewards, 1)
    cosines, correlations = _unit(grams), _unit(advantages)
    told = []
    for two in zip(cosines, correlations, strict=True):
        columns = torch.stack([one[pairs[0], pairs[1]] for one in two])
        if rewards > 2 and (columns.std(1) > 0).all():
            told.append(float(torch.corrcoef(columns)[0, 1]))
    alphas = [torch.stack([common_direction(of).alpha for of in every]) for every in (grams, advantages)]
    return AdvantageFacts(
        correlations.mean(0).tolist(),
        Estimate.of(told) if told else None,
        *([Estimate.of(column.tolist()) for column in alpha.T] for alpha in alphas),
    )


def _unit(grams: Tensor) -> Tensor:
    """[M, K, K] divided by lengths; 0 where there is none."""
    lengths = torch.einsum("mkk->mk", grams).sqrt()
    inverse = torch.where(lengths > 0, 1 / lengths.clamp_min(1e-300), 0.0)
    return grams * inverse[:, :, None] * inverse[:, None, :]


@dataclass(frozen=True)
class Conflict:
    """A constructed conflict: the second reward's gradient turned against the first's."""

    strength: float
    """0: as it is. 1: exactly opposed"""
    min_cos: float
    """Of the min-norm direction, mean over batches"""
    weighted_sum_min_cos: float
    """Of the plain sum of the gradients"""
    norm: float


def constructed_conflict(products: Tensor, rewards: int, strengths: Sequence[float]) -> list[Conflict]:
    """g_2 <- (1 - s) g_2 - s (|g_2| / |g_1|) g_1, for s from 0 to 1: what each rule makes of it, in-batch."""
    found = []
    for s in strengths:
        rows = []
        for m in range(len(products)):
            gram = products[m, :rewards, m, :rewards]
            first, second = gram[0, 0].sqrt(), gram[1, 1].sqrt()
            if first == 0 or second == 0:
                continue
            change = torch.eye(rewards, dtype=gram.dtype)
            change[1, 1], change[1, 0] = 1 - s, -s * second / first
            turned = change @ gram @ change.T
            lengths = turned.diagonal().sqrt()
            unit = turned / lengths[:, None] / lengths
            solution = min_norm(unit)
            ours = in_batch_harmony(unit, solution.alpha, rewards) if solution.norm > 1e-6 else None
            summed = in_batch_harmony(turned, torch.ones(rewards, dtype=gram.dtype), rewards)
            rows.append((ours.min_cos if ours else 0.0, summed.min_cos if summed else 0.0, solution.norm))
        if rows:
            found.append(Conflict(s, *(float(np.mean(column)) for column in zip(*rows, strict=True))))
    return found
