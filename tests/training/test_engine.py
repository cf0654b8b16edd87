"""Updates, files, seeds, logs and pictures, each alone."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from marble_rl.config.reference import config_reference
from marble_rl.config.run import OptimizerConfig
from marble_rl.errors import NonFinite, StorageFailed
from marble_rl.models import load_model
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.settings import LoraConfig
from marble_rl.rollout.settings import OldPolicyConfig, RolloutConfig
from marble_rl.runs.images import image_grid
from marble_rl.runs.log import Display, MetricsFile
from marble_rl.seeding import derive_seed, generator, normal_rows
from marble_rl.storage import save_safetensors, storage_errors, write_bytes
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
    updater.follow(done)
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


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(1, dtype=torch.bfloat16)}
    metadata = {f"key {i}": str(i) for i in range(9)}
    save_safetensors(tmp_path / "1", tensors, metadata)
    save_safetensors(tmp_path / "2", dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    with safe_open(tmp_path / "1", "pt") as file:
        assert file.metadata() == metadata
        assert torch.equal(file.get_tensor("b"), tensors["b"])
        assert file.get_tensor("a").dtype == torch.bfloat16


def test_a_refused_write_leaves_the_old_file(tmp_path: Path) -> None:
    import resource

    target = tmp_path / "file"
    write_bytes(target, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(StorageFailed, match="the file"), storage_errors("the file"):
            write_bytes(target, b"x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOSPC, "Free some space"), (errno.EDQUOT, "Free some space"), (errno.EACCES, "Fix that")],
)
def test_a_refused_write_names_what_helps(number: int, fix: str) -> None:
    reason = os.strerror(number)
    with pytest.raises(StorageFailed) as failed, storage_errors("the file", "draw again"):
        raise OSError(number, reason, "/somewhere")
    assert str(failed.value) == f"cannot write the file: {reason}. {fix} and draw again"


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    seeds = [derive_seed(*parts) for parts in ((0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 1))]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(0, "a", 11) != derive_seed(0, "a", 1, 1)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    rows = normal_rows([generator(0, "x", i) for i in range(3)], (2, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(rows[1], normal_rows([generator(0, "x", 1)], (2, 2))[0])


def test_metrics_file_drops_what_lies_beyond_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in range(4):
        file.append(step, {"b": 1.0, "a": 0.5})
    with open(path, "a") as torn:
        torn.write('{"step": 4, "rew')
    MetricsFile(path, 2).append(2, {"a": 9.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2] == {"step": 2, "a": 9.0}
    assert list(lines[0]) == ["step", "a", "b"]


@pytest.mark.parametrize("terminal", [True, False])
def test_display_shows_stage_rewards_and_time_left(terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=150, color_system=None)
    with Display(console, total=4, done=1, rewards=["ocr", "bright"], print_every=1) as display:
        with display.stage("rollout"):
            display.within(1, 0.5)
        assert 0.0 <= display.take_times()["time/rollout"] < 5
        assert display.take_times() == {}
        display.step_done(2, {"reward/ocr": 0.25})
        with display.stage("gradients"):
            display._progress.refresh()
    shown = text.getvalue()
    assert "ocr 0.250" in shown
    assert "2/4" in shown
    assert "left" in shown
    assert ("gradients" in shown) == terminal


def test_image_grid() -> None:
    black, white = torch.zeros(3, 16, 16, 3, dtype=torch.uint8), torch.full((1, 16, 16, 3), 255, dtype=torch.uint8)
    grid = image_grid([("a very long prompt " * 30, black), ("", white)])
    assert grid.width == 3 * (96 + 6) + 6
    assert grid.getpixel((20, 60)) == (0, 0, 0)


def test_config_reference_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == config_reference(), "run `make docs`"
