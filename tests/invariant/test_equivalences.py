"""Settings that must not change the result, and special cases that must be the plain algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runs import base_config, lora_bytes, metrics, train, write_config


def weights(run: Path) -> torch.Tensor:
    """All EMA weights of a run as one vector, in float64; in those of lora/ B is multiplied by alpha / rank."""
    newest = max((run / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
    tensors = load_file(newest / "adapters.safetensors")
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors) if name.startswith("ema/")])


def assert_same_weights(a: Path, b: Path, tolerance: float) -> None:
    difference = (weights(a) - weights(b)).norm() / weights(b).norm()
    assert difference < tolerance


def test_accumulation(config_file: Path, tmp_path: Path) -> None:
    """Micro-batches of 1, of 3 (which leave a remainder) and of everything: a refresh and an ordinary step.

    Over one rollout only: in the next one a rounding error may turn a pixel, and with it an advantage.
    """
    for size in (1, 3, 64):
        train(config_file, tmp_path / str(size), "--set", f"trainer.micro_batch={size}", "--set", "trainer.steps=2")
    assert_same_weights(tmp_path / "1", tmp_path / "64", 1e-5)
    assert_same_weights(tmp_path / "3", tmp_path / "64", 1e-5)
    for a, b in zip(metrics(tmp_path / "1"), metrics(tmp_path / "64"), strict=True):
        assert a.keys() == b.keys()
        for key in [key for key in a if key.startswith(("alpha", "grad_norm", "heldout", "loss"))]:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key


def test_fused_gradients_are_those_of_separate_passes(config_file: Path, tmp_path: Path) -> None:
    """Over one rollout, two refreshes: the second one off-policy, so that there is a shared part."""
    settings = ["--set", "balance.refresh_every=1", "--set", "trainer.steps=2", "--set", "loss.kl_weight=0.1"]
    for gradients in ("fused", "passes"):
        train(config_file, tmp_path / gradients, *settings, "--set", f"balance.gradients={gradients}")
    assert_same_weights(tmp_path / "fused", tmp_path / "passes", 1e-5)
    for a, b in zip(metrics(tmp_path / "fused"), metrics(tmp_path / "passes"), strict=True):
        assert a.keys() == b.keys()
        for key in [key for key in a if not key.startswith("time")]:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key


def test_one_reward_is_plain_nft(tiny_sd3: Path, tmp_path: Path) -> None:
    """With one reward every way of balancing is DiffusionNFT: same weights as a single scalar reward. Over one rollout:
    in the next one a rounding error may turn a pixel."""
    reward = [{"name": "bright", "type": "brightness"}]
    for balance in ("marble", "weighted_sum", "fixed"):
        config = write_config(tmp_path / f"{balance}.yaml", tiny_sd3, rewards=reward, balance={"type": balance})
        train(config, tmp_path / balance, "--set", "trainer.steps=2")
    assert_same_weights(tmp_path / "marble", tmp_path / "weighted_sum", 1e-5)
    assert_same_weights(tmp_path / "fixed", tmp_path / "weighted_sum", 1e-6)


def test_fair_balancing_of_one_reward_is_adamw_with_clipping(tiny_sd3: Path, tmp_path: Path) -> None:
    """Over one rollout: in the next one a rounding error may turn a pixel."""
    reward = [{"name": "bright", "type": "brightness"}]
    for balance in ("fair", "weighted_sum"):
        config = write_config(tmp_path / f"{balance}.yaml", tiny_sd3, rewards=reward, balance={"type": balance})
        train(config, tmp_path / balance, "--set", "trainer.steps=2", "--set", "optimizer.grad_clip=0.001")
    assert all(line["update/norm"] > 0.001 for line in metrics(tmp_path / "weighted_sum"))
    assert_same_weights(tmp_path / "fair", tmp_path / "weighted_sum", 1e-6)


@pytest.mark.full
def test_fixed_coefficients_on_one_reward_are_that_reward_alone(config_file: Path, tmp_path: Path) -> None:
    train(config_file, tmp_path / "a", "--set", "balance={type: single, reward: bright}")
    train(config_file, tmp_path / "b", "--set", "balance={type: fixed, coefficients: {bright: 1}}")
    train(config_file, tmp_path / "c", "--set", "balance={type: sequential, stages: [{reward: bright, steps: 1}]}")
    assert lora_bytes(tmp_path / "a") == lora_bytes(tmp_path / "b") == lora_bytes(tmp_path / "c")


def test_uniform_stage_from_the_start_is_fixed_uniform(config_file: Path, tmp_path: Path) -> None:
    train(config_file, tmp_path / "a", "--set", "balance.uniform_after=0")
    train(config_file, tmp_path / "b", "--set", "balance={type: fixed}")
    assert_same_weights(tmp_path / "a", tmp_path / "b", 1e-6)


BALANCES: dict[str, dict[str, Any]] = {
    "marble": {"type": "marble", "refresh_every": 2},
    "solved in every step": {"type": "marble", "refresh_every": 1},
    "fair": {"type": "fair"},
    "fair, with a longer memory": {"type": "fair", "momentum": 0.98},
    "without normalisation": {"type": "marble_no_norm", "refresh_every": 2},
    "divided by norms": {"type": "marble", "refresh_every": 2, "apply": "alpha_over_norm"},
    "unit gradients, equal": {"type": "unit_mean", "refresh_every": 2},
    "late uniform stage": {"type": "marble", "refresh_every": 2, "uniform_after": 3},
    "weighted sum": {"type": "weighted_sum"},
    "weights 1:2:2": {"type": "weighted_sum", "weights": {"bright": 2, "colour": 2}},
    "single": {"type": "single", "reward": "colour"},
    "sequential": {"type": "sequential", "stages": [{"reward": "small", "steps": 2}, {"reward": "bright", "steps": 2}]},
    "fixed": {"type": "fixed"},
    "gdpo": {"type": "gdpo"},
    "dropout": {"type": "dropout", "rate": 0.5},
    "smallest variance": {"type": "min_variance"},
}


@pytest.mark.full
def test_every_balance_trains_and_differs(tiny_sd3: Path, tmp_path: Path) -> None:
    """One code path, different settings: each runs to the end, and no two give the same weights."""
    results = {}
    for name, balance in BALANCES.items():
        config = write_config(tmp_path / f"{name}.yaml", tiny_sd3, balance=balance)
        train(config, tmp_path / name, "--set", "trainer.steps=4")
        results[name] = lora_bytes(tmp_path / name)
        lines = metrics(tmp_path / name)
        assert len(lines) == 4
        coefficients = {key: lines[-1][key] for key in lines[-1] if key.startswith("alpha_bar/")}
        if coefficients:
            assert sum(coefficients.values()) == pytest.approx(1.0, abs=1e-12)
    assert len(set(results.values())) == len(BALANCES)


def test_refresh_metrics_are_on_refresh_steps_only(config_file: Path, tmp_path: Path) -> None:
    train(config_file, tmp_path / "run")
    every = base_config(Path())["balance"]["refresh_every"]
    wanted = {
        *(f"{kind}/{name}" for kind in ("alpha", "grad_norm", "guard/no_signal") for name in ("small", "bright")),
        *(f"{ws}harmony/{figure}" for ws in ("", "ws_") for figure in ("min_cos", "mean_cos", "var_cos", "conflict")),
        *(f"{ws}heldout/{figure}" for ws in ("", "ws_") for figure in ("min_cos", "mean_cos", "conflict")),
        "qp/norm",
        "qp/kkt_residual",
        "qp/stationary",
        "signal/bright",
    }
    always = {"reward/bright", "alpha_bar/bright", "loss/policy", "loss/kl", "guard/clamped", "update/norm"}
    for line in metrics(tmp_path / "run"):
        assert always <= line.keys()
        assert (wanted <= line.keys()) == (line["step"] % every == 0)
        assert wanted.isdisjoint(line) or line["step"] % every == 0


def test_kl_weight_zero_skips_the_reference_and_logs_zero(config_file: Path, tmp_path: Path) -> None:
    train(config_file, tmp_path / "run", "--set", "loss.kl_weight=0", "--set", "trainer.steps=2")
    assert [line["loss/kl"] for line in metrics(tmp_path / "run")] == [0.0, 0.0]
