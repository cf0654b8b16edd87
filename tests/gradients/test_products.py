"""Products of gradients against dense matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from marble_rl.config.run import OptimizerConfig
from marble_rl.gradients.accumulate import GradientAccumulator, RewardGradients
from marble_rl.gradients.halves import SAMPLED
from marble_rl.gradients.products import gram, products_between, products_of_halves
from marble_rl.models import load_model
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.settings import LoraConfig
from marble_rl.rollout.settings import OldPolicyConfig
from marble_rl.training.loss_scale import unscaled
from marble_rl.training.update import Updater

ROWS, K, P = 9, 3, 40_000  # more parameters than one stretch holds
HALVES = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of every row's slope and base [ROWS, P], and advantages [ROWS, K + 1]."""
    dice = torch.Generator().manual_seed(0)
    slopes, bases = (torch.randn(ROWS, P, generator=dice) for _ in range(2))
    return slopes, bases, torch.randn(ROWS, K + 1, generator=dice)


def accumulated(scale: float = 1.0, halves_on: int = SAMPLED) -> RewardGradients:
    """In micro-batches of 4, on a model that is linear in its parameters."""
    slopes, bases, advantages = batch()
    weights = torch.zeros(P, requires_grad=True)
    accumulator = GradientAccumulator(K + 1, [weights], "passes", halves_on=halves_on)
    for rows in torch.arange(ROWS).split(4):
        slope, base = (scale * (part[rows] @ weights) for part in (slopes, bases))
        accumulator.add(slope, base, advantages[rows], HALVES[rows])
    return unscaled(accumulator.finish(), scale)


def dense() -> dict[str, np.ndarray]:
    """The same by numpy, from whole float64 matrices and nothing else."""
    slopes, _, advantages = (part.double().numpy() for part in batch())
    g = advantages.T @ slopes / ROWS
    halves = [HALVES.eq(h).numpy() for h in (0, 1)]
    h1, h2 = (advantages[half].T @ slopes[half] / half.sum() for half in halves)
    sampled = P / len(range(0, P, SAMPLED))
    half_gram = np.array([[a[:, ::SAMPLED] @ b[:, ::SAMPLED].T for b in (h1, h2)] for a in (h1, h2)]) * sampled
    return {"gram": g @ g.T, "half_gram": half_gram}


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_products_are_those_of_dense_matrices(scale: float) -> None:
    found, expected = accumulated(scale).products, dense()
    for name, value in vars(found).items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, torch.as_tensor(expected[name]), rtol=1e-5, atol=1e-5 * expected[name].max())


def test_without_halves_gradients_and_products_are_the_same() -> None:
    apart, together = accumulated(), accumulated(halves_on=0)
    for name in ("g", "shared", "norms", "gram"):
        torch.testing.assert_close(getattr(together, name), getattr(apart, name), rtol=1e-5, atol=1e-6)
    assert together.half_gram is None
    assert apart.half_gram is not None


def test_products_between_two_sets_of_rows() -> None:
    g = batch()[0]
    wanted = g[:2].double() @ g[2:5].double().T
    torch.testing.assert_close(products_between(g[:2], g[2:5]), wanted)
    torch.testing.assert_close(gram(g), products_between(g, g))
    g = g.double()  # a sum of two halves is rounded in float32
    found = products_of_halves(g[:2], g[:2] + g[2:4])[0, 1]
    torch.testing.assert_close(found, products_between(g[:2], g[2:4]))


def test_the_preconditioner_is_what_adamw_divides_by(tiny_sd3: Path) -> None:
    model = load_model(str(tiny_sd3), torch.device("cpu"))
    policy = LoraPolicy(model.transformer, LoraConfig(rank=2), model.lora_targets, seed=0)
    config = OptimizerConfig(lr=1e-2, betas=(0.9, 0.99), grad_clip=1e9)
    updater = Updater(policy, config, OldPolicyConfig(), steps=10)
    dice, v = torch.Generator().manual_seed(0), np.zeros(policy.flat.numel())
    for step in range(4):
        gradient = torch.randn(policy.flat.shape, generator=dice) * 10.0**-step
        gradient[::7] = 0.0
        before = {key: value.clone() for key, value in updater.optimizer_tensors().items()} if step else {}
        found = updater.preconditioner(gradient)
        v = 0.99 * v + 0.01 * gradient.double().numpy() ** 2
        expected = np.sqrt(v / (1 - 0.99 ** (step + 1))) + 1e-8
        torch.testing.assert_close(found.double(), torch.as_tensor(expected), rtol=1e-5, atol=0)
        assert (found > 0).all()
        assert all(torch.equal(value, updater.optimizer_tensors()[key]) for key, value in before.items())
        updater.apply(gradient, 0.0, step)
