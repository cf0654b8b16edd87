"""A run that is out of memory stops with everything saved, says what helps, and goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marble_rl.models.sd3 import SD3Model
from runs import marble, train, write_config


def test_no_memory_for_gradients(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stops with everything saved, says what helps, and goes on with it."""
    run = tmp_path / "run"
    predict = SD3Model.predict

    def starved(self: SD3Model, x: Tensor, *rest: Any) -> Tensor:
        if torch.is_grad_enabled() and len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words.")
        return predict(self, x, *rest)

    monkeypatch.setattr(SD3Model, "predict", starved)
    outcome = marble("train", config_file, "--out", run, "--set", "trainer.steps=2")
    assert outcome.code == 3
    assert "stopped: out of memory in the stage 'gradients'. What helps: a smaller trainer.micro_batch" in outcome.err
    assert "model.gradient_checkpointing: true" in outcome.err
    assert "(CUDA out of memory. Tried to allocate 2.00 GiB.)" in outcome.err
    assert (run / "checkpoints" / "step-0" / "manifest.json").exists()
    changes = ("--set", "trainer.micro_batch=2", "--set", "model.gradient_checkpointing=true")
    train(config_file, run, "--resume", "--set", "trainer.steps=2", *changes)


def test_no_memory_for_a_reward(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = [{"name": "greedy", "type": "rewards_for_tests:greedy", "retries": 0}]
    outcome = marble("train", write_config(tmp_path / "c.yaml", tiny_sd3, rewards=rewards), "--out", tmp_path / "run")
    assert outcome.code == 3
    assert "out of memory in the stage 'rewards'. What helps: a smaller batch_size of the reward" in outcome.err
    assert "reward 'greedy'" in outcome.err
