"""Signal and directions of earlier batches on the next one, against gradients whose expectation is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from marble_rl.balancing.base import Elsewhere
from marble_rl.balancing.earlier import EarlierBatches
from marble_rl.balancing.fair import Fair, FairSettings
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.gradients.products import gram
from marble_rl.training.harmony import Signal, harmony

NAMES = ("ocr", "clip")
SIZE = 400
MEAN = torch.zeros(3, SIZE)
MEAN[0, 0], MEAN[1, 1], MEAN[2, :2] = 1.0, 2.0, 1.0


def gradients(g: Tensor) -> RewardGradients:
    """Of two rewards and the weighted sum, as the trainer gives them to a rule."""
    products = gram(g)
    return RewardGradients(g, torch.zeros(SIZE), products.diagonal().sqrt(), products, None, None).first(2)


def fair(momentum: float = 0.9) -> Fair:
    return Fair(FairSettings(type="fair", momentum=momentum), NAMES, adv_clip=5.0, seed=0)


def step(rule: Fair, g: Tensor) -> Elsewhere | None:
    weighing = rule.weigh(0, gradients(g))
    rule.commit(weighing.state)
    return weighing.elsewhere


@pytest.mark.parametrize("present", [1.0, 0.3])
def test_the_signal_is_the_share_that_is_not_noise(present: float) -> None:
    """Also of a reward that has a gradient in few batches: those without one say nothing about it."""
    dice = torch.Generator().manual_seed(0)
    rule, signal = fair(), Signal.unknown(2)
    share = 0.5
    noise = torch.tensor([1.0, 2.0, 1.0])[:, None] * ((1 / share - 1) / SIZE) ** 0.5
    found = []
    for number in range(400):
        g = MEAN + noise * torch.randn(3, SIZE, generator=dice)
        if torch.rand((), generator=dice) > present:
            g[0] = 0.0
        elsewhere = step(rule, g)
        if elsewhere is None:
            assert number == 0
            continue
        assert g[0].any() or elsewhere.unbiased[0].isnan()
        signal = signal.after(gram(g).diagonal()[:2], elsewhere.unbiased)
        found.append(signal.share)
    mean = torch.stack(found[50:]).mean(0)
    torch.testing.assert_close(mean, torch.full((2,), share).double(), atol=0.05, rtol=0)


def test_noise_alone_has_no_signal_and_no_harmony() -> None:
    dice = torch.Generator().manual_seed(1)
    rule, signal, cosines = fair(), Signal.unknown(2), []
    for _ in range(400):
        g = torch.randn(3, SIZE, generator=dice)
        elsewhere = step(rule, g)
        if elsewhere is not None:
            signal = signal.after(gram(g).diagonal()[:2], elsewhere.unbiased)
            for place in (0, 1):
                there = harmony(elsewhere.directions[place], gram(g).diagonal()[:2], elsewhere.squared_norms[place])
                assert there is not None
                cosines.append(there.mean_cos)
    assert signal.share.abs().max() < 0.05
    assert abs(torch.tensor(cosines).mean()) < 0.01


def test_directions_are_those_of_the_momenta_before_the_batch() -> None:
    rule = fair(momentum=0.5)
    first, second, third = (torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    assert step(rule, first) is None
    step(rule, second)
    momenta = (0.5 * (0.5 * first).bfloat16().float() + 0.5 * second).bfloat16().float()
    weights = rule.harmonizer.shares_for(gram(momenta[:2])).weights.float()
    elsewhere = step(rule, third)
    assert elsewhere is not None
    ours, theirs = weights @ momenta[:2], momenta[2]
    for place, direction in enumerate((ours, theirs)):
        torch.testing.assert_close(elsewhere.directions[place].float(), third[:2] @ direction, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(elsewhere.squared_norms[place].float(), direction @ direction, rtol=1e-4, atol=0)


def test_state_round_trip_and_a_reward_that_is_off() -> None:
    rule, resumed = fair(), fair()
    batches = [torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    for g in batches[:2]:
        step(rule, g)
    resumed.load_tensors({name: tensor.clone() for name, tensor in rule.tensors().items()})
    resumed.load_state_dict(rule.state_dict())
    one, other = step(rule, batches[2]), step(resumed, batches[2])
    assert one is not None
    assert other is not None
    for name, value in vars(one).items():
        assert torch.equal(value, getattr(other, name))
    rule.rewards_off = lambda step: ["ocr"]
    step(rule, batches[3])
    after = step(rule, batches[0])
    assert after is not None
    assert after.unbiased[0].isnan(), "its momentum was forgotten"
    assert not after.unbiased[1].isnan()


def test_without_a_probe_there_is_no_weighted_sum() -> None:
    earlier = EarlierBatches(NAMES, 0.9)
    rule = fair()
    g = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))
    products = rule.harmonizer.momenta.products_with(g)
    earlier.commit(torch.tensor([True, True]), None, ())
    found = earlier.measured_on(gradients(torch.cat([g, g[:1]])), products, torch.ones(2).double())
    assert found is not None
    assert harmony(found.directions[1], gram(g).diagonal(), found.squared_norms[1]) is None
