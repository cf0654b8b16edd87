"""Advantage-weighted flow matching against its formula (docs/method.md, section 3)."""

from __future__ import annotations

import pytest
import torch

from marble_rl.losses.awm import Awm, AwmSettings
from marble_rl.losses.base import Noised

SHAPES = [(3, 2, 4, 4), (2, 2, 3, 4, 4)]


def noised(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Noised]:
    dice = torch.Generator().manual_seed(0)
    v_theta, x0, noise = (torch.randn(shape, generator=dice).to(dtype) for _ in range(3))
    t = torch.rand(shape[0], generator=dice)
    weight = t.reshape(-1, *[1] * (len(shape) - 1)).to(dtype)
    return v_theta, Noised(x0, noise, (1 - weight) * x0 + weight * noise, t)


@pytest.mark.parametrize("shape", SHAPES, ids=["image", "video"])
def test_the_slope_is_the_flow_matching_error_and_base_is_zero(shape: tuple[int, ...]) -> None:
    v_theta, sample = noised(shape)
    loss = Awm(AwmSettings(type="awm")).terms(v_theta, None, sample)
    expected = [
        float(sum((v - (e - x)) ** 2 for v, e, x in zip(*map(torch.Tensor.flatten, row), strict=True)) / row[0].numel())
        for row in zip(v_theta.double(), sample.noise.double(), sample.x0.double(), strict=True)
    ]
    assert loss.slope.tolist() == pytest.approx(expected, rel=1e-5)
    assert loss.base.tolist() == [0.0] * shape[0]


def test_the_gradient_is_the_advantage_times_the_error() -> None:
    """d l(A) / d v = 2 A (v - (e - x0)) / pixels"""
    v_theta, sample = noised(SHAPES[0])
    v_theta.requires_grad_()
    loss = Awm(AwmSettings(type="awm")).terms(v_theta, None, sample)
    advantage = torch.tensor([2.0, 0.0, -1.5])
    (gradient,) = torch.autograd.grad((loss.base + advantage * loss.slope).sum(), v_theta)
    pixels = v_theta[0].numel()
    expected = 2 * advantage[:, None, None, None] * (v_theta.detach() - (sample.noise - sample.x0)) / pixels
    torch.testing.assert_close(gradient, expected)
    assert (gradient[1] == 0).all()


def test_half_precision_predictions_are_compared_in_float32() -> None:
    v_theta, sample = noised(SHAPES[0], torch.bfloat16)
    assert Awm(AwmSettings(type="awm")).terms(v_theta, None, sample).slope.dtype == torch.float32


def test_it_needs_neither_the_old_policy_nor_a_pass_for_base() -> None:
    loss = Awm(AwmSettings(type="awm"))
    for on_policy in (True, False):
        assert not loss.needs_old(on_policy)
        assert not loss.base_has_gradient(on_policy)


def test_it_trains_on_the_first_part_of_the_noise_levels() -> None:
    sigmas = torch.linspace(1, 0, 11)
    assert torch.equal(Awm(AwmSettings(type="awm", timestep_fraction=0.5)).levels(sigmas), sigmas[:5])
    assert torch.equal(Awm(AwmSettings(type="awm", timestep_fraction=0.01)).levels(sigmas), sigmas[:1])
