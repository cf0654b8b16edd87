"""Guards in the rules, and in a closed loop: rates follow the level, the rule follows the rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from marble_rl import FairHarmonizer
from marble_rl.balancing.base import Guarding
from marble_rl.balancing.fair import Fair, FairSettings
from marble_rl.balancing.fixed import Fixed, FixedSettings
from marble_rl.balancing.guards import MATERIAL
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.gradients.products import gram
from marble_rl.rewards.core.settings import GuardConfig
from marble_rl.training.base_images import Reading
from marble_rl.training.floors import PATIENCE, Floors

NAMES = ("ocr", "clip", "plain")
KINDS = ["fair", pytest.param("fixed", marks=pytest.mark.full)]


def batch(seed: int, rewards: int = 3, size: int = 40) -> Tensor:
    return torch.randn(rewards, size, generator=torch.Generator().manual_seed(seed)) + 0.3


def as_gradients(g: Tensor) -> RewardGradients:
    products = gram(g)
    return RewardGradients(g, torch.zeros(g.shape[1]), products.diagonal().sqrt(), products, None, None)


def rule(kind: str, names: Sequence[str] = NAMES, guards: Sequence[str] = ("plain",)) -> Guarding:
    if kind == "fair":
        return Fair(FairSettings(type="fair"), names, adv_clip=5.0, seed=0, guards=guards)
    return Fixed(FixedSettings(type="fixed"), names, adv_clip=5.0, seed=0, guards=guards)


def test_a_free_guard_changes_nothing() -> None:
    alone, guarded = FairHarmonizer(NAMES[:2]), FairHarmonizer(NAMES, guards=["plain"])
    for seed in range(4):
        g = batch(seed)
        without = alone.update(g[:2])
        for rates in (None, {}, {"plain": -1.0}):
            weights = guarded.weigh(g, rates=rates).weights
            torch.testing.assert_close(weights, torch.cat([without.weights, torch.zeros(1).double()]))
        guarded.commit(g)


def test_a_guard_at_its_floor_does_not_fall() -> None:
    """Against the momenta, which is what the rule sees; written out in the space of the vectors."""
    fair = FairHarmonizer(NAMES, guards=["plain"], stored_as=torch.float32)
    m = torch.zeros(3, 40, dtype=torch.float64)
    for seed in range(5):
        g = batch(seed)
        g[2] = -g[0] - g[1] + 0.2 * batch(seed + 100)[2]
        m = 0.9 * m + 0.1 * g.double()
        result = fair.update(g, {"plain": 0.0})
    unit = m / m.norm(dim=1, keepdim=True)
    assert result.pull is not None
    direction = result.shares @ unit + 2**0.5 * result.pull.multipliers @ unit
    assert float(result.shares @ unit @ unit[2]) < -0.5
    assert float(direction @ unit[2]) == pytest.approx(0.0, abs=0.02)
    torch.testing.assert_close(result.progress, unit @ direction, rtol=1e-5, atol=1e-5)
    norms, mean = m.norm(dim=1), m[:2].norm(dim=1).mean()
    weight = result.pull.multipliers[2] * 2**0.5 * mean / norms[2] / 2
    assert float(result.weights[2]) == pytest.approx(float(weight), rel=1e-5)


def test_a_guard_recovers_where_the_objectives_cancel() -> None:
    for kind in ("fair", "fixed"):
        g = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        weighing = rule(kind).weigh(0, as_gradients(g), {"plain": 0.5})
        update = weighing.weights.float() @ g
        assert float(update @ g[2]) > 0.1, kind
        assert weighing.figures["floor/plain/slack"] < MATERIAL


def test_fixed_with_a_guard_keeps_its_coefficients_and_adds_to_them() -> None:
    fixed = rule("fixed")
    g = batch(0)
    free = fixed.weigh(0, as_gradients(g), {"plain": -1.0})
    assert free.weights.tolist() == [0.5, 0.5, 0.0]
    pulled = fixed.weigh(0, as_gradients(torch.stack([g[0], g[1], -g[0] - g[1]])), {"plain": 0.0})
    assert pulled.weights[:2].tolist() == [0.5, 0.5]
    # The guard opposes them exactly: at its floor nothing is left of the step but the slack of 1 %.
    step = pulled.weights @ torch.stack([g[0], g[1], -g[0] - g[1]]).double()
    assert float(step.norm()) < 0.02 * float((g[0] + g[1]).norm())


def test_fixed_without_guards_asks_for_no_gradients_and_keeps_nothing() -> None:
    plain = Fixed(FixedSettings(type="fixed"), NAMES, adv_clip=5.0, seed=0)
    assert not plain.needs_gradients(0)
    plain.commit(None)
    assert plain.tensors() == {}
    assert rule("fixed").needs_gradients(0)


@pytest.mark.parametrize("kind", ["fair", "fixed"])
def test_weighing_changes_nothing_and_momenta_are_restored(kind: str) -> None:
    first, second = rule(kind), rule(kind)
    for seed in range(3):
        first.weigh(seed, as_gradients(batch(seed + 50)), {"plain": 0.5})
        first.commit(first.weigh(seed, as_gradients(batch(seed)), {"plain": 0.1}).state)
    second.load_tensors({name: tensor.clone() for name, tensor in first.tensors().items()})
    weights = [one.weigh(3, as_gradients(batch(9)), {"plain": 0.2}).weights for one in (first, second)]
    assert torch.equal(*weights)


def test_names_that_are_no_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="guards names"):
        FairHarmonizer(NAMES, guards=["nobody"])


class World:
    """Rewards with known gradients on a point theta, trained by plain steps. Objectives a and b pull theta_0 up to 3
    and bring their own coordinates to 1; guards are linear in theta_0."""

    def __init__(self, guards: Mapping[str, tuple[float, GuardConfig]], kind: str = "fair", noise: float = 0.0) -> None:
        self.slopes = {name: slope for name, (slope, _) in guards.items()}
        self.floors = Floors({name: config for name, (_, config) in guards.items()})
        self.rule = rule(kind, ("a", "b", *guards), tuple(guards))
        self.theta = torch.zeros(6, dtype=torch.float64)
        self.noise, self.random = noise, torch.Generator().manual_seed(0)
        self.messages: list[str] = []

    def gradients(self) -> Tensor:
        """[K, 6]: of the losses, minus the rewards."""
        rows = []
        for coordinate in (1, 2):
            target = torch.zeros(6, dtype=torch.float64)
            target[0], target[coordinate] = 3.0, 1.0
            mask = torch.zeros(6, dtype=torch.float64)
            mask[0] = mask[coordinate] = 1.0
            rows.append((self.theta - target) * mask)
        for slope in self.slopes.values():
            rows.append(torch.tensor([-slope, 0, 0, 0, 0, 0], dtype=torch.float64))
        g = torch.stack(rows)
        return g + self.noise * torch.randn(g.shape, generator=self.random, dtype=torch.float64)

    def step(self, number: int) -> dict[str, float]:
        readings = {}
        for name, slope in self.slopes.items():
            scatter = self.noise * float(torch.randn((), generator=self.random)) / 5
            readings[name] = Reading(slope * float(self.theta[0]) + scatter, 1.0, 1)
        levels = self.floors.after(readings)
        weighing = self.rule.weigh(number, as_gradients(self.gradients().float()), levels.rates)
        self.theta -= 0.05 * weighing.weights @ self.gradients()
        self.rule.commit(weighing.state)
        message = self.floors.commit(levels, weighing.figures)
        self.messages += [] if message is None else [message]
        return weighing.figures

    def run(self, steps: int = 600) -> dict[str, float]:
        for number in range(steps):
            figures = self.step(number)
        return figures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
@pytest.mark.parametrize("floor", [0.0, *(pytest.param(floor, marks=pytest.mark.full) for floor in (-1.0, -2.0))])
def test_a_guard_that_is_pushed_down_settles_at_its_floor(kind: str, noise: float, floor: float) -> None:
    free = World({}, kind, noise)
    free.run()
    assert float(free.theta[0]) > 2.5
    world = World({"guard": (-1.0, GuardConfig(floor=floor, band=0.2))}, kind, noise)
    figures = world.run()
    assert float(-world.theta[0]) == pytest.approx(floor, abs=0.25)
    assert figures["floor/guard/lambda"] > 0.05
    assert not world.messages
    torch.testing.assert_close(world.theta[1:3], torch.ones(2).double(), rtol=0.4, atol=0.4)


@pytest.mark.parametrize("kind", KINDS)
def test_above_its_band_a_guard_is_free(kind: str) -> None:
    free, guarded = World({}, kind), World({"guard": (-1.0, GuardConfig(floor=-9.0, band=0.5))}, kind)
    free.run(300)
    guarded.run(300)
    torch.testing.assert_close(guarded.theta, free.theta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_below_its_floor_a_guard_recovers(kind: str) -> None:
    world = World({"guard": (1.0, GuardConfig(floor=4.0, band=0.2))}, kind)
    world.run()
    assert float(world.theta[0]) == pytest.approx(4.0, abs=0.25)


def test_contradicting_guards_leave_slack_and_say_so() -> None:
    config = GuardConfig(floor=0.5, band=0.2)
    world = World({"up": (1.0, config), "down": (-1.0, config)})
    figures = world.run(2 * PATIENCE)
    assert max(figures["floor/up/slack"], figures["floor/down/slack"]) > MATERIAL
    assert len(world.messages) == 2
    assert "no direction satisfies all floors" in world.messages[0]
    assert "down stands at" in world.messages[0]
