"""A run that cannot go on stops with exit code 3, everything saved, and goes on once the cause is gone."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from marble_rl.config import load_config
from marble_rl.distributed.world import World
from marble_rl.models.lora import LoraPolicy
from marble_rl.training.policy_gradients import GradientStage
from marble_rl.training.trainer import Trainer
from marble_rl.training.update import Updater
from runs import base_config, lora_bytes, marble, metrics, start, train, write_config


def with_reward(path: Path, model: Path, what: str, **settings: Any) -> Path:
    """One reward that misbehaves in the third rollout (4 groups each: after 8 batches)."""
    rewards = [
        {"name": "bright", "type": "brightness"},
        {"name": "odd", "type": "rewards_for_tests:After", "params": {"what": what, "calls": 8}, **settings},
    ]
    return write_config(path, model, rewards=rewards)


@pytest.mark.parametrize(
    ("what", "settings", "says"),
    [
        ("raise", {}, "RuntimeError: the reward model fell over"),
        pytest.param("nan", {}, "returned nan", marks=pytest.mark.full),
        pytest.param("short", {"retries": 0}, "returned 3 scores for 4 images", marks=pytest.mark.full),
        ("hang", {"timeout": 0.2, "retries": 0}, "no answer within 0.2 seconds"),
    ],
)
def test_failing_reward(tiny_sd3: Path, tmp_path: Path, what: str, settings: dict[str, Any], says: str) -> None:
    run = tmp_path / "run"
    config = with_reward(tmp_path / "bad.yaml", tiny_sd3, what, **settings)
    outcome = marble("train", config, "--out", run)
    assert outcome.code == 3
    assert "reward 'odd'" in outcome.err
    assert says in outcome.err
    assert "of prompt" in outcome.err
    assert (run / "checkpoints" / "step-4" / "manifest.json").exists()
    assert len(metrics(run)) == 4

    # The same reward, now behaving (the counter starts anew in a new process): the run goes on to the end.
    train(config, run, "--resume", "--set", "trainer.steps=6")
    train(with_reward(tmp_path / "good.yaml", tiny_sd3, "nothing"), tmp_path / "good", "--set", "trainer.steps=6")
    assert lora_bytes(run) == lora_bytes(tmp_path / "good")


@pytest.mark.full
def test_a_passing_fault_is_retried(tiny_sd3: Path, tmp_path: Path) -> None:
    train(with_reward(tmp_path / "a.yaml", tiny_sd3, "once"), tmp_path / "a")
    train(with_reward(tmp_path / "b.yaml", tiny_sd3, "nothing"), tmp_path / "b")
    assert lora_bytes(tmp_path / "a") == lora_bytes(tmp_path / "b")


def test_diverged_weights_stop_before_anything_is_scored(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = marble("train", config_file, "--out", run, "--set", "optimizer.lr=1e30", "--set", "rollout.updates=1")
    assert outcome.code == 3
    assert "not finite" in outcome.err
    assert (run / "checkpoints" / "step-1" / "manifest.json").exists()


def test_non_finite_gradient_stops_before_the_update(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = marble("train", config_file, "--out", run, "--set", "optimizer.lr=1e30", "--set", "rollout.updates=4")
    assert outcome.code == 3
    assert "not finite" in outcome.err or "not applied" in outcome.err
    assert list(run.glob("nonfinite-step-*.safetensors"))
    done = len(metrics(run))
    assert (run / "checkpoints" / f"step-{done}" / "manifest.json").exists()


def starved(real: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The same function, for which memory runs out in one call, counted from 0."""
    calls = iter(range(1000))

    def function(*arguments: Any, **settings: Any) -> Any:
        if next(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*arguments, **settings)

    return function


@pytest.mark.parametrize(
    ("balance", "place", "real"),
    [
        (
            "{type: min_variance}",
            "marble_rl.training.policy_gradients.GradientStage.combined",
            GradientStage.combined,
        ),
        (
            "{type: marble, refresh_every: 3, apply: alpha_over_norm}",
            "marble_rl.training.update.Updater.apply",
            Updater.apply,
        ),
        pytest.param(
            "{type: unit_mean, refresh_every: 3}",
            "marble_rl.training.update.Updater.apply",
            Updater.apply,
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_step_that_failed_before_its_update_has_moved_nothing(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, balance: str, place: str, real: Any
) -> None:
    """In step 3 coefficients are refreshed; a resumed run makes that step again, and refreshes them once."""
    settings = ("--set", f"balance={balance}", "--set", "trainer.steps=6")
    train(config_file, tmp_path / "whole", *settings)
    with monkeypatch.context() as patch:
        patch.setattr(place, starved(real, call=3))
        outcome = marble("train", config_file, "--out", tmp_path / "run", *settings)
    assert outcome.code == 3
    assert "out of memory in the stage" in outcome.err
    assert len(metrics(tmp_path / "run")) == 3
    train(config_file, tmp_path / "run", *settings, "--resume")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert lora_bytes(tmp_path / "run") == lora_bytes(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("call", [3, pytest.param(4, marks=pytest.mark.full)])
def test_an_update_left_half_made_is_not_saved(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """After two calls at the start and one of the first step, the EMA and the old policy follow the second step's
    weights, which have moved already. The checkpoint before stays; the resumed run is the uninterrupted one."""
    settings = ("--set", "rollout.updates=2", "--set", "trainer.save_every=1")
    train(config_file, tmp_path / "whole", *settings)
    with monkeypatch.context() as patch:
        patch.setattr(LoraPolicy, "blend", starved(LoraPolicy.blend, call))
        outcome = marble("train", config_file, "--out", tmp_path / "run", *settings)
    assert outcome.code == 3
    assert "out of memory in the stage 'update'" in outcome.err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]
    train(config_file, tmp_path / "run", *settings, "--resume")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert lora_bytes(tmp_path / "run") == lora_bytes(tmp_path / "whole")


def test_no_memory_for_an_evaluation(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step was made: it is saved and logged."""
    monkeypatch.setattr("marble_rl.evaluation.evaluate.try_sample", starved(lambda: None, call=0))
    outcome = marble("train", config_file, "--out", tmp_path / "run", "--set", "trainer.eval_every=2")
    assert outcome.code == 3
    assert "out of memory in the stage 'evaluate'. What helps: a smaller evaluation.batch_size" in outcome.err
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1]
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "manifest.json").exists()


class Talkative(World):
    """Counts exchanges."""

    exchanges = 0

    def gather(self, value: Any) -> list[Any]:
        self.exchanges += 1
        return [value]

    def largest(self, value: int) -> int:
        self.exchanges += 1
        return value


def test_an_evaluation_that_fails_unforeseen_asks_nothing_of_other_processes(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sharded base model they wait in the middle of a pass, and would never answer."""
    world, before = Talkative(), []

    def broken(*_: Any, **__: Any) -> None:
        before.append(world.exchanges)
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr("marble_rl.training.evaluations.evaluate", broken)
    config = load_config(config_file, ["trainer.eval_every=1"])
    with pytest.raises(ZeroDivisionError):
        Trainer(config, tmp_path / "run", world=world).train()
    assert before == [world.exchanges]


@pytest.mark.full
def test_full_disk_during_a_checkpoint(tiny_sd3: Path, tmp_path: Path) -> None:
    """The limit on file sizes stands in for the end of the disk: the first checkpoint fits, the second does not."""
    run = tmp_path / "run"
    trainer = {**base_config(tiny_sd3)["trainer"], "steps": 6}
    config = write_config(tmp_path / "config.yaml", tiny_sd3, trainer=trainer, logging={"images_every": None})
    train(config, run, "--set", "trainer.steps=3")
    size = (run / "checkpoints" / "step-3" / "adapters.safetensors").stat().st_size

    process = start(
        "train",
        config,
        "--out",
        run,
        "--resume",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1)),
    )
    output, _ = process.communicate()
    assert process.returncode == 3, output
    assert "cannot write checkpoint" in output
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-3"]

    train(config, run, "--resume")
    train(config, tmp_path / "whole")
    assert lora_bytes(run) == lora_bytes(tmp_path / "whole")


def test_a_reward_that_changes_the_current_folder_moves_no_file(
    tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("goes_elsewhere", "darkness"):
        monkeypatch.chdir(tmp_path)
        rewards = [{"name": "dark", "type": f"rewards_for_tests:{name}"}]
        write_config(tmp_path / f"{name}.yaml", tiny_sd3, rewards=rewards)
        train(Path(f"{name}.yaml"), Path(name), "--set", "trainer.steps=3")
    assert lora_bytes(tmp_path / "goes_elsewhere") == lora_bytes(tmp_path / "darkness")
    assert len(metrics(tmp_path / "goes_elsewhere")) == 3
