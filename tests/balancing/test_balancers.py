"""Every `balance` type as the trainer builds it: what advantage a step optimises (docs/method.md, sections 1-3, 5)."""

import statistics

import pytest
import torch
from marble_rl.balancing.balancers import build_balancer
from marble_rl.balancing.settings import (
    DropoutBalance,
    FixedBalance,
    GdpoBalance,
    MarbleBalance,
    MinVarianceBalance,
    SequentialBalance,
    SingleBalance,
    Stage,
    WeightedSumBalance,
)
from marble_rl.losses.settings import LossConfig

import reference
from marble_rl.advantages import Scored
from marble_rl.config.run import AdvantagesConfig, RunConfig, TrainerConfig
from marble_rl.models.settings import ModelConfig
from marble_rl.prompts.settings import PromptsConfig, PromptSourceConfig
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import RewardTable

NAMES = ("ocr", "geneval", "aesthetic", "clip")
WEIGHTS = {"geneval": 3.0, "clip": 0.5}
WEIGHT_ROW = [1.0, 3.0, 1.0, 0.5]
STAGES = [Stage(reward="clip", steps=3), Stage(reward="ocr", steps=2), Stage(reward="clip", steps=1)]

BALANCES = {
    "marble": MarbleBalance(),
    "weighted_sum": WeightedSumBalance(type="weighted_sum", weights=WEIGHTS),
    "weighted_sum, plain": WeightedSumBalance(type="weighted_sum"),
    "fixed": FixedBalance(type="fixed", coefficients={"ocr": 0.25, "clip": 0.75}),
    "fixed, equal": FixedBalance(type="fixed"),
    "gdpo": GdpoBalance(type="gdpo", weights=WEIGHTS),
    "single": SingleBalance(type="single", reward="aesthetic"),
    "sequential": SequentialBalance(type="sequential", stages=STAGES),
    "dropout": DropoutBalance(type="dropout", rate=0.5),
    "min_variance": MinVarianceBalance(type="min_variance"),
}
COEFFICIENTS = {
    "marble": [0.25] * 4,
    "fixed": [0.25, 0.0, 0.0, 0.75],
    "fixed, equal": [0.25] * 4,
    "single": [0.0, 0.0, 1.0, 0.0],
}


def run_config(balance, *, adv_clip=5.0, std="group", seed=0):
    rewards = [RewardConfig(type="brightness", name=name) for name in NAMES]
    rewards.insert(1, RewardConfig(type="brightness", name="unseen", held_out=True))
    return RunConfig(
        model=ModelConfig(path="nowhere"),
        prompts=PromptsConfig(train=[PromptSourceConfig(name="all", texts=["a cat"])]),
        rewards=rewards,
        balance=balance,
        loss=LossConfig(adv_clip=adv_clip),
        advantages=AdvantagesConfig(std=std),
        trainer=TrainerConfig(seed=seed),
    )


def scored(config, size=12):
    """Five prompts: one that every reward rates, two for specialists, one with constant scores, one for no reward.

    Where a reward does not apply, the table holds a large number that nobody may read.
    """
    source = torch.Generator().manual_seed(7)
    applicable = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    applicable = applicable.repeat_interleave(size, dim=0)
    group_ids = torch.tensor([40, 2, 7, 11, 3]).repeat_interleave(size)
    values = torch.randn(len(group_ids), 4, generator=source, dtype=torch.float64) ** 3 * torch.tensor([1, 0.1, 5, 20])
    values[3 * size : 4 * size] = 0.7
    values = values.masked_fill(~applicable, 1e3) + 1e3 * ~applicable * torch.rand(values.shape, generator=source)
    order = torch.randperm(len(group_ids), generator=source)
    table = RewardTable(NAMES, values[order], applicable[order])
    clip, std = config.loss.adv_clip, config.advantages.std
    rows = reference.group_advantages(table.values.tolist(), group_ids[order].tolist(), table.applicable.tolist(), std)
    advantages = torch.tensor(rows, dtype=torch.float64).clamp(-clip, clip)
    return Scored(table, group_ids[order], advantages, std, clip)


def clamp(x, clip):
    return min(max(x, -clip), clip)


@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("clip", [1.0, 5.0])
@pytest.mark.parametrize("name", BALANCES)
def test_stays_within_the_clip(name, clip, std):
    config = run_config(BALANCES[name], adv_clip=clip, std=std)
    balancer, batch = build_balancer(config), scored(config)
    for step in range(8):
        found = balancer.advantage(step, batch)
        assert found.shape == batch.group_ids.shape
        assert float(found.abs().max()) <= clip * (1 + 1e-12)
        assert (found != 0).any()


@pytest.mark.parametrize("name", BALANCES)
def test_only_marble_asks_for_reward_gradients(name):
    balancer = build_balancer(run_config(BALANCES[name]))
    wanted = [step for step in range(25) if balancer.wants_reward_gradients(step)]
    assert wanted == ([0, 10, 20] if name == "marble" else [])


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_constant_coefficients(name):
    config = run_config(BALANCES[name])
    balancer, batch = build_balancer(config), scored(config)
    for step in (0, 1, 500):
        assert balancer.coefficients(step).tolist() == COEFFICIENTS[name]
        expected = [
            sum(c * a for c, a in zip(COEFFICIENTS[name], row, strict=True)) for row in batch.advantages.tolist()
        ]
        assert balancer.advantage(step, batch).tolist() == pytest.approx(expected, abs=1e-12)


def test_single_is_that_reward_alone():
    config = run_config(BALANCES["single"])
    batch = scored(config)
    assert torch.equal(build_balancer(config).advantage(3, batch), batch.advantages[:, 2])


@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("clip", [1.0, 5.0])
@pytest.mark.parametrize(("name", "weights"), [("weighted_sum", WEIGHT_ROW), ("weighted_sum, plain", [1.0] * 4)])
def test_weighted_sum_is_the_advantage_of_one_scalar(name, weights, clip, std):
    config = run_config(BALANCES[name], adv_clip=clip, std=std)
    batch = scored(config)
    table = batch.table
    scalars, rated = [], []
    for values, applies in zip(table.values.tolist(), table.applicable.tolist(), strict=True):
        scalars.append([sum(w * x for w, x, on in zip(weights, values, applies, strict=True) if on)])
        rated.append([any(applies)])
    expected = reference.group_advantages(scalars, batch.group_ids.tolist(), rated, std)
    found = build_balancer(config).advantage(0, batch)
    assert found.tolist() == pytest.approx([clamp(x, clip) for (x,) in expected], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("clip", [1.0, 5.0])
def test_gdpo_normalises_the_sum_over_the_batch(clip):
    config = run_config(BALANCES["gdpo"], adv_clip=clip)
    batch = scored(config)
    sums = [sum(w * a for w, a in zip(WEIGHT_ROW, row, strict=True)) for row in batch.advantages.tolist()]
    rated = batch.table.applicable.any(dim=1).tolist()
    assert not all(rated), "some samples have no reward at all: they get no advantage and no say in the statistics"
    own = [x for x, is_rated in zip(sums, rated, strict=True) if is_rated]
    mean, std = statistics.fmean(own), statistics.pstdev(own)
    expected = [
        clamp((x - mean) / (std + reference.ADVANTAGE_EPS), clip) if is_rated else 0.0
        for x, is_rated in zip(sums, rated, strict=True)
    ]
    assert build_balancer(config).advantage(0, batch).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gdpo_without_signal_is_zero():
    config = run_config(BALANCES["gdpo"])
    batch = scored(config)
    silent = Scored(batch.table, batch.group_ids, 0 * batch.advantages, batch.std, batch.adv_clip)
    assert (build_balancer(config).advantage(0, silent) == 0).all()


def test_sequential_switches_on_time():
    """Three steps of one, two of another, one of the first again; the last stage lasts to the end."""
    config = run_config(BALANCES["sequential"])
    balancer, batch = build_balancer(config), scored(config)
    clip, ocr = 3, 0
    for step, column in enumerate([clip, clip, clip, ocr, ocr, clip, clip, clip]):
        assert torch.equal(balancer.advantage(step, batch), batch.advantages[:, column])
    assert balancer.coefficients(10_000).tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_dropout_rate(rate):
    """Equal shares of those kept. At least one is kept, so K (1 - rate) + rate^K are, on average."""
    steps = 1500
    balancer = build_balancer(run_config(DropoutBalance(type="dropout", rate=rate)))
    counts = [0] * 4
    for step in range(steps):
        coefficients = balancer.coefficients(step).tolist()
        kept = [c > 0 for c in coefficients]
        assert any(kept)
        assert coefficients == pytest.approx([on / sum(kept) for on in kept], abs=1e-12)
        counts = [n + on for n, on in zip(counts, kept, strict=True)]
    expected = (1 - rate) + rate**4 / 4
    error = (expected * (1 - expected) / steps) ** 0.5
    for count in counts:
        assert abs(count / steps - expected) <= 4.5 * error


def test_dropout_follows_seed_and_step_alone():
    first, again, other = (build_balancer(run_config(BALANCES["dropout"], seed=seed)) for seed in (0, 0, 1))
    forwards = [first.coefficients(step).tolist() for step in range(50)]
    backwards = [again.coefficients(step).tolist() for step in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert forwards != [other.coefficients(step).tolist() for step in range(50)]
    assert len({tuple(row) for row in forwards}) > 5


def test_dropout_combines_by_its_coefficients():
    config = run_config(BALANCES["dropout"])
    balancer, batch = build_balancer(config), scored(config)
    for step in range(5):
        expected = batch.advantages @ balancer.coefficients(step).double()
        torch.testing.assert_close(balancer.advantage(step, batch), expected, rtol=1e-12, atol=1e-12)


def test_min_variance_has_the_smallest_variance_and_smooths():
    config = run_config(MinVarianceBalance(type="min_variance", ema_decay=0.0))
    balancer, batch = build_balancer(config), scored(config)
    unit = batch.advantages / batch.advantages.square().mean(0).sqrt()
    balancer.advantage(0, batch)
    alpha = balancer.coefficients(1)
    assert alpha.sum().item() == pytest.approx(1.0)
    dice = torch.Generator().manual_seed(0)
    others = torch.rand(500, 4, generator=dice, dtype=torch.float64)
    others = torch.cat([torch.eye(4, dtype=torch.float64), others / others.sum(1, keepdim=True)])
    assert (unit @ alpha).square().mean() <= (unit @ others.T).square().mean(0).min() + 1e-12

    slow = build_balancer(run_config(MinVarianceBalance(type="min_variance", ema_decay=0.9)))
    found = slow.advantage(0, batch)
    expected = 0.9 / 4 + 0.1 * alpha
    torch.testing.assert_close(slow.coefficients(1), expected)
    torch.testing.assert_close(found, batch.advantages @ expected)


def test_marble_takes_its_settings_from_the_config():
    balance = MarbleBalance(refresh_every=4, ema_decay=0.5, uniform_after=9, normalize=False)
    balancer = build_balancer(run_config(balance, adv_clip=2.0))
    assert [step for step in range(20) if balancer.wants_reward_gradients(step)] == [0, 4, 8]
    balancer.wants_reward_gradients(0)
    gram = torch.diag(torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64))
    # Raw gradients: alpha* = (2, 2, 1, 1) / 6, halfway from 1/4.
    found = balancer.harmonizer.refresh(gram)
    assert found.alpha_bar.tolist() == pytest.approx([7 / 24, 7 / 24, 5 / 24, 5 / 24], rel=1e-12)
    assert balancer.harmonizer.combine(torch.full((1, 4), 99.0)).item() == pytest.approx(2.0)


def test_marble_combines_by_the_smoothed_coefficients():
    config = run_config(MarbleBalance())
    balancer, batch = build_balancer(config), scored(config)
    g = torch.eye(4, dtype=torch.float64) + torch.linspace(0, 1, 4, dtype=torch.float64)[:, None]
    alpha_bar = balancer.harmonizer.refresh(g @ g.T).alpha_bar
    assert alpha_bar.std() > 0.01
    torch.testing.assert_close(balancer.advantage(1, batch), batch.advantages @ alpha_bar, rtol=1e-12, atol=1e-14)
    assert torch.equal(balancer.coefficients(1), alpha_bar)

    resumed = build_balancer(config)
    resumed.load_state_dict(balancer.state_dict())
    assert torch.equal(resumed.advantage(1, batch), balancer.advantage(1, batch))


@pytest.mark.parametrize("name", BALANCES)
def test_state_round_trip(name):
    config = run_config(BALANCES[name])
    first, second, batch = build_balancer(config), build_balancer(config), scored(config)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.advantage(4, batch), second.advantage(4, batch))
