"""Stage 8: clipped AdamW, the EMA and the old policy that follow, and the optimizer state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from marble_rl.config.run import OptimizerConfig
from marble_rl.errors import NonFinite
from marble_rl.models import load_model
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.settings import LoraConfig
from marble_rl.rollout.settings import OldPolicyConfig, RolloutConfig
from marble_rl.training.update import Updater


@pytest.fixture
def policy(tiny_sd3: Path) -> LoraPolicy:
    model = load_model(str(tiny_sd3), torch.device("cpu"))
    return LoraPolicy(model.transformer, LoraConfig(rank=1), model.lora_targets, seed=0)


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def gradient_like(policy: LoraPolicy, seed: int = 0) -> torch.Tensor:
    return torch.randn(sum(p.numel() for p in policy.parameters), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("clip", [0.5, None])
def test_update_is_clipped_adamw_and_the_ema_follows(policy: LoraPolicy, clip: float | None) -> None:
    config = OptimizerConfig(lr=0.01, grad_clip=clip, weight_decay=0.1, ema_decay=0.9)
    updater = Updater(policy, config, OldPolicyConfig(), steps=10)
    start, gradient = flat(policy.tensors("default")).clone(), gradient_like(policy)
    norm = updater.apply(gradient, loss=1.0, step=0)
    assert norm == pytest.approx(float(gradient.norm()), rel=1e-6)

    expected = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([expected], lr=0.01, weight_decay=0.1)
    expected.grad = gradient * (1.0 if clip is None else clip / gradient.norm())
    optimizer.step()
    torch.testing.assert_close(flat(policy.tensors("default")), expected.detach(), atol=1e-6, rtol=1e-5)
    # Warm-up: decay (1 + s) / (10 + s) with s = 1 step done.
    ema = (2 / 11) * start + (9 / 11) * expected.detach()
    torch.testing.assert_close(flat(policy.tensors("ema")), ema, atol=1e-6, rtol=1e-5)
    assert torch.equal(flat(policy.tensors("old")), start)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25]), ("cosine", [1, 0.853553, 0.5, 0.146447])],
)
def test_the_learning_rate_follows_its_schedule(policy: LoraPolicy, schedule: str, factors: list[float]) -> None:
    """A fresh AdamW step moves a weight by the learning rate, whatever the gradient."""
    config = OptimizerConfig(lr=0.01, weight_decay=0.0, schedule=schedule)
    for step, factor in enumerate(factors):
        before = flat(policy.tensors("default")).clone()
        Updater(policy, config, OldPolicyConfig(), steps=4).apply(gradient_like(policy), loss=1.0, step=step)
        moved = (flat(policy.tensors("default")) - before).abs().median()
        assert float(moved) == pytest.approx(0.01 * factor, rel=1e-3)


@pytest.mark.parametrize(("value", "loss"), [(float("nan"), 1.0), (float("inf"), 1.0), (0.0, float("nan"))])
def test_nothing_changes_when_something_is_not_finite(policy: LoraPolicy, value: float, loss: float) -> None:
    updater = Updater(policy, OptimizerConfig(), OldPolicyConfig(), steps=10)
    updater.apply(gradient_like(policy), 1.0, 0)
    before = {a: flat(policy.tensors(a)).clone() for a in ("default", "old", "ema")}
    state = {name: tensor.clone() for name, tensor in updater.optimizer_tensors().items()}
    gradient = gradient_like(policy)
    gradient[3] = value
    with pytest.raises(NonFinite, match="not applied"):
        updater.apply(gradient, loss, 1)
    for adapter, weights in before.items():
        assert torch.equal(flat(policy.tensors(adapter)), weights)
    for name, tensor in updater.optimizer_tensors().items():
        assert torch.equal(tensor, state[name])


@pytest.mark.parametrize(
    ("preset", "done", "decay"),
    [
        ("on_policy", 10, 0.0),
        ("default", 100, 0.1),
        ("default", 10_000, 0.5),
        ("slow", 75, 0.0),
        ("slow", 85, 0.075),
        ("slow", 10_000, 0.999),
    ],
)
def test_old_policy_presets(policy: LoraPolicy, preset: str, done: int, decay: float) -> None:
    updater = Updater(policy, OptimizerConfig(lr=0.1), RolloutConfig(old_policy=preset).old_policy_decay, 10)
    updater.apply(gradient_like(policy), 1.0, 0)
    old, new = flat(policy.tensors("old")).clone(), flat(policy.tensors("default"))
    updater.update_old_policy(done)
    torch.testing.assert_close(flat(policy.tensors("old")), decay * old + (1 - decay) * new, atol=1e-6, rtol=1e-5)


def test_optimizer_state_round_trip(policy: LoraPolicy) -> None:
    updater = Updater(policy, OptimizerConfig(), OldPolicyConfig(), steps=10)
    for step in range(3):
        updater.apply(gradient_like(policy, step), 1.0, step)
    weights = flat(policy.tensors("default")).clone()
    saved = {name: tensor.clone() for name, tensor in updater.optimizer_tensors().items()}
    updater.apply(gradient_like(policy, 9), 1.0, 3)
    expected = flat(policy.tensors("default")).clone()

    with torch.no_grad():
        offset = 0
        for p in policy.parameters:
            p.copy_(weights[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
    fresh = Updater(policy, OptimizerConfig(), OldPolicyConfig(), steps=10)
    fresh.load_optimizer_tensors(saved)
    fresh.apply(gradient_like(policy, 9), 1.0, 3)
    assert torch.equal(flat(policy.tensors("default")), expected)
