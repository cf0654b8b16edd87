"""Plain, slow float64 implementations of docs/method.md, written from its equations and from nothing else.

They share no code with the package and avoid its formulas: the NFT loss is in its r form, not base + A * slope; the
group statistics come from the standard library; the simplex QP is solved by trying every support.
"""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import torch

ADVANTAGE_EPS = 1e-4
MIN_MEAN_ERROR = 1e-5


def nft_losses(v_theta, v_old, x0, x_t, t, advantage, *, beta, adv_clip=5.0):
    """Section 2: (A_max / beta) (r L+ + (1 - r) L-) per sample [N], r clamped to [0, 1]."""
    losses = []
    for i in range(len(x0)):
        r = min(max(0.5 + float(advantage[i]) / (2 * adv_clip), 0.0), 1.0)
        plus = (1 - beta) * v_old[i].detach() + beta * v_theta[i]
        minus = (1 + beta) * v_old[i].detach() - beta * v_theta[i]
        loss = 0.0
        for share, v in ((r, plus), (1 - r, minus)):
            error = (x_t[i] - t[i] * v) - x0[i]
            weight = max(float(error.detach().abs().mean()), MIN_MEAN_ERROR)
            loss = loss + share * (error**2).mean() / weight
        losses.append(adv_clip / beta * loss)
    return torch.stack(losses)


def nft_gradient(v_theta, v_old, x0, x_t, t, advantage, *, beta, adv_clip=5.0):
    """The gradient of the sum of `nft_losses` over v_theta, differentiated by hand; the weights are constants."""
    grads = []
    for i in range(len(x0)):
        r = min(max(0.5 + float(advantage[i]) / (2 * adv_clip), 0.0), 1.0)
        grad = torch.zeros_like(v_theta[i])
        for share, sign in ((r, 1.0), (1 - r, -1.0)):
            v = v_old[i] + sign * beta * (v_theta[i] - v_old[i])
            error = (x_t[i] - t[i] * v) - x0[i]
            weight = max(float(error.abs().mean()), MIN_MEAN_ERROR)
            grad = grad + share * 2 * error * (-t[i] * sign * beta) / (error.numel() * weight)
        grads.append(adv_clip / beta * grad)
    return torch.stack(grads)


def group_advantages(values, group_ids, applicable=None, std="group"):
    """Section 3, point 1, as nested lists: values [N][K] -> advantages [N][K]."""
    rows, columns = len(values), len(values[0]) if values else 0
    result = [[0.0] * columns for _ in range(rows)]
    for k in range(columns):
        groups = {}
        for i in range(rows):
            if applicable is None or applicable[i][k]:
                groups.setdefault(group_ids[i], []).append(i)
        centred, spread = {}, {}
        for members in groups.values():
            scores = [float(values[i][k]) for i in members]
            mean = statistics.fmean(scores)
            deviation = statistics.pstdev(scores)
            constant = len(scores) < 2 or deviation <= 1e-6 * max(1.0, abs(mean))
            for i, score in zip(members, scores, strict=True):
                centred[i] = score - mean
                spread[i] = None if constant else deviation
        if std == "global" and centred:
            deviation = statistics.pstdev(centred.values())
            spread = {i: None if s is None else deviation for i, s in spread.items()}
        for i, deviation in spread.items():
            if deviation is not None:
                result[i][k] = centred[i] / (deviation + ADVANTAGE_EPS)
    return result


def simplex_qp(gram):
    """argmin over the simplex of a^T G a, by trying every support; returns (alpha, a^T G a). For K up to 8 or so."""
    gram = np.asarray(gram, dtype=np.float64)
    size = len(gram)
    best, best_value = None, math.inf
    for count in range(1, size + 1):
        for support in itertools.combinations(range(size), count):
            system = np.ones((count + 1, count + 1))
            system[:count, :count] = gram[np.ix_(support, support)]
            system[count, count] = 0.0
            right = np.zeros(count + 1)
            right[count] = 1.0
            solution = np.linalg.lstsq(system, right, rcond=None)[0][:count]
            if solution.min() < 0 or abs(solution.sum() - 1) > 1e-9:
                continue
            alpha = np.zeros(size)
            alpha[list(support)] = solution
            value = float(alpha @ gram @ alpha)
            if value < best_value:
                best, best_value = alpha, value
    return best, best_value


def optimality_gap(gram, alpha):
    """An upper bound of a^T G a - min over the simplex, in exact rational arithmetic.

    For a convex f the Frank-Wolfe gap bounds the error: f(a) - f* <= <f'(a), a> - min_k f'(a)_k with f'(a) = 2 G a.
    """
    exact = [[Fraction(float(x)) for x in row] for row in gram]
    point = [Fraction(float(x)) for x in alpha]
    total = sum(point)
    point = [x / total for x in point]
    slope = [sum((g * x for g, x in zip(row, point, strict=True) if x), Fraction(0)) for row in exact]
    value = sum(x * s for x, s in zip(point, slope, strict=True))
    return float(2 * (value - min(slope)))


def smoothed(alpha_bar, alpha, active, decay):
    """Section 3, point 10, with the rule for batches without signal: rewards left out keep their coefficient."""
    left_out = sum(a for a, on in zip(alpha_bar, active, strict=True) if not on)
    new = [
        decay * old + (1 - decay) * (1 - left_out) * star if on else old
        for old, star, on in zip(alpha_bar, alpha, active, strict=True)
    ]
    return [x / sum(new) for x in new]


def cosine(a, b):
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(math.fsum(x * x for x in a)) / math.sqrt(math.fsum(x * x for x in b))


def z_score_means(rows):
    """Section 5: per row, the mean over columns of the column's z-score across the rows."""
    columns = list(zip(*rows, strict=True))
    means = [statistics.fmean(c) for c in columns]
    deviations = [statistics.pstdev(c) for c in columns]
    return [statistics.fmean((x - m) / s for x, m, s in zip(row, means, deviations, strict=True)) for row in rows]
