"""Harmonizer (docs/method.md, section 3) on hostile inputs: what holds whatever the gradients are."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inputs import MATRICES, STATIONARY
from marble_rl import Harmonizer
from reference import optimality_gap, smoothed

FIVE = MATRICES["five rewards"]


def build(k, **settings):
    return Harmonizer([f"r{i}" for i in range(k)], **settings)


def products(g):
    return g @ g.T


def on_simplex(alpha):
    return bool((alpha >= 0).all()) and abs(math.fsum(alpha.tolist()) - 1) < 1e-12


def without(g, *rows):
    g = g.clone()
    g[list(rows)] = 0.0
    return g


@pytest.mark.parametrize("name", MATRICES)
def test_refresh(name):
    g = MATRICES[name]
    harmonizer = build(len(g))
    norms = g.norm(dim=1)
    for _ in range(5):
        found = harmonizer.refresh(products(g))
        assert on_simplex(found.alpha_bar)
        assert torch.equal(found.active, norms > 0)
        assert found.stationary == (name in STATIONARY)
        assert torch.isfinite(found.weights).all()
        assert (found.weights >= 0).all()
        assert (found.weights[~found.active] == 0).all()
        assert (found.alpha[~found.active] == 0).all()


@pytest.mark.parametrize("name", sorted(MATRICES.keys() - STATIONARY - {"all rows zero", "one reward, zero"}))
def test_update_direction(name):
    """sum_k weights_k g_k is the min-norm point of the unit gradients times their mean length."""
    g = MATRICES[name]
    found = build(len(g)).refresh(products(g))
    active = g.norm(dim=1) > 0
    norms = g[active].norm(dim=1)
    unit = g[active] / norms[:, None]
    alpha = found.alpha[active]
    assert optimality_gap(products(unit), alpha) < 1e-9
    expected = (alpha @ unit) * norms.mean()
    assert float((found.weights @ g - expected).norm()) <= 1e-9 * float(norms.mean())
    assert found.norm == pytest.approx(float((alpha @ unit).norm()), rel=1e-6)


def test_zero_gradients_leave_the_mean_norm_alone():
    """The two others are orthogonal, of lengths 3 and 5: half of each unit vector, times their mean, 4."""
    g = torch.diag(torch.tensor([3.0, 0.0, 5.0], dtype=torch.float64))
    update = build(3).refresh(products(g)).weights @ g
    assert update.tolist() == pytest.approx([2.0, 0.0, 2.0], rel=1e-12)


@pytest.mark.parametrize("name", ["five rewards", "zero row", "nearly opposed", "64 rewards in an orthant"])
def test_the_scale_of_one_reward_does_not_matter(name):
    g = MATRICES[name]
    factors = torch.logspace(-10, 15, len(g), dtype=torch.float64)
    first = build(len(g)).refresh(products(g))
    second = build(len(g)).refresh(products(factors[:, None] * g))
    torch.testing.assert_close(first.alpha, second.alpha, rtol=0, atol=1e-9)
    torch.testing.assert_close(first.alpha_bar, second.alpha_bar, rtol=0, atol=1e-9)


def test_silent_reward_neither_stalls_the_others_nor_loses_its_coefficient():
    g = without(FIVE, 3)
    harmonizer = build(5)
    for _ in range(30):
        found = harmonizer.refresh(products(g))
        update = found.weights @ g
        assert all(float(update @ g[k]) > 0 for k in range(5) if k != 3)
        assert found.alpha_bar[3].item() == pytest.approx(0.2, abs=1e-12)
    # By now the others have reached their share of the rest: 0.7^30 of the start is left.
    expected = 0.8 * found.alpha
    torch.testing.assert_close(found.alpha_bar[:3], expected[:3], rtol=1e-3, atol=0)

    back = harmonizer.refresh(products(FIVE))
    assert back.active.all()
    assert back.weights[3] > 0


@pytest.mark.parametrize("k", [1, 4])
def test_no_signal_at_all(k):
    harmonizer = build(k)
    harmonizer.refresh(products(FIVE[:k]))
    before = harmonizer.alpha_bar
    found = harmonizer.refresh(torch.zeros(k, k, dtype=torch.float64))
    assert not found.active.any()
    assert not found.stationary
    assert (found.weights == 0).all()
    assert torch.equal(found.alpha_bar, before)
    assert torch.equal(harmonizer.alpha_bar, before)


@pytest.mark.parametrize("name", sorted(STATIONARY))
def test_stationary_point(name):
    """Reported, no update, nothing divided by zero, and the coefficients stay."""
    g = MATRICES[name]
    k = len(g)
    harmonizer = build(k)
    harmonizer.refresh(products(torch.eye(k, dtype=torch.float64) + torch.arange(k)[:, None] / k))
    before = harmonizer.alpha_bar
    assert k == 2 or before.std() > 1e-3
    found = harmonizer.refresh(products(g))
    assert found.stationary
    assert (found.weights == 0).all()
    assert found.norm < 1e-6
    assert torch.isfinite(found.alpha).all()
    assert torch.equal(found.alpha_bar, before)


@pytest.mark.parametrize("length", [1e-10, 1.0, 0.3, 7e14])
@pytest.mark.parametrize("others", [0, 3])
def test_a_lone_reward_has_weight_one(length, others):
    """Then the step is the plain algorithm, exactly."""
    gram = torch.zeros(1 + others, 1 + others, dtype=torch.float64)
    gram[0, 0] = length**2
    found = build(1 + others).refresh(gram)
    assert found.weights.tolist() == [1.0] + [0.0] * others
    assert found.alpha.tolist() == [1.0] + [0.0] * others


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.7, 0.9])
def test_smoothing(decay):
    harmonizer = build(5, ema_decay=decay)
    expected = [0.2] * 5
    assert harmonizer.alpha_bar.tolist() == expected
    silent = [(), (1,), (), (0, 2, 3), (4,), (), (1, 2, 3, 4), ()]
    for i, rows in enumerate(silent):
        g = without(torch.roll(FIVE, i, dims=0) * torch.linspace(1, 3, FIVE.shape[1]), *rows)
        found = harmonizer.refresh(products(g))
        active = [k not in rows for k in range(5)]
        assert found.active.tolist() == active
        expected = smoothed(expected, found.alpha.tolist(), active, decay)
        assert found.alpha_bar.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert torch.equal(harmonizer.alpha_bar, found.alpha_bar)


@pytest.mark.parametrize(("decay", "before"), [(0.0, 1), (0.7, 120)])
def test_a_dominated_reward_that_is_the_only_one_with_signal(decay, before):
    """Its coefficient has vanished; the others keep theirs, and nothing becomes NaN."""
    harmonizer = build(3, ema_decay=decay)
    for _ in range(before):
        harmonizer.refresh(products(MATRICES["one dominated"]))
    assert harmonizer.alpha_bar[2] < 1e-16
    for _ in range(3):
        found = harmonizer.refresh(products(without(MATRICES["one dominated"], 0, 1)))
        assert found.alpha_bar.tolist() == pytest.approx([0.5, 0.5, 0.0], abs=1e-12)
        assert on_simplex(found.alpha_bar)
        assert found.weights.tolist() == [0.0, 0.0, 1.0]


ROW = st.sampled_from([(0, 0), (1, 0), (0, 1), (-1, 0), (1, 1), (-1, 2), (1e-8, 3e-8), (5e7, -1e7)])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.lists(ROW, min_size=3, max_size=3), min_size=1, max_size=12), st.sampled_from([0.0, 0.7, 0.99]))
def test_any_history_stays_on_the_simplex(batches, decay):
    harmonizer = build(3, ema_decay=decay)
    for rows in batches:
        before = harmonizer.alpha_bar
        found = harmonizer.refresh(products(torch.tensor(rows, dtype=torch.float64)))
        assert on_simplex(found.alpha_bar)
        assert torch.isfinite(found.weights).all()
        assert torch.equal(found.alpha_bar[~found.active], before[~found.active])


def test_what_was_returned_is_not_changed_later():
    harmonizer = build(5)
    first = harmonizer.refresh(products(FIVE)).alpha_bar
    kept = first.clone()
    harmonizer.refresh(products(without(FIVE, 0)))
    assert torch.equal(first, kept)
    harmonizer.alpha_bar.zero_()
    assert on_simplex(harmonizer.alpha_bar)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gram_of_any_dtype(dtype):
    gram = torch.diag(torch.tensor([1.0, 4.0, 16.0]))
    assert torch.equal(build(3).refresh(gram.to(dtype)).weights, build(3).refresh(gram.double()).weights)


@pytest.mark.parametrize("every", [1, 4, 10])
def test_when_to_refresh(every):
    harmonizer = build(2, refresh_every=every)
    assert [step for step in range(41) if harmonizer.should_refresh(step)] == list(range(0, 41, every))


def test_late_uniform_stage():
    harmonizer = build(2, refresh_every=5, uniform_after=12)
    advantages = torch.tensor([[1.0, 3.0], [-9.0, 1.0]], dtype=torch.float64)
    g = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0]], dtype=torch.float64)
    refreshed = []
    for step in range(20):
        if harmonizer.should_refresh(step):
            refreshed.append(step)
            harmonizer.load_state_dict({"rewards": ["r0", "r1"], "alpha_bar": [0.9, 0.1]})
            harmonizer.refresh(products(g))
        uniform = harmonizer.combine(advantages, step).tolist() == pytest.approx([2.0, -2.0], rel=1e-12)
        assert uniform == (step >= 12)
    assert refreshed == [0, 5, 10]
    with pytest.raises(ValueError, match="needs the step"):
        harmonizer.combine(advantages)


def test_asking_and_solving_change_nothing():
    harmonizer = build(5, refresh_every=5, uniform_after=12)
    harmonizer.refresh(products(FIVE))
    before = json.dumps(harmonizer.state_dict())
    assert harmonizer.should_refresh(10)
    assert not harmonizer.should_refresh(15)
    solution = harmonizer.solve(products(without(FIVE, 2)))
    assert json.dumps(harmonizer.state_dict()) == before
    harmonizer.commit(solution)
    assert torch.equal(harmonizer.alpha_bar, solution.alpha_bar)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_combine_clamps_each_advantage_first(dtype):
    harmonizer = build(5, adv_clip=2.0)
    alpha_bar = harmonizer.refresh(products(FIVE)).alpha_bar.tolist()
    rows = [[-100.0, 1.0, 2.0, 2.5, 0.0], [0.5, -0.5, 0.1, 0.0, -7.0], [9.0] * 5, [-9.0] * 5]
    found = harmonizer.combine(torch.tensor(rows, dtype=dtype))
    expected = [sum(a * min(max(x, -2.0), 2.0) for a, x in zip(alpha_bar, row, strict=True)) for row in rows]
    assert found.dtype == dtype
    assert found.shape == (4,)
    assert found.tolist() == pytest.approx(expected, rel=4 * torch.finfo(dtype).eps)


def test_state_round_trip():
    whole, first = build(5), build(5)
    for harmonizer in (whole, first):
        harmonizer.refresh(products(FIVE))
        harmonizer.refresh(products(without(FIVE, 2)))
    second = build(5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert torch.equal(second.alpha_bar, whole.alpha_bar)
    later = products(torch.roll(FIVE, 1, dims=0))
    assert torch.equal(second.refresh(later).alpha_bar, whole.refresh(later).alpha_bar)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rewards": []},
        {"rewards": ["a", "b", "a"]},
        {"refresh_every": 0},
        {"ema_decay": 1.0},
        {"ema_decay": -0.1},
        {"ema_decay": math.nan},
        {"apply": "sometimes"},
        {"adv_clip": 0.0},
        {"adv_clip": -1.0},
    ],
    ids=str,
)
def test_bad_argument_is_refused(arguments):
    name = next(iter(arguments))
    with pytest.raises(ValueError, match=name):
        Harmonizer(**{"rewards": ["a", "b"], **arguments})


@pytest.mark.parametrize("shape", [(3, 3), (2, 3), (2,), (1, 2, 2)])
def test_gram_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="gram"):
        build(2).refresh(torch.ones(shape))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [(0, 0), (0, 1)])
def test_gram_that_is_not_finite_is_refused(place, value):
    """A NaN gradient is an error, never a reward without signal; the coefficients stay as they were."""
    gram = torch.eye(2, dtype=torch.float64)
    gram[place] = gram[place[::-1]] = value
    harmonizer = build(2)
    with pytest.raises(ValueError, match="gram"):
        harmonizer.refresh(gram)
    assert harmonizer.alpha_bar.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (2,), ()])
def test_advantages_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="advantages"):
        build(2).combine(torch.ones(shape))


@pytest.mark.parametrize(
    "state",
    [
        {"rewards": ["r1", "r0"], "alpha_bar": [0.5, 0.5]},
        {"rewards": ["r0"], "alpha_bar": [1.0]},
        {"rewards": ["r0", "r1"], "alpha_bar": [0.2, 0.3, 0.5]},
    ],
)
def test_state_of_other_rewards_is_refused(state):
    with pytest.raises(ValueError, match="state"):
        build(2).load_state_dict(state)
