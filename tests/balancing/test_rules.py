"""Every `balance` type as the trainer builds it: what advantage a step optimises (docs/method.md, sections 1-3, 5)."""

import json
import statistics

import pytest
import torch

import reference
from marble_rl.advantages import Scored
from marble_rl.balancing.registry import RULES
from marble_rl.config.run import AdvantagesConfig, RunConfig, TrainerConfig
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.models.settings import ModelConfig
from marble_rl.prompts.settings import PromptsConfig, PromptSourceConfig
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import RewardTable

NAMES = ("ocr", "geneval", "aesthetic", "clip")
WEIGHTS = {"geneval": 3.0, "clip": 0.5}
WEIGHT_ROW = [1.0, 3.0, 1.0, 0.5]
STAGES = [{"reward": "clip", "steps": 3}, {"reward": "ocr", "steps": 2}, {"reward": "clip", "steps": 1}]

BALANCES = {
    "marble": {"type": "marble"},
    "fair": {"type": "fair"},
    "marble_no_norm": {"type": "marble_no_norm"},
    "unit_mean": {"type": "unit_mean"},
    "weighted_sum": {"type": "weighted_sum", "weights": WEIGHTS},
    "weighted_sum, plain": {"type": "weighted_sum"},
    "fixed": {"type": "fixed", "coefficients": {"ocr": 0.25, "clip": 0.75}},
    "fixed, equal": {"type": "fixed"},
    "gdpo": {"type": "gdpo", "weights": WEIGHTS},
    "single": {"type": "single", "reward": "aesthetic"},
    "sequential": {"type": "sequential", "stages": STAGES},
    "dropout": {"type": "dropout", "rate": 0.5},
    "min_variance": {"type": "min_variance"},
}
REFRESHING = ("marble", "marble_no_norm", "unit_mean")
COEFFICIENTS = {
    "marble": [0.25] * 4,
    "marble_no_norm": [0.25] * 4,
    "unit_mean": [0.25] * 4,
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
        loss={"adv_clip": adv_clip},
        advantages=AdvantagesConfig(std=std),
        trainer=TrainerConfig(seed=seed),
    )


def build(config):
    """The rule as the trainer builds it."""
    rule = RULES.part_of(config.balance)
    rule.check(config.balance, config.trained_rewards)
    return rule(config.balance, config.trained_rewards, adv_clip=config.loss.adv_clip, seed=config.trainer.seed)


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
    rule, batch = build(config), scored(config)
    for step in range(8):
        found = rule.combine(step, batch).advantage
        assert found.shape == batch.group_ids.shape
        assert float(found.abs().max()) <= clip * (1 + 1e-12)
        assert (found != 0).any()


def test_every_built_in_rule_is_tested_here():
    assert {balance["type"] for balance in BALANCES.values()} == set(RULES.built_in)


@pytest.mark.parametrize("name", BALANCES)
def test_which_steps_need_one_gradient_per_reward(name):
    rule = build(run_config(BALANCES[name]))
    wanted = [step for step in range(25) if rule.needs_gradients(step)]
    assert wanted == ([0, 10, 20] if name in REFRESHING else list(range(25)) if name == "fair" else [])
    assert rule.uses_gradients() == bool(wanted)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_constant_coefficients(name):
    config = run_config(BALANCES[name])
    rule, batch = build(config), scored(config)
    for step in (0, 1, 500):
        assert rule.coefficients(step).tolist() == COEFFICIENTS[name]
        expected = [
            sum(c * a for c, a in zip(COEFFICIENTS[name], row, strict=True)) for row in batch.advantages.tolist()
        ]
        assert rule.combine(step, batch).advantage.tolist() == pytest.approx(expected, abs=1e-12)


def test_single_is_that_reward_alone():
    config = run_config(BALANCES["single"])
    batch = scored(config)
    assert torch.equal(build(config).combine(3, batch).advantage, batch.advantages[:, 2])


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
    found = build(config).combine(0, batch).advantage
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
    assert build(config).combine(0, batch).advantage.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gdpo_without_signal_is_zero():
    config = run_config(BALANCES["gdpo"])
    batch = scored(config)
    silent = Scored(batch.table, batch.group_ids, 0 * batch.advantages, batch.std, batch.adv_clip)
    assert (build(config).combine(0, silent).advantage == 0).all()


def test_sequential_switches_on_time():
    """Three steps of one, two of another, one of the first again; the last stage lasts to the end."""
    config = run_config(BALANCES["sequential"])
    rule, batch = build(config), scored(config)
    clip, ocr = 3, 0
    for step, column in enumerate([clip, clip, clip, ocr, ocr, clip, clip, clip]):
        assert torch.equal(rule.combine(step, batch).advantage, batch.advantages[:, column])
    assert rule.coefficients(10_000).tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_dropout_rate(rate):
    """Equal shares of those kept. At least one is kept, so K (1 - rate) + rate^K are, on average."""
    steps = 1500
    rule = build(run_config({"type": "dropout", "rate": rate}))
    counts = [0] * 4
    for step in range(steps):
        coefficients = rule.coefficients(step).tolist()
        kept = [c > 0 for c in coefficients]
        assert any(kept)
        assert coefficients == pytest.approx([on / sum(kept) for on in kept], abs=1e-12)
        counts = [n + on for n, on in zip(counts, kept, strict=True)]
    expected = (1 - rate) + rate**4 / 4
    error = (expected * (1 - expected) / steps) ** 0.5
    for count in counts:
        assert abs(count / steps - expected) <= 4.5 * error


def test_dropout_follows_seed_and_step_alone():
    first, again, other = (build(run_config(BALANCES["dropout"], seed=seed)) for seed in (0, 0, 1))
    forwards = [first.coefficients(step).tolist() for step in range(50)]
    backwards = [again.coefficients(step).tolist() for step in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert forwards != [other.coefficients(step).tolist() for step in range(50)]
    assert len({tuple(row) for row in forwards}) > 5


def test_dropout_combines_by_its_coefficients():
    config = run_config(BALANCES["dropout"])
    rule, batch = build(config), scored(config)
    for step in range(5):
        expected = batch.advantages @ rule.coefficients(step).double()
        torch.testing.assert_close(rule.combine(step, batch).advantage, expected, rtol=1e-12, atol=1e-12)


def test_min_variance_has_the_smallest_variance_and_smooths():
    config = run_config({"type": "min_variance", "ema_decay": 0.0})
    rule, batch = build(config), scored(config)
    unit = batch.advantages / batch.advantages.square().mean(0).sqrt()
    alpha = rule.combine(0, batch).coefficients
    assert alpha.sum().item() == pytest.approx(1.0)
    dice = torch.Generator().manual_seed(0)
    others = torch.rand(500, 4, generator=dice, dtype=torch.float64)
    others = torch.cat([torch.eye(4, dtype=torch.float64), others / others.sum(1, keepdim=True)])
    assert (unit @ alpha).square().mean() <= (unit @ others.T).square().mean(0).min() + 1e-12

    slow = build(run_config({"type": "min_variance", "ema_decay": 0.9}))
    answer = slow.combine(0, batch)
    expected = 0.9 / 4 + 0.1 * alpha
    torch.testing.assert_close(answer.advantage, batch.advantages @ expected)
    assert slow.coefficients(0).tolist() == [0.25] * 4, "nothing moves before the update is applied"
    slow.commit(answer.state)
    torch.testing.assert_close(slow.coefficients(1), expected)


def gradients(g):
    """A batch whose per-reward gradients are the rows of g [K, P]."""
    gram = g.double() @ g.double().T
    return RewardGradients(g, torch.zeros(g.shape[1]), gram.diagonal().sqrt(), gram, None, None)


UNEQUAL = torch.diag(torch.tensor([1.0, 1.0, 2.0, 4.0], dtype=torch.float64))


def test_marble_takes_its_settings_from_the_config():
    balance = {"type": "marble", "refresh_every": 4, "ema_decay": 0.5, "uniform_after": 9}
    rule = build(run_config(balance, adv_clip=2.0))
    assert [step for step in range(20) if rule.needs_gradients(step)] == [0, 4, 8]
    rule.commit(rule.weigh(0, gradients(UNEQUAL)).state)
    assert rule.coefficients(1).tolist() == pytest.approx([0.25] * 4)
    assert rule.coefficients(9).tolist() == [0.25] * 4


def test_marble_without_normalisation():
    """Raw gradients of squared lengths 1, 1, 4, 16: alpha* is proportional to 1, 1, 1/4, 1/16; no rescaling."""
    rule = build(run_config({"type": "marble_no_norm", "ema_decay": 0.0}))
    answer = rule.weigh(0, gradients(UNEQUAL))
    expected = torch.tensor([16.0, 16.0, 4.0, 1.0]) / 37
    assert answer.weights.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    rule.commit(answer.state)
    assert rule.coefficients(1).tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert not rule.never_opposes(rule.settings)


def test_marble_combines_by_the_smoothed_coefficients():
    config = run_config({"type": "marble"})
    rule, batch = build(config), scored(config)
    g = torch.eye(4, dtype=torch.float64) + torch.linspace(0, 1, 4, dtype=torch.float64)[:, None]
    answer = rule.weigh(0, gradients(g))
    assert answer.coefficients.std() > 0.01
    assert rule.coefficients(1).tolist() == [0.25] * 4, "nothing moves before the update is applied"
    rule.commit(answer.state)
    combination = rule.combine(1, batch)
    expected = batch.advantages @ answer.coefficients
    torch.testing.assert_close(combination.advantage, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(rule.coefficients(1), answer.coefficients)

    resumed = build(config)
    resumed.load_state_dict(rule.state_dict())
    assert torch.equal(resumed.combine(1, batch).advantage, combination.advantage)


def test_unit_mean_gives_every_reward_the_same_length():
    config = run_config({"type": "unit_mean", "ema_decay": 0.0})
    rule, batch = build(config), scored(config)
    answer = rule.weigh(0, gradients(UNEQUAL))
    update = answer.weights @ UNEQUAL
    assert update.tolist() == pytest.approx([2 / 4] * 4), "unit gradients, a quarter each, times the mean length 2"
    rule.commit(answer.state)
    weights = torch.tensor([2.0, 2.0, 1.0, 0.5], dtype=torch.float64) / 4
    torch.testing.assert_close(rule.combine(1, batch).advantage, batch.advantages @ weights)


def test_unit_mean_leaves_out_a_reward_without_a_gradient_and_remembers_its_length():
    rule = build(run_config({"type": "unit_mean", "ema_decay": 0.0}))
    rule.commit(rule.weigh(0, gradients(UNEQUAL)).state)
    silent = UNEQUAL.clone()
    silent[3] = 0
    answer = rule.weigh(10, gradients(silent))
    assert answer.weights[3] == 0
    assert (answer.weights @ silent).tolist() == pytest.approx([4 / 9, 4 / 9, 4 / 9, 0.0])
    rule.commit(answer.state)
    state = rule.state_dict()
    assert state["norms"] == pytest.approx([1.0, 1.0, 2.0, 4.0])


@pytest.mark.parametrize("name", BALANCES)
def test_state_round_trip(name):
    config = run_config(BALANCES[name])
    first, second, batch = build(config), build(config), scored(config)
    if first.needs_gradients(0):
        first.commit(first.weigh(0, gradients(UNEQUAL)).state)
    if not first.needs_gradients(1):
        first.commit(first.combine(1, batch).state)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.load_tensors({name: tensor.clone() for name, tensor in first.tensors().items()})
    assert torch.equal(first.combine(4, batch).advantage, second.combine(4, batch).advantage)


@pytest.mark.parametrize("name", BALANCES)
def test_an_answer_changes_nothing(name):
    config = run_config(BALANCES[name])
    rule, batch = build(config), scored(config)
    before = json.dumps(rule.state_dict())
    first = rule.combine(3, batch)
    if rule.needs_gradients(0):
        rule.weigh(0, gradients(UNEQUAL))
    assert json.dumps(rule.state_dict()) == before
    assert torch.equal(rule.combine(3, batch).advantage, first.advantage)


@pytest.mark.parametrize("name", BALANCES)
def test_a_rule_has_words_for_people(name):
    rule = RULES.part_of(run_config(BALANCES[name]).balance)
    assert rule.label
    assert rule.about
    assert rule.Settings.__doc__


def test_the_weighted_sum_beside_a_rule_has_the_weights_that_the_run_has():
    for balance, expected in (
        ({"type": "marble", "probe_weights": WEIGHTS}, WEIGHTS),
        ({"type": "weighted_sum", "weights": WEIGHTS}, WEIGHTS),
        ({"type": "gdpo", "weights": WEIGHTS}, {}),  # those are weights of advantages
    ):
        settings = run_config(balance).balance
        assert RULES.part_of(settings).sum_weights(settings) == expected
