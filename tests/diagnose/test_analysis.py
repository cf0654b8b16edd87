"""What is told from products of gradients, on gradients whose truth is known."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from marble_rl.advantages import second_moments
from marble_rl.balancing.harmonizer import common_direction
from marble_rl.diagnose.analysis import (
    FIGURES,
    advantage_facts,
    direction_figures,
    independent_figures,
    merged,
    qp_facts,
    signal,
    signal_intervals,
    true_cosines,
    unbiased_products,
)
from marble_rl.diagnose.directions import directions
from marble_rl.diagnose.measure import Measured, check_space
from marble_rl.diagnose.printing import print_diagnosis
from marble_rl.diagnose.record import Diagnosis, Sample
from marble_rl.diagnose.run import analyse
from marble_rl.errors import InputError
from marble_rl.training.harmony import Harmony, harmony

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
    found = products(60, 1.0)
    assert true_cosines(found, signal_intervals(found, K)) == pytest.approx(truth() @ truth().T, abs=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_cosines_of_pure_noise_are_not_told(seed: int) -> None:
    pure = products(10, 1e6, seed)
    signals = signal_intervals(pure, K)
    known = torch.tensor([one is not None and one.low > 0 for one in signals])
    cosines = true_cosines(pure, signals)
    assert known.sum() <= 1
    assert cosines[~known].isnan().all()
    assert cosines[:, ~known].isnan().all()


def test_signals_lie_in_their_intervals_and_no_cosine_is_impossible() -> None:
    inside = 0
    for seed in range(20):
        found = products(20, 3.0, seed)
        signals = signal_intervals(found, K)
        inside += sum(one is not None and one.low <= 0.1 <= one.high for one in signals)
        cosines = true_cosines(found, signals)
        assert (cosines[~cosines.isnan()].abs() <= 1).all()
    assert inside >= 0.9 * 20 * K


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


@pytest.mark.full
def test_with_larger_batches_the_harmony_holds_elsewhere_too() -> None:
    """Noise ten times as long as the signal; at 64 times the size it is hardly longer."""
    small = products(256, 10.0)
    large = merged(small, 64)
    found = [direction_figures(p, marble(p), K) for p in (small, large)]
    assert found[0].rest["conflict"].mean > 0.2
    assert found[1].rest["conflict"].mean == 0.0
    assert found[1].rest["min_cos"].low > found[0].rest["min_cos"].high


def test_the_qp_over_batches() -> None:
    facts = qp_facts(products(10, 0.0), K)
    gram = truth() @ truth().T
    assert facts.norm == pytest.approx([common_direction(gram).norm] * 10)
    assert facts.near_zero == 0.0


def test_batches_without_any_gradient_have_no_program_to_solve() -> None:
    silent = products(10, 0.0)
    silent[2:], silent[:, :, 2:] = 0.0, 0.0
    assert qp_facts(silent, K) == qp_facts(products(2, 0.0), K)
    shares = advantage_facts(silent, torch.eye(K, dtype=torch.float64).expand(10, K, K), K).alpha
    assert sum(share.mean for share in shares) == pytest.approx(1.0)


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


def test_a_reward_lost_in_noise_has_no_signal_at_any_size() -> None:
    """Of opposed gradients |mu|^2 is estimated below 0; more noise taken off that would be a large signal."""
    g = torch.zeros(4, 2, 3, dtype=torch.float64)
    g[:, 0, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert unbiased_products(products_of(g))[0, 0] < 0
    for size in (0.25, 1.0, 2.0, 4.0, 16.0):
        assert signal(products_of(g), 2, size).tolist() == [0.0, 0.0]


def by_hand(found: Tensor, weights: Tensor) -> dict[str, list[Harmony | None]]:
    """Harmony of each batch's direction in its own batch, and with the mean gradient of the others."""
    batches = range(len(found))
    told: dict[str, list[Harmony | None]] = {"in_batch": [], "rest": []}
    for m in batches:
        length = weights[m] @ found[m, :, m] @ weights[m]
        others = [n for n in batches if n != m]
        along = (found[:, :, m] @ weights[m])[:, :K]
        squared = found[others][:, :, others].mean((0, 2)).diagonal()[:K]
        told["in_batch"].append(harmony(along[m], found[m, :, m].diagonal()[:K], length))
        told["rest"].append(harmony(along[others].mean(0), squared, length))
    return told


def sometimes_silent() -> Tensor:
    """[7, 4, P] gradients: the third reward has none in three batches, and the sixth batch none at all."""
    g = gradients(7, 3.0)
    g[1:4, 2] = 0.0
    g[5] = 0.0
    return g


def test_figures_are_means_over_what_is_defined() -> None:
    found = products_of(sometimes_silent())
    figures = direction_figures(found, marble(found), K)
    for way, every in by_hand(found, marble(found)).items():
        told = [one for one in every if one is not None]
        assert len(told) == 6
        for name in FIGURES:
            expected = sum(getattr(one, name) for one in told) / len(told)
            assert getattr(figures, way)[name].mean == pytest.approx(expected, abs=1e-12)


def test_pairs_without_a_cosine_are_left_out() -> None:
    cosines = torch.full((4, 4, 2), 0.5, dtype=torch.float64)
    cosines[:, :, 1] = 0.25
    cosines[0, 1] = torch.tensor([-0.5, torch.nan])
    cosines[3], cosines[:, 3] = torch.nan, torch.nan  # a batch without gradients
    found = independent_figures(cosines)
    assert found["min_cos"].mean == pytest.approx(((-0.5 + 0.25) / 2 + 0.25 + 0.25) / 3)
    assert found["conflict"].mean == pytest.approx(0.5 / 3)
    assert independent_figures(cosines * torch.nan) == {}


# A reward without a gradient, through everything


def measured(g: Tensor, rewards: int) -> Measured:
    """As `measure` would, of plain steps."""
    found = products_of(g)
    moments = torch.eye(rewards, dtype=torch.float64).expand(len(g), rewards, rewards)
    every = directions(found, moments, rewards, torch.full((rewards,), 1 / rewards, dtype=torch.float64))
    steps = {name: torch.einsum("mj,mjp->mp", weights, g) for name, weights in every.items()}
    lengths = g[:, :rewards].norm(dim=2)
    applied = {
        name: torch.einsum("mp,nkp->mnk", step, g[:, :rewards]) / lengths / step.norm(dim=1)[:, None, None]
        for name, step in steps.items()
    }
    names = tuple(f"r{i}" for i in range(rewards))
    samples = [Sample("things", "a marble", [0.5] * rewards)]
    return Measured(names, 8, found, moments, applied, samples, every, None)


def shown(found: Diagnosis, folder: Path) -> str:
    """What is printed of a diagnosis. It is also written and read."""
    text = io.StringIO()
    print_diagnosis(found, Console(width=200, file=text), everything=True)
    found.write(folder / "diagnosis.json")
    assert Diagnosis.read(folder / "diagnosis.json") == found
    return text.getvalue()


def orthogonal(batches: int) -> Tensor:
    """[M, 3, P]: two orthogonal rewards of different length, and their sum."""
    g = torch.zeros(batches, 3, P, dtype=torch.float64)
    g[:, 0, 0], g[:, 1, 1] = 2.0, 1.0
    g[:, 2] = g[:, 0] + g[:, 1]
    return g


def test_averaged_products_of_a_reward_that_is_silent_at_times() -> None:
    """Its unit gradients have length 1 where there are any: orthogonal ones share evenly, as if it always had one."""
    g = orthogonal(6)
    g[::2, 1] = 0.0
    weights = measured(g, 2).directions["mean_gram"]
    assert weights[1].tolist() == pytest.approx([0.5 * 1.5 / 2, 0.5 * 1.5, 0.0])  # alpha times mean length over length
    assert weights[0].tolist() == pytest.approx([0.5, 0.0, 0.0])


def test_a_reward_without_any_gradient(tmp_path: Path) -> None:
    g = orthogonal(6)
    g[:, 1] = 0.0
    found = analyse(measured(g, 2), step=3)
    for name in ("mean_gram", "marble"):
        assert found.directions[name].independent["min_cos"].mean == pytest.approx(1.0)
        applied = found.applied[name].min_cos
        assert applied is not None
        assert applied.mean == pytest.approx(1.0)
        assert found.directions[name].each[1] is None
    assert [found.signal[size][1] for size in found.signal] == [0.0] * len(found.signal)
    assert "mean_gram" in shown(found, tmp_path)
    assert "No gradient at all for r1" in found.answers[0].answer


def test_three_rewards_of_which_one_is_silent_at_times(tmp_path: Path) -> None:
    found = analyse(measured(sometimes_silent(), K), step=3)
    assert all(figures.min_cos for figures in found.applied.values()), "one batch has no gradient"
    assert "marble" in shown(found, tmp_path)


@pytest.mark.parametrize("batches", [0, 1])
def test_next_to_nothing(batches: int, tmp_path: Path) -> None:
    """No gradient in any batch, or in one alone, which cannot be measured in another."""
    g = orthogonal(4)
    g[batches:] = 0.0
    found = analyse(measured(g, 2), step=0)
    assert not found.directions["marble"].independent
    assert bool(found.directions["marble"].in_batch) == bool(batches)
    assert ("\n  marble " in shown(found, tmp_path)) == bool(batches)
    assert found.applied["marble"].min_cos is None


# Answers in words


def answered(batches: int, noise: float) -> list[str]:
    return [one.answer for one in analyse(measured(gradients(batches, noise), K), step=0).answers]


def test_clear_gradients_give_clear_answers() -> None:
    """The truth: the first two rewards agree, the third opposes the first, and next to that the second."""
    enough, opposed, rule = answered(60, 0.5)
    assert enough.startswith("Yes for r0 (")
    assert "cannot" not in enough + opposed
    assert opposed.startswith("r0 / r2, r1 / r2. In agreement: r0 / r1.")
    assert rule.startswith("marble: better than ")
    assert "and serves it (cosine +" in rule


def test_little_signal_names_the_batch_size_that_has_enough() -> None:
    """Noise six times as long as the signal: 1 of 37, and 1 of 10 where noise is a quarter of it."""
    enough, *_ = answered(80, 6.0)
    factors = [int(one) for one in re.findall(r"about (\d)x rollout.groups", enough)]
    assert enough.startswith("Too little for r0")
    assert len(factors) == 3
    assert all(3 <= factor <= 6 for factor in factors)


def test_noise_gets_no_answer_but_a_number_of_batches() -> None:
    at_the_boundary, *_ = answered(5, 3.0)  # 1 of 10
    lost, opposed, rule = answered(5, 20.0)
    assert "Too little for r0 (at most" in lost
    for answer in (at_the_boundary, opposed, rule):
        assert "5 batches cannot tell" in answer
        assert not re.search(r"--batches \d\b", answer), "more than there were"
    assert "No two of them for certain" in opposed


def test_one_reward_has_only_one_question() -> None:
    g = orthogonal(5)[:, [0, 2]]
    assert [one.question for one in analyse(measured(g, 1), step=0).answers] == ["Is there enough signal?"]


# What is measured


def test_room_for_the_gradients(tmp_path: Path) -> None:
    check_space(tmp_path, 3, gradients=5, parameters=100)
    with pytest.raises(InputError, match=rf"--out.*{50 * 7 * 10**15 * 4} bytes.*fewer --batches or another --out"):
        check_space(tmp_path, 50, gradients=7, parameters=10**15)
