"""Cosines, held-out cosines and signal against explicit vectors (docs/method.md, section 6); the composite score."""

import math
import statistics

import numpy as np
import pytest
import torch

from marble_rl.compare.statistics import Scale
from marble_rl.training.harmony import Signal, agreement_of_halves, in_batch_harmony, other_half_harmony
from reference import cosine, z_score_means

REWARDS = 4


def vectors(rows=REWARDS + 1, size=20, seed=0, common=0.3):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=source, dtype=torch.float64) + common


def half_products(first, second):
    """[2, 2, J, J] from the halves' gradients [J, P]."""
    halves = (first, second)
    return torch.stack([torch.stack([a @ b.T for b in halves]) for a in halves])


def figures(direction, gradients):
    cosines = [cosine(direction.tolist(), g.tolist()) for g in gradients if g.norm() > 0]
    return {
        "min_cos": min(cosines),
        "mean_cos": statistics.fmean(cosines),
        "var_cos": statistics.pvariance(cosines),
        "conflict": float(min(cosines) < 0),
    }


def assert_equal(found, expected):
    assert vars(found) == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "weights", [[0.1, 0.2, 0.3, 0.4, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0], [1e-9, 0.0, 0.0, 2e-9, 0.0]], ids=str
)
def test_in_batch(weights, seed):
    """The last row is a probe: it may make the direction, but is not measured."""
    g = vectors(seed=seed)
    weights = torch.tensor(weights, dtype=torch.float64)
    assert_equal(in_batch_harmony(g @ g.T, weights, REWARDS), figures(weights @ g, g[:REWARDS]))


def test_reward_without_gradient_is_not_measured():
    g = vectors()
    g[1] = 0.0
    weights = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    assert_equal(in_batch_harmony(g @ g.T, weights, REWARDS), figures(weights @ g, g[:REWARDS]))


@pytest.mark.parametrize(("angle", "conflict"), [(89.0, 0.0), (91.0, 1.0), (180.0, 1.0)])
def test_conflict(angle, conflict):
    """Along the first of two gradients: against the second from 90 degrees on."""
    radians = math.radians(angle)
    g = torch.tensor([[1.0, 0.0], [3 * math.cos(radians), 3 * math.sin(radians)]], dtype=torch.float64)
    found = in_batch_harmony(g @ g.T, torch.tensor([2.0, 0.0], dtype=torch.float64), 2)
    assert found.conflict == conflict
    assert found.min_cos == pytest.approx(math.cos(radians), abs=1e-12)


@pytest.mark.parametrize("case", ["no direction", "no gradient"])
def test_undefined(case):
    g = vectors() * (case != "no gradient")
    weights = torch.full((REWARDS + 1,), float(case != "no direction"), dtype=torch.float64)
    assert in_batch_harmony(g @ g.T, weights, REWARDS) is None
    assert other_half_harmony(half_products(g, g), lambda gram: weights, REWARDS) is None


def normalised(gram):
    """A rule that depends on the Gram matrix it is given: equal shares of the unit gradients."""
    return 1 / gram.diagonal().sqrt()


def shortest(gram):
    return torch.eye(len(gram), dtype=gram.dtype)[gram.diagonal().argmin()]


@pytest.mark.parametrize("rule", [normalised, shortest])
@pytest.mark.parametrize("seed", range(3))
def test_heldout(rule, seed):
    """Made from one half, measured against the other, both ways round."""
    first, second = vectors(seed=10 + seed), 2 * vectors(seed=20 + seed)
    ways = [
        figures(rule(made @ made.T) @ made, measured[:REWARDS]) for made, measured in ((first, second), (second, first))
    ]
    expected = {key: (ways[0][key] + ways[1][key]) / 2 for key in ways[0]}
    assert_equal(other_half_harmony(half_products(first, second), rule, REWARDS), expected)
    assert ways[0] != pytest.approx(ways[1], rel=1e-3)


def test_heldout_with_one_way_undefined():
    """A half without signal makes no direction; the other way round has nothing to measure against."""
    first, second = vectors(seed=1), vectors(seed=2)
    second[:REWARDS] = 0.0
    probe = torch.eye(REWARDS + 1, dtype=torch.float64)[REWARDS]
    found = other_half_harmony(half_products(first, second), lambda gram: probe, REWARDS)
    assert_equal(found, figures(second[REWARDS], first[:REWARDS]))


def test_heldout_of_noise_shows_no_agreement():
    """Independent halves of pure noise: in-batch every reward seems served, held-out none is."""
    first, second = vectors(size=4000, seed=5, common=0.0), vectors(size=4000, seed=6, common=0.0)
    g = (first + second) / 2
    inside = in_batch_harmony(g @ g.T, normalised(g @ g.T), REWARDS)
    outside = other_half_harmony(half_products(first, second), normalised, REWARDS)
    assert inside.min_cos > 0.4
    assert abs(outside.mean_cos) < 0.05


def halves(source, share, size=400):
    """Gradients of two halves whose mean has the given share of the whole's expected squared length."""
    mean = torch.ones(1, size, dtype=torch.float64)
    noise = 0.0 if share == 1 else math.sqrt(2 * (1 / share - 1)) if share else 1.0
    return [(mean if share else 0 * mean) + noise * torch.randn(1, size, generator=source) for _ in range(2)]


def after(signal, h1, h2):
    g = (h1 + h2) / 2
    return signal.after(g.square().sum(1), agreement_of_halves(half_products(h1, h2)))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_signal(share):
    source = torch.Generator().manual_seed(4)
    signal = Signal.unknown(1)
    for _ in range(60):
        signal = after(signal, *halves(source, share))
    assert signal.share.item() == pytest.approx(share, abs=0.1 if share < 1 else 1e-12)


def test_signal_smooths_numerator_and_denominator():
    """A ratio of averages, not an average of ratios."""
    one = torch.ones(1, dtype=torch.float64)
    first = Signal.unknown(1).after(4 * one, one, decay=0.5)
    assert first.share.item() == pytest.approx(0.25)
    second = first.after(1 * one, one, decay=0.5)
    assert second.share.item() == pytest.approx((0.25 * 1 + 0.5 * 1) / (0.25 * 4 + 0.5 * 1))
    assert first.share.item() == pytest.approx(0.25), "a batch changes no signal: it gives a new one"


def test_signal_of_a_silent_reward_is_kept():
    """Without a gradient, or with one in a single half, a batch says nothing about a reward."""
    heard = torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    first = after(Signal.unknown(2), heard, heard.flip(1))
    assert first.share[0].item() == pytest.approx(4 / 4.5)
    assert first.share[1].isnan()
    assert torch.equal(after(first, 0 * heard, 0 * heard).share[0], first.share[0])
    assert torch.equal(after(first, heard, 0 * heard).share[0], first.share[0])


def test_signal_state_round_trip():
    source = torch.Generator().manual_seed(1)
    first = after(Signal.unknown(1), *halves(source, 0.5))
    second = Signal.from_state(first.state_dict())
    later = halves(source, 0.5)
    assert torch.equal(after(first, *later).share, after(second, *later).share)


PAPER = """
SD-XL                    0.55 0.14 22.42 0.287 0.280 5.60  0.76 2.93 -0.455
SD3.5-L                  0.71 0.68 22.91 0.289 0.288 5.50  0.96 3.25 +0.116
FLUX.1-dev               0.66 0.59 22.84 0.295 0.274 5.71  0.96 3.27 +0.104
SD3.5-M                  0.24 0.12 20.51 0.237 0.204 5.13 -0.58 2.02 -2.319
SD3.5-M+CFG              0.63 0.59 22.34 0.285 0.279 5.36  0.85 3.03 -0.255
FlowGRPO-GenEval         0.95 0.66 22.51 0.293 0.274 5.32  1.06 3.18 +0.120
FlowGRPO-OCR             0.66 0.92 22.41 0.290 0.280 5.32  0.95 3.15 +0.013
FlowGRPO-PickScore       0.54 0.68 23.50 0.280 0.316 5.90  1.29 3.37 +0.362
DiffusionNFT-sequential  0.94 0.91 23.80 0.293 0.331 6.01  1.49 3.49 +1.015
DiffusionNFT-sum         0.92 0.91 21.53 0.267 0.300 6.15  1.16 3.04 +0.184
MARBLE                   0.94 0.96 22.83 0.286 0.355 6.59  1.53 3.52 +1.116
"""


def test_composite_of_the_paper():
    """Section 5: eleven rows, eight metrics, and the composite column of the paper's table."""
    rows = [[float(x) for x in line.split()[1:]] for line in PAPER.strip().splitlines()]
    metrics, composite = [row[:-1] for row in rows], [row[-1] for row in rows]
    found = Scale.of(np.array(metrics)).composite(np.array(metrics)).tolist()
    assert [round(x, 3) for x in found] == composite
    assert found == pytest.approx(z_score_means(metrics), abs=1e-12)
