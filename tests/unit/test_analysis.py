"""What is told from products of gradients, on gradients whose truth is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from marble_rl.advantages import second_moments
from marble_rl.coefficients.harmonizer import common_direction
from marble_rl.diagnose.analysis import (
    Estimate,
    advantage_facts,
    constructed_conflict,
    direction_figures,
    merged,
    qp_facts,
    signal,
    true_cosines,
    unbiased_products,
)

K, P = 3, 4000


def truth() -> Tensor:
    """[K, P] true gradients: the first two agree (cosine 0.6), the third is opposed to the first (cosine -0.5)."""
    e = torch.eye(3, P, dtype=torch.float64)
    return torch.stack([e[0], 0.6 * e[0] + 0.8 * e[1], -0.5 * e[0] + math.sqrt(0.75) * e[2]])


def gradients(batches: int, noise: float, seed: int = 0) -> Tensor:
    """[M, 4, P]: mu + noise, with the sum of the three as probe. ``noise`` is its length beside |mu| = 1."""
    dice = torch.Generator().manual_seed(seed)
    g = truth() + noise / math.sqrt(P) * torch.randn(batches, K, P, dtype=torch.float64, generator=dice)
    return torch.cat([g, g.sum(1, keepdim=True)], dim=1)


def products_of(g: Tensor) -> Tensor:
    return torch.einsum("mjp,nip->mjni", g, g)


def products(batches: int, noise: float, seed: int = 0) -> Tensor:
    """[M, 4, M, 4]"""
    return products_of(gradients(batches, noise, seed))


def marble(found: Tensor) -> Tensor:
    """[M, 4] weights of the min-norm point of each batch."""
    weights = torch.stack([common_direction(found[m, :K, m, :K]).weights for m in range(len(found))])
    return torch.nn.functional.pad(weights, (0, 1))


def test_without_noise_all_three_figures_are_the_same() -> None:
    found = direction_figures(products(5, 0.0), marble(products(5, 0.0)), K)
    gram = truth() @ truth().T
    alpha = common_direction(gram).alpha
    expected = float((alpha @ gram @ alpha).sqrt())  # the min-norm point's length is every active cosine
    for figures in (found.in_batch, found.independent, found.rest):
        assert figures["min_cos"].mean == pytest.approx(expected, abs=1e-9)
        assert figures["conflict"].mean == 0.0
    assert [one.mean for one in found.each] == pytest.approx([expected] * K, abs=1e-9)


def test_noise_counts_as_agreement_only_in_batch() -> None:
    """Noise five times as long as the signal: in-batch the direction looks good to everyone, elsewhere it is not."""
    noisy = products(40, 5.0)
    found = direction_figures(noisy, marble(noisy), K)
    assert found.in_batch["min_cos"].mean > 0.45
    assert found.in_batch["conflict"].mean == 0.0
    assert abs(found.independent["mean_cos"].mean) < 0.05
    assert found.independent["conflict"].mean > 0.3
    assert found.rest["mean_cos"].mean > found.independent["mean_cos"].mean


def test_cross_products_are_unbiased() -> None:
    noisy = unbiased_products(products(60, 3.0))[:K, :K]
    assert noisy == pytest.approx(truth() @ truth().T, abs=0.12)
    assert true_cosines(products(60, 1.0), K) == pytest.approx(truth() @ truth().T, abs=0.05)


def test_cosines_of_pure_noise_are_not_told() -> None:
    pure = products(3, 1e6)
    cosines = true_cosines(pure, K)
    negative = unbiased_products(pure).diagonal()[:K] <= 0
    assert cosines[negative].isnan().all()
    assert not cosines[~negative][:, ~negative].isnan().any()


def test_signal_at_other_batch_sizes() -> None:
    """signal = 1 / (1 + noise^2 / size); measured on batches of both sizes."""
    assert signal(products(60, 2.0), K).tolist() == pytest.approx([0.2] * K, abs=0.03)
    assert signal(products(60, 2.0), K, size=4.0).tolist() == pytest.approx([0.5] * K, abs=0.05)
    assert signal(products(60, 1.0, seed=1), K).tolist() == pytest.approx([0.5] * K, abs=0.05)


def test_merged_batches_are_batches_of_the_mean_gradients() -> None:
    g = gradients(11, 2.0)
    large = torch.stack([g[start : start + 3].mean(0) for start in (0, 3, 6)])
    assert torch.allclose(merged(products_of(g), 3), products_of(large), rtol=1e-12, atol=1e-12)
    assert torch.equal(merged(products_of(g), 1), products_of(g))


def test_with_larger_batches_the_harmony_holds_elsewhere_too() -> None:
    """Noise ten times as long as the signal; at 64 times the size it is hardly longer."""
    small = products(256, 10.0)
    large = merged(small, 64)
    found = [direction_figures(p, marble(p), K) for p in (small, large)]
    assert found[0].rest["conflict"].mean > 0.2
    assert found[1].rest["conflict"].mean == 0.0
    assert found[1].rest["min_cos"].low > found[0].rest["min_cos"].high


def test_the_qp_over_batches() -> None:
    facts = qp_facts(products(10, 0.0), marble(products(10, 0.0)), K)
    gram = truth() @ truth().T
    assert facts.norm == pytest.approx([common_direction(gram).norm] * 10)
    assert facts.combined == pytest.approx(facts.norm)  # unit gradients, so the rescaling is by 1
    assert facts.near_zero == 0.0


def correlated_advantages(batches: int, samples: int) -> Tensor:
    """[M, N, K]: the first two rewards agree on most samples, the third opposes them."""
    dice = torch.Generator().manual_seed(3)
    shared, own = (torch.randn(batches, samples, n, dtype=torch.float64, generator=dice) for n in (1, K))
    return shared * torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64) + own


@pytest.mark.parametrize("common", [0.0, 1.0])
def test_noise_has_the_cosines_of_the_advantages(common: float) -> None:
    """g_k = mean_i A_ki s_i: with nothing in common between samples the QP sees the advantages alone. Where parameters
    serve the rewards in other ways than the advantages correlate, it sees that."""
    dice = torch.Generator().manual_seed(4)
    a = correlated_advantages(20, 64)
    slopes = torch.randn(20, 64, P, dtype=torch.float64, generator=dice)
    g = torch.einsum("mnk,mnp->mkp", a, slopes) / 64
    g = g + common * g.norm(dim=2).mean() * 3 * torch.eye(K, P, dtype=torch.float64)[[0, 1, 0]]
    g = torch.cat([g, g.sum(1, keepdim=True)], dim=1)
    moments = torch.stack([second_moments(of) for of in a])
    facts = advantage_facts(products_of(g), moments, K)
    assert facts.agreement is not None
    difference = max(abs(x.mean - y.mean) for x, y in zip(facts.alpha, facts.alpha_of_advantages, strict=True))
    if common:
        assert facts.agreement.mean < 0
        assert difference > 0.1
    else:
        assert facts.agreement.mean > 0.98
        assert difference < 0.01
    assert torch.tensor(facts.correlations) == pytest.approx(
        torch.tensor([[1.0, 0.5, -0.5], [0.5, 1.0, -0.5], [-0.5, -0.5, 1.0]]), abs=0.06
    )


def test_two_rewards_have_no_pairs_to_compare() -> None:
    facts = advantage_facts(products(4, 1.0)[:, :2, :, :2], torch.eye(2, dtype=torch.float64).expand(4, 2, 2), 2)
    assert facts.agreement is None


def test_a_constructed_conflict_ends_in_nothing() -> None:
    mild, *_, total = constructed_conflict(products(10, 0.5), K, [0.0, 0.5, 0.9, 1.0])
    assert mild.min_cos == pytest.approx(mild.norm)
    assert mild.min_cos > 0.2
    assert total.norm == pytest.approx(0.0, abs=1e-6)
    assert total.weighted_sum_min_cos < 0


def test_intervals_cover() -> None:
    dice = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        found = Estimate.of((0.3 + torch.randn(50, generator=dice)).tolist())
        covered += found.low <= 0.3 <= found.high
    assert 0.88 <= covered / 200 <= 0.99
