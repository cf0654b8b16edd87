"""The ways to combine the rewards that are compared: each gives weights to a batch's gradients from their products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from marble_rl.balancing.direction import common_direction, raw_direction, rescaled
from marble_rl.balancing.fair_harmonizer import FairHarmonizer
from marble_rl.balancing.min_norm import min_norm
from marble_rl.balancing.momenta import DECAY
from marble_rl.balancing.nearest_gram import nearest_gram

Rule = Callable[[Tensor], Tensor]
"""A batch's Gram matrix [J, J] -> weights [J]."""

MEANINGS = {
    "weighted_sum": "one advantage of the summed rewards (the usual practice)",
    "uniform": "the mean of the rewards' gradients (equal coefficients on advantages)",
    "unit_mean": "the mean of the unit gradients",
    "marble": "the min-norm point of this batch's unit gradients (the paper's refresh)",
    "fair": "fair shares for the rewards' momenta (balance.type: fair)",
    "min_variance": "the same of the advantages instead of the gradients: their mix with the smallest variance",
    "marble_no_norm": "the min-norm point without unit length (the paper's ablation)",
    "between_refreshes": "the run's smoothed coefficients on advantages (the paper's other steps)",
    "alpha_over_norm": "the run's smoothed coefficients on unit gradients",
    "mean_gram": "the min-norm point of the products averaged over all batches",
}


def directions(products: Tensor, advantages: Tensor, rewards: int, alpha_bar: Tensor | None) -> dict[str, Tensor]:
    """By name, [M, J] weights of each batch's gradients, from their products [M, J, M, J].

    ``advantages`` [M, K, K]: mean_i A_ki A_li of each batch. ``alpha_bar`` [K]: the run's smoothed coefficients, where
    it has any.
    """
    plain = torch.einsum("mjmi->mji", products)
    rules = _rules(products, rewards, alpha_bar)
    weights = {name: torch.stack([rule(gram) for gram in plain]) for name, rule in rules.items()}
    weights["fair"] = _fair(products, rewards)
    weights["min_variance"] = torch.stack([_padded(common_direction(of).weights) for of in advantages])
    return {name: weights[name] for name in MEANINGS if name in weights}


def _rules(products: Tensor, rewards: int, alpha_bar: Tensor | None) -> dict[str, Rule]:
    k = rewards
    rules: dict[str, Rule] = {
        "weighted_sum": lambda gram: torch.eye(len(gram), dtype=gram.dtype)[k],
        "uniform": lambda gram: _padded(torch.full((k,), 1 / k, dtype=gram.dtype)),
        "unit_mean": lambda gram: _padded(_per_length(torch.full((k,), 1 / k, dtype=gram.dtype), gram)),
        "marble": lambda gram: _padded(common_direction(gram[:k, :k]).weights),
        "marble_no_norm": lambda gram: _padded(raw_direction(gram[:k, :k]).weights),
    }
    if alpha_bar is not None:
        rules["between_refreshes"] = lambda gram: _padded(alpha_bar)
        rules["alpha_over_norm"] = lambda gram: _padded(_per_length(alpha_bar, gram))
    unit, known = _averaged(products, k)
    if not known.any():
        return rules
    mean = _among(min_norm(unit).alpha, known)
    rules["mean_gram"] = lambda gram: _padded(_per_length(mean, gram))
    return rules


def _fair(products: Tensor, rewards: int) -> Tensor:
    """[M, J]: what the momenta of each reward give for the gradients of each batch. The momenta are those after this
    batch and the ones before it, the last ones before the first."""
    count, k = len(products), rewards
    ages = (torch.arange(count)[:, None] - torch.arange(count)) % count
    parts = (1 - DECAY) * DECAY ** ages.to(products.dtype)  # m_k of batch m = sum_n parts_mn g_nk
    half = torch.einsum("mn,nkpl->mkpl", parts, products[:, :k, :, :k])
    momenta = torch.einsum("mp,mkpl->mkl", parts, half)
    rule = FairHarmonizer([str(i) for i in range(k)])
    return torch.stack([_padded(rule.shares_for(gram).weights) for gram in momenta])


def _among(share: Tensor, known: Tensor) -> Tensor:
    """[K]: 0 for the others."""
    return torch.zeros(len(known), dtype=share.dtype).masked_scatter(known, share)


def _padded(weights: Tensor) -> Tensor:
    """The probe has no part in it."""
    return torch.cat([weights, torch.zeros(1, dtype=weights.dtype)])


def _per_length(alpha: Tensor, gram: Tensor) -> Tensor:
    """Weights of the raw gradients that make sum_k alpha_k g_k / |g_k|, as long as MARBLE's step 5 makes it: AdamW adds
    its momentum to what it is given."""
    return rescaled(alpha.to(gram), gram.diagonal()[: len(alpha)].sqrt())


def _averaged(products: Tensor, rewards: int) -> tuple[Tensor, Tensor]:
    """G of unit gradients averaged over batches, and ``known`` [K]: the rewards that have a gradient in some batch.
    G is of those alone.

    An entry is averaged over the batches where both rewards have a gradient (balancing/nearest_gram.py); 0 where
    there is none.
    """
    k = rewards
    lengths = torch.einsum("mjmj->mj", products)[:, :k].sqrt()
    active = lengths > 0
    inverse = torch.where(active, 1 / lengths, 0.0)
    unit = torch.einsum("mjmi->mji", products)[:, :k, :k] * inverse[:, :, None] * inverse[:, None, :]
    count = active.to(unit.dtype)
    together = count.T @ count  # batches
    gram = torch.where(together > 0, unit.sum(0) / together, 0.0)
    known = active.any(0)
    return nearest_gram(gram[known][:, known]), known
