"""Everything that follows from the products of gradients alone.

M independent mini-batches give M x J gradients g_mj (K rewards, then the weighted-sum probe), and their products
Gamma [M, J, M, J]. A direction made from batch m is d_m = sum_j w_mj g_mj (directions.py). Its cosines
with the rewards' gradients are taken three ways:

- in-batch: with the gradients it was made from (the paper's figure; a reward's noise counts as agreement with itself);
- independent: with the gradients of one other batch, averaged over all others (the headline);
- rest: with the mean gradient of all other batches, which is nearer to the true one.

Products of different batches are unbiased: E g_mk.g_m'l = mu_k.mu_l for m != m', mu_k being the true gradient.

How the intervals are made: intervals.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from marble_rl.balancing.direction import common_direction
from marble_rl.balancing.min_norm import min_norm
from marble_rl.diagnose.intervals import COSINE, RATE, SHARE, jackknife, mean_over_batches
from marble_rl.diagnose.record import AdvantageFacts, DirectionFigures, Figures, QpFacts
from marble_rl.intervals import Interval

FIGURES = {"min_cos": COSINE, "mean_cos": COSINE, "var_cos": SHARE, "conflict": RATE}
"""Those of `Harmony`, with their bounds."""
NEAR_ZERO = 0.05
"""Of the unit gradients' min-norm point: below it the batch has next to no common direction."""


def direction_figures(products: Tensor, weights: Tensor, rewards: int) -> DirectionFigures:
    """Of d_m = sum_j weights_mj g_mj."""
    along, squared, same_reward = _parts(products, weights, rewards)
    cosines = _cosines(along, torch.einsum("knn->nk", same_reward), squared[:, None])
    rest = _rest(along, same_reward, squared)
    return DirectionFigures(
        _in_batch(cosines), independent_figures(cosines), _named(rest[: len(FIGURES)]), rest[len(FIGURES) :]
    )


def _parts(products: Tensor, weights: Tensor, rewards: int) -> tuple[Tensor, Tensor, Tensor]:
    """d_m.g_nk [M, M, K], |d_m|^2 [M] and g_mk.g_nk [K, M, M]."""
    along = torch.einsum("nkmj,mj->mnk", products[:, :rewards], weights)
    squared = torch.einsum("mj,mjmi,mi->m", weights, products, weights)
    return along, squared, torch.einsum("mknk->kmn", products[:, :rewards, :, :rewards])


def worst_served(products: Tensor, weights: Tensor, rewards: int) -> Callable[[Tensor], Tensor]:
    """Of some batches: the cosine of d_m with the mean gradient of the others, mean over m, of the reward where it is
    smallest."""
    along, squared, same_reward = _parts(products, weights, rewards)

    def figure(kept: Tensor) -> Tensor:
        return _figures(_rest_cosines(along, same_reward, squared, kept).nanmean(0))[0]

    return figure


def _cosines(along: Tensor, gradients: Tensor, directions: Tensor) -> Tensor:
    """[..., K] from d.g_k, |g_k|^2 [..., K] and |d|^2 [...]; NaN where one of them has no length."""
    defined = (gradients > 0) & (directions > 0)[..., None]
    return torch.where(defined, along / gradients.sqrt() / directions.sqrt()[..., None], torch.nan)


def _figures(cosines: Tensor) -> Tensor:
    """[..., 4], in the order of FIGURES, of cosines [..., K] without those that are NaN; NaN where none is left."""
    smallest = cosines.nan_to_num(torch.inf).min(-1).values
    smallest = smallest.where(smallest.isfinite(), torch.nan)
    mean = cosines.nanmean(-1)
    variance = (cosines - mean[..., None]).square().nanmean(-1)
    conflict = torch.where(smallest.isnan(), torch.nan, (smallest < 0).to(cosines.dtype))
    return torch.stack([smallest, mean, variance, conflict], dim=-1)


def _in_batch(cosines: Tensor) -> Figures:
    own = _figures(torch.einsum("mmk->mk", cosines))
    columns = own[~own.isnan().any(1)].T.tolist()
    return _named([mean_over_batches(column, bounds) for column, bounds in zip(columns, FIGURES.values(), strict=True)])


def independent_figures(cosines: Tensor) -> Figures:
    """Of cosines [M, M, K] of the direction made from batch m with the gradients of batch n: mean over the other
    batches n, then over m."""
    pairs = _figures(cosines)
    pairs.diagonal().fill_(torch.nan)
    defined = ~pairs.isnan().any(2)
    took_part = (defined.any(0) | defined.any(1)).nonzero()[:, 0]
    return _named(jackknife(lambda kept: pairs[kept][:, kept].nanmean(1).nanmean(0), took_part, list(FIGURES.values())))


def _rest(along: Tensor, same_reward: Tensor, squared: Tensor) -> list[Interval | None]:
    """Of the cosines with the mean gradient of the other batches: one for each of FIGURES, then for each reward.

    ``along`` [M, M, K]: d_m.g_nk, ``same_reward`` [K, M, M]: g_mk.g_nk, ``squared`` [M]: |d_m|^2.
    """

    def figures(kept: Tensor) -> Tensor:
        cosines = _rest_cosines(along, same_reward, squared, kept)
        return torch.cat([_figures(cosines).nanmean(0), cosines.nanmean(0)])

    took_part = ((squared > 0) | (torch.einsum("kmm->mk", same_reward) > 0).any(1)).nonzero()[:, 0]
    return jackknife(figures, took_part, [*FIGURES.values(), *[COSINE] * len(same_reward)])


def _rest_cosines(along: Tensor, same_reward: Tensor, squared: Tensor, kept: Tensor) -> Tensor:
    """[M', K] among the batches ``kept``: cosines of d_m with the mean gradient of the others."""
    along, same = along[kept][:, kept], same_reward[:, kept][:, :, kept]
    # Of sums: a cosine does not change with the length of what it is taken with. All batches without the one itself:
    # |S - g_m|^2 = |S|^2 - 2 S.g_m + |g_m|^2.
    products = along.sum(1) - torch.einsum("mmk->mk", along)
    own = torch.einsum("kmm->km", same)
    lengths = same.sum((1, 2))[:, None] - 2 * same.sum(2) + own
    # Where only batch m has a gradient, rounding leaves a length that is not one.
    lengths = lengths.where(lengths > 1e-12 * own, 0.0)
    return _cosines(products, lengths.T, squared[kept])


def _named(intervals: Sequence[Interval | None]) -> Figures:
    """By name; a direction has all of the figures or none."""
    known = [interval for interval in intervals if interval is not None]
    return dict(zip(FIGURES, known, strict=True)) if known else {}


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


def attenuated_cosines(products: Tensor, rewards: int) -> Tensor:
    """[K, K]: mu_k.mu_l / (E|g_k|^2 E|g_l|^2)^1/2, unbiased products over noisy lengths. The diagonal is the signal of
    each reward; the others have the sign of the true cosine, and can be estimated where that cannot. NaN where a reward
    has no gradient."""
    mu = unbiased_products(products)[:rewards, :rewards]
    length = (torch.einsum("mjmj->j", products)[:rewards] / len(products)).sqrt()
    return mu / torch.where(length > 0, length, torch.nan)[:, None] / length


def true_cosines(products: Tensor, signals: Sequence[Interval | None]) -> Tensor:
    """[K, K]: cosines between the rewards' true gradients; NaN where the ``signals`` [K] of one may be 0: its length is
    then not known, and the quotient may be anything. Noise may take a cosine beyond 1; it is cut there."""
    found = attenuated_cosines(products, len(signals))
    known = [signal is not None and signal.low > 0 for signal in signals]
    length = found.diagonal().sqrt().where(torch.tensor(known), torch.nan)
    return (found / length[:, None] / length).clamp(-1.0, 1.0)


def signal_intervals(products: Tensor, rewards: int) -> list[Interval | None]:
    """[K]: the signal of each reward at the run's batch size; None for one without a gradient."""
    return jackknife(
        lambda kept: attenuated_cosines(products[kept][:, :, kept], rewards).diagonal(),
        torch.arange(len(products)),
        [SHARE] * rewards,
    )


def signal(products: Tensor, rewards: int, size: float = 1.0) -> Tensor:
    """[K]: |mu_k|^2 / E|g_k|^2 for batches ``size`` times as large as those measured.

    Noise adds |g|^2 - |mu|^2 to a batch of this size, and 1/size of it to one that is ``size`` times as large. 0 at
    every size where the estimate of |mu_k|^2 is not positive: the reward is lost in noise.
    """
    mu = unbiased_products(products).diagonal()[:rewards]
    raw = torch.einsum("mjmj->j", products)[:rewards] / len(products)
    return torch.where(mu > 0, mu / (mu + (raw - mu) / size), 0.0)


def qp_facts(products: Tensor, rewards: int) -> QpFacts:
    norms = []
    for m in range(len(products)):
        gram = products[m, :rewards, m, :rewards]
        lengths = gram.diagonal().sqrt()
        active = lengths > 0
        if not active.any():  # no program to solve, rather than one without a common direction
            continue
        unit = gram[active][:, active] / lengths[active][:, None] / lengths[active]
        norms.append(min_norm(unit).norm)
    if not norms:
        return QpFacts([0.0], 1.0)
    return QpFacts(norms, sum(norm < NEAR_ZERO for norm in norms) / len(norms))


def advantage_facts(products: Tensor, advantages: Tensor, rewards: int) -> AdvantageFacts:
    """``advantages`` [M, K, K]: mean_i A_ki A_li of each batch."""
    grams = torch.einsum("mjmi->mji", products)[:, :rewards, :rewards]
    pairs = torch.triu_indices(rewards, rewards, 1)
    cosines, correlations = _unit(grams), _unit(advantages)
    agreements = []
    for two in zip(cosines, correlations, strict=True):
        columns = torch.stack([one[pairs[0], pairs[1]] for one in two])
        columns = columns[:, ~columns.isnan().any(0)]
        if columns.shape[1] > 2 and (columns.std(1) > 0).all():
            agreements.append(float(torch.corrcoef(columns)[0, 1]))
    alphas = [torch.stack([common_direction(of).alpha for of in every]) for every in (grams, advantages)]
    return AdvantageFacts(
        correlations.nanmean(0).tolist(),
        mean_over_batches(agreements, COSINE),
        *([mean_over_batches(column.tolist(), SHARE) for column in _with_any(alpha).T] for alpha in alphas),
    )


def _with_any(alphas: Tensor) -> Tensor:
    """[M', K] of coefficients [M, K]: those of batches in which some reward has a gradient; all where none has."""
    known = alphas.sum(1) > 0
    return alphas[known] if known.any() else alphas


def _unit(grams: Tensor) -> Tensor:
    """[M, K, K] divided by lengths; NaN where there is none."""
    lengths = torch.einsum("mkk->mk", grams).sqrt()
    lengths = lengths.where(lengths > 0, torch.nan)
    return grams / lengths[:, :, None] / lengths[:, None, :]
