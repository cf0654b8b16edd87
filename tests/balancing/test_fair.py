"""Fair balancing: momenta, shares and weights, alone and as a rule of the trainer."""

import pytest
import torch

from marble_rl import FairHarmonizer
from marble_rl.balancing.fair import Fair, FairSettings
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.gradients.products import gram

NAMES = ("ocr", "geneval", "clip")


def batch(seed, rewards=3, size=50, scale=(1.0, 1.0, 1.0)):
    g = torch.Generator().manual_seed(seed)
    common = torch.randn(1, size, generator=torch.Generator().manual_seed(99))
    return (torch.randn(rewards, size, generator=g) + common) * torch.tensor(scale[:rewards])[:, None]


def as_gradients(g):
    products = gram(g)
    return RewardGradients(g, torch.zeros(g.shape[1]), products.diagonal().sqrt(), products, None, None)


def test_weights_are_those_of_the_equations():
    """Three batches, written out with plain averages and a plain fixed-point iteration."""
    fair, b, ridge = FairHarmonizer(NAMES, momentum=0.8, ridge=0.05, stored_as=torch.float32), 0.8, 0.05
    m = torch.zeros(3, 50, dtype=torch.float64)
    for seed in range(3):
        g = batch(seed)
        m = b * m + (1 - b) * g.double()
        result = fair.update(g)
    n = m.norm(dim=1)
    u = (1 - ridge) * (m @ m.T / n[:, None] / n[None, :]) + ridge * torch.eye(3, dtype=torch.float64)
    a = torch.ones(3, dtype=torch.float64)
    for _ in range(2000):
        a = (a * (1 / (u @ a))).sqrt()
    torch.testing.assert_close(result.shares, a, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.weights, a * n.mean() / n / 3, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.momentum_norms, n, rtol=1e-6, atol=1e-6)


def test_half_precision_changes_shares_by_less_than_a_hundredth():
    """Also after many batches: rounding errors are forgotten as fast as the batches."""
    dice = torch.Generator().manual_seed(0)
    rounded, exact = FairHarmonizer(NAMES), FairHarmonizer(NAMES, stored_as=torch.float32)
    assert rounded.momenta.stored_as == torch.bfloat16
    common = torch.randn(1, 2000, generator=dice)
    for _ in range(200):
        g = torch.tensor([[1.0], [1e-4], [-0.2]]) * (common + 3 * torch.randn(3, 2000, generator=dice))
        one, other = rounded.update(g), exact.update(g)
        torch.testing.assert_close(one.shares, other.shares, rtol=0.01, atol=0)
        torch.testing.assert_close(one.weights, other.weights, rtol=0.01, atol=0)


def test_one_reward_keeps_its_gradient():
    fair = FairHarmonizer(["clip"])
    for seed in range(3):
        assert fair.update(batch(seed, rewards=1)).weights.tolist() == pytest.approx([1.0])


def test_the_scale_of_a_reward_does_not_matter():
    plain, scaled = FairHarmonizer(NAMES), FairHarmonizer(NAMES)
    for seed in range(5):
        one = plain.update(batch(seed))
        other = scaled.update(batch(seed, scale=(1.0, 4.0, 0.5)))
    torch.testing.assert_close(one.shares, other.shares, rtol=1e-5, atol=1e-5)


def test_a_reward_that_is_rarely_active_fades_but_is_not_boosted_without_end():
    fair = FairHarmonizer(NAMES)
    fair.update(batch(0))
    for seed in range(1, 60):
        g = batch(seed)
        g[1] = 0
        result = fair.update(g)
    assert result.momentum_norms[1] < 0.02 * result.momentum_norms[0]
    assert result.weights[1] <= 10 * result.shares[1] / 3 * (1 + 1e-9)


def test_rewards_without_a_momentum_are_left_out():
    fair = FairHarmonizer(NAMES)
    g = batch(0)
    g[2] = 0
    result = fair.update(g)
    assert result.weights[2] == 0
    assert result.shares[2] == 0
    alone = FairHarmonizer(NAMES[:2]).update(g[:2])
    torch.testing.assert_close(result.weights[:2], alone.weights)
    assert FairHarmonizer(NAMES).update(torch.zeros(3, 5)).weights.tolist() == [0.0, 0.0, 0.0]


def test_a_silent_reward_is_not_opposed_meanwhile():
    """Reward 0 is silent in the second batch, where the others point against it."""
    fair = FairHarmonizer(["a", "b"], momentum=0.9, ridge=1e-3)
    for _ in range(20):
        fair.update(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    g = torch.tensor([[0.0, 0.0], [-0.5, 1.0]])
    assert fair.weigh(g).progress[0] > 0


def test_opposed_rewards_shrink_the_step():
    fair = FairHarmonizer(["a", "b"])
    g = torch.tensor([[1.0, 0.01], [-1.0, 0.01]])
    result = fair.update(g)
    assert float((result.weights.float() @ g).norm()) < 0.2
    assert result.common == pytest.approx(0.01, rel=1e-2)


def test_a_reward_that_is_switched_off_leaves_at_once():
    fair = FairHarmonizer(NAMES)
    for seed in range(3):
        fair.update(batch(seed))
    g = batch(3)
    g[0] = 0
    result = fair.weigh(g, off=["ocr"])
    assert result.weights[0] == 0
    fair.commit(g, off=["ocr"])
    assert fair.state_dict()["ocr"].abs().max() == 0
    assert fair.state_dict()["clip"].abs().max() > 0


def test_weighing_changes_nothing_and_state_is_restored_exactly():
    first, second = FairHarmonizer(NAMES), FairHarmonizer(NAMES)
    for seed in range(4):
        first.weigh(batch(seed + 50))
        first.update(batch(seed))
    second.load_state_dict({name: m.clone() for name, m in first.state_dict().items()})
    assert torch.equal(first.weigh(batch(9)).weights, second.weigh(batch(9)).weights)
    for seed in range(20, 24):
        assert torch.equal(first.update(batch(seed)).weights, second.update(batch(seed)).weights)
    with pytest.raises(ValueError, match="not of"):
        FairHarmonizer(["other"]).load_state_dict(first.state_dict())


def test_priorities():
    g = torch.eye(3)
    result = FairHarmonizer(NAMES, priorities={"ocr": 4.0}).update(g)
    assert float(result.shares[0] / result.shares[1]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="nobody"):
        FairHarmonizer(NAMES, priorities={"nobody": 2.0})
    with pytest.raises(ValueError, match="positive"):
        FairHarmonizer(NAMES, priorities={"ocr": 0.0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"momentum": 1.0}, "momentum"), ({"ridge": 0.0}, "ridge"), ({"rewards": ["a", "a"]}, "distinct")],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        FairHarmonizer(**{"rewards": NAMES, **settings})


def test_gradients_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\[3, P\]"):
        FairHarmonizer(NAMES).update(torch.zeros(2, 5))


def test_the_rule_commits_only_what_was_applied():
    rule = Fair(FairSettings(type="fair"), NAMES, adv_clip=5.0, seed=0)
    weighing = rule.weigh(0, as_gradients(batch(0)))
    assert rule.tensors() == {}
    rule.commit(weighing.state)
    assert set(rule.tensors()) == set(NAMES)
    torch.testing.assert_close(rule.tensors()["ocr"].float(), 0.1 * batch(0)[0], rtol=0.005, atol=0)


def adamw(gradients, lr=1e-2):
    weight = torch.nn.Parameter(torch.zeros(gradients[0].shape[-1]))
    optimizer = torch.optim.AdamW([weight], lr=lr)
    steps = []
    for gradient in gradients:
        weight.grad = gradient
        before = weight.detach().clone()
        optimizer.step()
        steps.append(float((weight.detach() - before).norm()))
    return steps


def test_after_opposed_steps_aligned_ones_regain_their_length():
    """While two rewards cancel, AdamW's second moment sees small gradients; it must not make the first aligned steps
    longer than they would be in a run that was aligned throughout, for longer than its first moment lasts."""
    fair = FairHarmonizer(["a", "b"])
    opposed, aligned = torch.tensor([[1.0, 0.05], [-1.0, 0.05]]), torch.tensor([[1.0, 0.05], [1.0, 0.05]])
    updates = []
    for step in range(120):
        g = opposed if step < 50 else aligned
        updates.append(fair.update(g).weights.float() @ g)
    usual = adamw([updates[-1]] * 120)[-1]
    steps = adamw(updates)
    assert max(steps[50:]) < 12 * usual
    assert steps[-1] < 3 * usual
