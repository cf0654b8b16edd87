"""What the Harmonizer can do beyond the paper: averaged products, division by norms, the noise-aware problem."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from marble_rl.balancing.noise_aware import noise_aware
from scipy.optimize import minimize
from torch import Tensor

from marble_rl import Harmonizer, min_norm
from marble_rl.balancing.averaging import nearest_gram
from marble_rl.balancing.harmonizer import MAX_BOOST, Coefficients

K = 4


def build(**settings: object) -> Harmonizer:
    return Harmonizer([f"r{i}" for i in range(K)], **settings)  # type: ignore[arg-type]


def gradients(seed: int, lengths: tuple[float, ...] = (3.0, 1.0, 0.2, 1.0)) -> Tensor:
    """[K, 6] float64 that agree a little."""
    g = torch.randn(K, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.4
    return g / g.norm(dim=1, keepdim=True) * torch.tensor(lengths, dtype=torch.float64)[:, None]


def unit(g: Tensor) -> Tensor:
    return g / g.norm(dim=1, keepdim=True)


# smooth="gram"


def test_the_first_refresh_is_the_papers() -> None:
    g = gradients(0)
    ours, paper = build(smooth="gram").refresh(g @ g.T), build().refresh(g @ g.T)
    torch.testing.assert_close(ours.alpha, paper.alpha)
    torch.testing.assert_close(ours.weights, paper.weights)
    torch.testing.assert_close(ours.alpha_bar, ours.alpha)


def test_products_are_averaged_then_the_problem_is_solved() -> None:
    harmonizer = build(smooth="gram", ema_decay=0.6)
    mean = None
    for seed in range(5):
        g = gradients(seed)
        gram = unit(g) @ unit(g).T
        mean = gram if mean is None else 0.6 * mean + 0.4 * gram
        found = harmonizer.refresh(g @ g.T)
        torch.testing.assert_close(found.alpha, min_norm(mean).alpha)
        norms = g.norm(dim=1)
        torch.testing.assert_close(found.weights, found.alpha * norms.mean() / norms)


def test_a_reward_without_gradient_keeps_what_is_known_of_it() -> None:
    harmonizer = build(smooth="gram")
    g = gradients(1)
    before = harmonizer.refresh(g @ g.T).alpha_bar
    g[2] = 0.0
    found = harmonizer.refresh(g @ g.T)
    assert found.active.tolist() == [True, True, False, True]
    assert found.weights[2] == 0
    torch.testing.assert_close(found.alpha_bar, before)  # the others repeated what they had shown


def test_a_reward_that_never_had_a_gradient_keeps_its_share() -> None:
    g = gradients(1)
    g[0] = 0.0
    found = build(smooth="gram").refresh(g @ g.T)
    assert found.alpha_bar[0].item() == pytest.approx(1 / K)
    assert found.alpha_bar.sum().item() == pytest.approx(1.0)
    nothing = build(smooth="gram").refresh(torch.zeros(K, K))
    assert nothing.alpha_bar.tolist() == [1 / K] * K
    assert (nothing.weights == 0).all()


def test_opposed_rewards_are_stationary() -> None:
    g = gradients(1)
    g[1:] = -g[0]
    found = build(smooth="gram").refresh(g @ g.T)
    assert found.stationary
    assert (found.weights == 0).all()
    assert found.alpha_bar.tolist() == [1 / K] * K


def seen_in_turn(cosine: float, **settings: object) -> Coefficients:
    """The first of three rewards is seen with the second, then with the third: averages [[1, c, c], [c, 1, 0],
    [c, 0, 1]], which no gradients have for |c| above 0.71."""
    harmonizer = Harmonizer(["a", "b", "c"], smooth="gram", **settings)  # type: ignore[arg-type]
    for silent in (2, 1):
        gram = torch.tensor([[1.0, cosine, cosine], [cosine, 1.0, 0.0], [cosine, 0.0, 1.0]], dtype=torch.float64)
        gram[silent], gram[:, silent] = 0.0, 0.0
        found = harmonizer.refresh(gram, 0.5 * gram)
    return found


@pytest.mark.parametrize("solver", ["min_norm", "noise_aware"])
@pytest.mark.parametrize("cosine", [0.8, -0.8])
def test_averages_that_no_gradients_have(cosine: float, solver: str) -> None:
    found = seen_in_turn(cosine, solver=solver)
    assert not found.stationary
    assert found.weights.sum() > 0
    assert torch.isfinite(found.weights).all()
    assert (found.alpha_bar >= 0).all()
    assert found.alpha_bar.sum().item() == pytest.approx(1.0)
    assert found.alpha_bar[1].item() == pytest.approx(found.alpha_bar[2].item())


def test_opposed_averages_leave_the_mix_that_opposes_least() -> None:
    """By hand: (sqrt 2, 1, 1) is the eigenvector of 1 - 0.8 sqrt 2, the one below 0."""
    found = seen_in_turn(-0.8)
    share = 2 + 2**0.5
    assert found.alpha_bar.tolist() == pytest.approx([2**0.5 / share, 1 / share, 1 / share])
    assert found.norm == pytest.approx(0.0, abs=1e-6)


def test_the_nearest_gram_matrix() -> None:
    fine = unit(gradients(4)) @ unit(gradients(4)).T
    assert nearest_gram(fine) is fine
    singular = torch.ones(3, 3, dtype=torch.float64)
    assert nearest_gram(singular) is singular
    indefinite = torch.tensor([[1.0, 0.8, 0.8], [0.8, 1.0, 0.0], [0.8, 0.0, 1.0]], dtype=torch.float64)
    found = nearest_gram(indefinite)
    v = torch.tensor([-(2**0.5), 1.0, 1.0], dtype=torch.float64) / 2  # of the eigenvalue below 0
    torch.testing.assert_close(found, indefinite - (1 - 0.8 * 2**0.5) * torch.outer(v, v))
    assert torch.linalg.eigvalsh(found)[0] > -1e-12


# apply="alpha_over_norm"


def test_the_combination_between_refreshes_has_the_direction_that_was_meant() -> None:
    g = gradients(2)
    harmonizer = build(apply="alpha_over_norm")
    alpha_bar = harmonizer.refresh(g @ g.T).alpha_bar
    meant = alpha_bar @ unit(g) * g.norm(dim=1).mean()
    torch.testing.assert_close(harmonizer.applied @ g, meant)
    advantages = torch.randn(7, K, generator=torch.Generator().manual_seed(0)) * 4
    expected = advantages.clamp(-5, 5) @ harmonizer.applied.float()
    torch.testing.assert_close(harmonizer.combine(advantages), expected)


def test_a_vanishing_gradient_is_not_blown_up() -> None:
    g = gradients(2, lengths=(1.0, 1.0, 1e-9, 1.0))
    harmonizer = build(apply="alpha_over_norm")
    alpha_bar = harmonizer.refresh(g @ g.T).alpha_bar
    assert harmonizer.applied[2] == MAX_BOOST * alpha_bar[2]
    g[2] = 0.0
    harmonizer.refresh(g @ g.T)
    assert torch.isfinite(harmonizer.applied).all()


def test_before_the_first_refresh_and_in_the_uniform_stage_there_are_no_norms() -> None:
    harmonizer = build(apply="alpha_over_norm", uniform_after=5)
    assert harmonizer.applied.tolist() == [1 / K] * K
    g = gradients(2)
    harmonizer.refresh(g @ g.T)
    assert harmonizer.applied.tolist() != harmonizer.alpha_bar.tolist()
    harmonizer.should_refresh(5)
    assert harmonizer.applied.tolist() == [1 / K] * K


# solver="equal"


def test_equal_shares_are_the_mean_of_the_unit_gradients() -> None:
    g = gradients(3)
    found = build(solver="equal").refresh(g @ g.T)
    torch.testing.assert_close(found.weights @ g, unit(g).mean(0) * g.norm(dim=1).mean())
    assert found.norm == pytest.approx(float(unit(g).mean(0).norm()))
    assert found.norm > min_norm(unit(g) @ unit(g).T).norm
    assert found.kkt_residual > 0
    torch.testing.assert_close(found.alpha_bar, torch.full((K,), 1 / K, dtype=torch.float64))


def test_equal_shares_leave_out_a_reward_without_gradient() -> None:
    g = gradients(3)
    g[1] = 0.0
    found = build(solver="equal").refresh(g @ g.T)
    third = torch.tensor([1 / 3, 0.0, 1 / 3, 1 / 3], dtype=torch.float64)
    torch.testing.assert_close(found.alpha, third)
    torch.testing.assert_close(found.alpha_bar, torch.full((K,), 1 / K, dtype=torch.float64))
    assert not build(solver="equal").refresh(0 * g @ g.T).weights.any()


# solver="noise_aware"


def by_slsqp(g: Tensor, m: Tensor) -> np.ndarray:
    signal = m.diagonal() > 0
    rows, bound = m[signal].numpy(), m.diagonal()[signal].sqrt().numpy()
    found = minimize(
        lambda w: w @ g.numpy() @ w,
        np.ones(K) * 10,
        jac=lambda w: 2 * g.numpy() @ w,
        bounds=[(0, None)] * K,
        constraints={"type": "ineq", "fun": lambda w: rows @ w - bound, "jac": lambda w: rows},
        options={"maxiter": 1000, "ftol": 1e-14},
    )
    assert (rows @ found.x >= bound - 1e-6).all()  # its status may complain of rounding at the optimum
    return found.x


@pytest.mark.parametrize("seed", range(8))
def test_without_noise_it_is_the_min_norm_point(seed: int) -> None:
    g = unit(gradients(seed))
    w = noise_aware(g @ g.T, g @ g.T)
    assert w is not None
    torch.testing.assert_close(w / w.sum(), min_norm(g @ g.T).alpha, atol=1e-6, rtol=0)
    harmonizer = build(solver="noise_aware", smooth="gram")
    raw = gradients(seed)
    found, paper = harmonizer.refresh(raw @ raw.T, raw @ raw.T), build().refresh(raw @ raw.T)
    torch.testing.assert_close(found.weights, paper.weights, atol=1e-6, rtol=1e-5)
    assert not found.fallback


@pytest.mark.parametrize("seed", range(12))
def test_against_a_general_solver(seed: int) -> None:
    g = unit(gradients(seed))
    noise = torch.randn(K, K, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + seed))
    m = 0.4 * g @ g.T + 0.05 * (noise + noise.T)
    w = noise_aware(g @ g.T, m)
    assert w is not None
    expected = by_slsqp(g @ g.T, m)
    gram = (g @ g.T).numpy()
    assert w.numpy() @ gram @ w.numpy() == pytest.approx(expected @ gram @ expected, rel=1e-5)
    assert (w >= 0).all()
    assert (m @ w >= m.diagonal().sqrt() - 1e-6).all()


def test_a_contradiction_falls_back_to_the_plain_problem() -> None:
    """Two rewards whose true gradients oppose each other: nothing makes progress on both."""
    g = gradients(3)
    m = torch.eye(K, dtype=torch.float64)
    m[0, 1] = m[1, 0] = -1.0
    assert noise_aware(unit(g) @ unit(g).T, m) is None
    scale = g.norm(dim=1)
    found = build(solver="noise_aware", smooth="gram").refresh(g @ g.T, m * scale[:, None] * scale)
    assert found.fallback
    torch.testing.assert_close(found.weights, build().refresh(g @ g.T).weights)


def test_no_signal_and_no_halves_fall_back() -> None:
    g = gradients(3)
    assert noise_aware(g @ g.T, -torch.eye(K)) is None
    found = build(solver="noise_aware", smooth="gram").refresh(g @ g.T, None)
    assert found.fallback


# Around


@pytest.mark.parametrize(
    "settings",
    [
        {"smooth": "gram"},
        {"apply": "alpha_over_norm"},
        {"smooth": "gram", "solver": "noise_aware", "apply": "alpha_over_norm"},
    ],
)
def test_state_continues(settings: dict[str, str]) -> None:
    """Through JSON, as checkpoints store it, also while some reward has not been seen."""
    whole, first, second = (build(**settings) for _ in range(3))
    batches = [gradients(seed) for seed in range(6)]
    for g in batches[:3]:
        g[1] = 0.0
    for g in batches[:3]:
        whole.refresh(g @ g.T, 0.5 * g @ g.T)
        first.refresh(g @ g.T, 0.5 * g @ g.T)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for g in batches[3:]:
        a, b = whole.refresh(g @ g.T, 0.5 * g @ g.T), second.refresh(g @ g.T, 0.5 * g @ g.T)
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(whole.applied, second.applied)


@pytest.mark.parametrize("settings", [{}, {"smooth": "gram"}])
def test_weights_for_another_batch_teach_nothing(settings: dict[str, str]) -> None:
    harmonizer = build(**settings)
    g = gradients(0)
    found = harmonizer.refresh(g @ g.T)
    before = json.dumps(harmonizer.state_dict())
    torch.testing.assert_close(harmonizer.weights_for(g @ g.T), found.weights)
    harmonizer.weights_for(gradients(1) @ gradients(1).T)
    assert json.dumps(harmonizer.state_dict()) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "noise_aware"}, "smooth 'gram'"),
        ({"solver": "equal", "smooth": "gram"}, "smooth 'alpha'"),
        ({"normalize": False, "smooth": "gram"}, "ablation"),
        ({"normalize": False, "apply": "alpha_over_norm"}, "ablation"),
        ({"smooth": "beta"}, "'alpha', 'gram'"),
        ({"apply": "beta"}, "alpha_over_norm"),
        ({"solver": "beta"}, "noise_aware"),
    ],
)
def test_contradictions(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**settings)
