"""Products in the optimizer's metric against dense matrices, and what training makes of them (docs/method.md, 7)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from marble_rl.balancing.direction import common_direction
from marble_rl.balancing.marble import Marble, MarbleSettings
from marble_rl.config.run import OptimizerConfig
from marble_rl.gradients.accumulate import GradientAccumulator, RewardGradients
from marble_rl.gradients.metric import Metric, gram, half_products
from marble_rl.models import load_model
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.settings import LoraConfig
from marble_rl.rollout.settings import OldPolicyConfig
from marble_rl.training.harmony import Signal
from marble_rl.training.loss_scale import unscaled
from marble_rl.training.metrics import refresh_metrics
from marble_rl.training.update import Updater
from reference import cosine

ROWS, K, P = 9, 3, 40_000  # more parameters than one stretch holds
BEFORE = 10.0 ** torch.linspace(-9, 2, P)  # second moments
HALVES = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1, 0])


def diagonal(size: Tensor) -> Tensor:
    return (0.9 * BEFORE + 0.1 * size**2).sqrt() + 1e-8


METRIC = Metric(K, diagonal)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of every row's slope and base [ROWS, P], and advantages [ROWS, K + 1]."""
    dice = torch.Generator().manual_seed(0)
    slopes, bases = (torch.randn(ROWS, P, generator=dice) for _ in range(2))
    return slopes, bases, torch.randn(ROWS, K + 1, generator=dice)


def accumulated(scale: float = 1.0, metric: Metric | None = METRIC) -> RewardGradients:
    """In micro-batches of 4, on a model that is linear in its parameters."""
    slopes, bases, advantages = batch()
    weights = torch.zeros(P, requires_grad=True)
    accumulator = GradientAccumulator(K + 1, [weights], "passes")
    for rows in torch.arange(ROWS).split(4):
        slope, base = (scale * (part[rows] @ weights) for part in (slopes, bases))
        accumulator.add(slope, base, advantages[rows], HALVES[rows])
    return unscaled(accumulator.finish(metric and metric.of_scaled(scale)), scale)


def dense() -> dict[str, np.ndarray]:
    """The same by numpy, from whole float64 matrices and nothing else."""
    slopes, bases, advantages = (part.double().numpy() for part in batch())
    g, shared = advantages.T @ slopes / ROWS, bases.mean(0)
    size = np.sqrt((g[:K] ** 2).sum(0) / K + shared**2)
    inverse = 1 / (np.sqrt(0.9 * BEFORE.double().numpy() + 0.1 * size**2) + 1e-8)
    halves = [HALVES.eq(h).numpy() for h in (0, 1)]
    h1, h2 = (advantages[half].T @ slopes[half] / half.sum() for half in halves)
    half_gram = np.array([[(a * inverse) @ b.T for b in (h1, h2)] for a in (h1, h2)])
    cross = (half_gram[0, 1] + half_gram[1, 0]) / 2
    return {"gram": (g * inverse) @ g.T, "cross": cross, "half_gram": half_gram, "g": g}


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_products_are_those_of_dense_matrices(scale: float) -> None:
    found, expected = accumulated(scale).in_metric, dense()
    assert found is not None
    for name, value in vars(found).items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, torch.as_tensor(expected[name]), rtol=1e-5, atol=1e-5 * expected[name].max())


def test_nothing_else_changes() -> None:
    plain, found = accumulated(metric=None), accumulated()
    assert plain.in_metric is None
    for name in ("g", "shared", "norms", "gram", "cross", "half_gram"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


@pytest.mark.parametrize("value", [2.0**-40, 1.0, 2.0**60])
def test_a_constant_diagonal_is_the_euclidean_rule_exactly(value: float) -> None:
    """Powers of 4, whose square roots divide without rounding."""
    g = batch()[0][:5]
    same = torch.full((P,), value)
    torch.testing.assert_close(gram(g, same) * value, gram(g), rtol=0, atol=0)
    torch.testing.assert_close(
        half_products(g, g[[4, 3, 2, 1, 0]], same) * value, half_products(g, g.flip(0)), rtol=0, atol=0
    )
    ours, plain = common_direction(gram(g, same)), common_direction(gram(g))
    assert torch.equal(ours.weights, plain.weights)
    assert torch.equal(ours.alpha, plain.alpha)


def test_weights_are_rescaled_by_lengths_in_the_metric() -> None:
    g, p = dense()["g"][:K], diagonal(torch.zeros(P))
    lengths = torch.as_tensor(np.sqrt(((g**2) / p.double().numpy()).sum(1)))
    found = common_direction(gram(torch.as_tensor(g), p))
    torch.testing.assert_close(found.weights, found.alpha * lengths.mean() / lengths)


def test_the_log_tells_both_metrics_apart() -> None:
    """The direction is made in the metric; cosines are told in the plain products and in those of the metric."""
    found = accumulated()
    assert found.in_metric is not None
    names = ("a", "b", "c")
    rule = Marble(MarbleSettings(metric="adam"), names, adv_clip=5.0, seed=0)
    made = rule.weigh(0, found.first(K))
    assert found.half_gram is not None
    signal = Signal.unknown(K).after(found.gram[:K, :K], found.half_gram[:, :, :K, :K])
    logged = refresh_metrics(names, found, made, signal, rule.weights_for)
    assert logged["metric_harmony/min_cos"] == pytest.approx(logged["qp/norm"], rel=1e-9)

    expected = dense()
    d = made.weights.numpy() @ expected["g"][:K]
    assert logged["harmony/min_cos"] == pytest.approx(min(cosine(d, g) for g in expected["g"][:K]), rel=1e-4)
    g = expected["g"]
    assert logged["ws_harmony/mean_cos"] == pytest.approx(np.mean([cosine(g[K], one) for one in g[:K]]), rel=1e-3)
    halves = found.in_metric.half_gram
    assert halves is not None
    cosines = []
    for one, other in ((0, 1), (1, 0)):
        w = common_direction(halves[one, one, :K, :K]).weights
        lengths = (halves[other, other, :K, :K].diagonal() * (w @ halves[one, one, :K, :K] @ w)).sqrt()
        cosines.append(float((halves[other, one, :K, :K] @ w / lengths).min()))
    assert logged["metric_heldout/min_cos"] == pytest.approx(np.mean(cosines), rel=1e-9)

    plain = refresh_metrics(names, replace(found, in_metric=None), made, signal, rule.weights_for)
    assert {key.replace("metric_", "") for key in logged} == plain.keys()
    for key in ("grad_norm/a", "signal/b", "ws_harmony/min_cos", "ws_heldout/min_cos"):
        assert logged[key] == plain[key]


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
