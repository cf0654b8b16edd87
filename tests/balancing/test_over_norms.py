"""``Harmonizer(apply="alpha_over_norm")``: between refreshes, coefficients over cached gradient norms."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from marble_rl import Harmonizer
from marble_rl.balancing.harmonizer import MAX_BOOST

K = 4


def build(**settings: object) -> Harmonizer:
    return Harmonizer([f"r{i}" for i in range(K)], apply="alpha_over_norm", **settings)  # type: ignore[arg-type]


def gradients(seed: int, lengths: tuple[float, ...] = (3.0, 1.0, 0.2, 1.0)) -> Tensor:
    """[K, 6] float64 that agree a little."""
    g = torch.randn(K, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.4
    return g / g.norm(dim=1, keepdim=True) * torch.tensor(lengths, dtype=torch.float64)[:, None]


def test_the_combination_has_the_direction_that_was_meant() -> None:
    g = gradients(2)
    harmonizer = build()
    alpha_bar = harmonizer.refresh(g @ g.T).alpha_bar
    norms = g.norm(dim=1)
    torch.testing.assert_close(harmonizer.applied() @ g, alpha_bar @ (g / norms[:, None]) * norms.mean())
    advantages = torch.randn(7, K, generator=torch.Generator().manual_seed(0)) * 4
    expected = advantages.clamp(-5, 5) @ harmonizer.applied().float()
    torch.testing.assert_close(harmonizer.combine(advantages), expected)


def test_a_vanishing_gradient_is_not_blown_up() -> None:
    g = gradients(2, lengths=(1.0, 1.0, 1e-9, 1.0))
    harmonizer = build()
    alpha_bar = harmonizer.refresh(g @ g.T).alpha_bar
    assert harmonizer.applied()[2] == MAX_BOOST * alpha_bar[2]
    g[2] = 0.0
    harmonizer.refresh(g @ g.T)
    assert torch.isfinite(harmonizer.applied()).all()


def test_before_the_first_refresh_and_in_the_uniform_stage_coefficients_are_equal() -> None:
    harmonizer = build(uniform_after=5)
    assert harmonizer.applied(0).tolist() == [1 / K] * K
    g = gradients(2)
    harmonizer.refresh(g @ g.T)
    assert harmonizer.applied(4).tolist() != harmonizer.alpha_bar.tolist()
    assert harmonizer.applied(5).tolist() == [1 / K] * K


def test_norms_are_part_of_the_state() -> None:
    first, second = build(), build()
    g = gradients(2)
    g[1] = 0.0
    first.refresh(g @ g.T)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert torch.equal(second.applied(), first.applied())


def test_a_state_without_norms_is_that_of_an_older_version() -> None:
    harmonizer = build()
    harmonizer.load_state_dict({"rewards": list(harmonizer.rewards), "alpha_bar": [0.4, 0.3, 0.2, 0.1]})
    assert harmonizer.applied().tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])
