"""The micro-batch that finds what fits in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marble_rl.config import load_config
from marble_rl.distributed.world import World
from marble_rl.errors import OutOfMemory
from marble_rl.gradients.accumulate import GradientAccumulator
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.models.precision import MemorySettings
from marble_rl.models.sd3 import SD3Model
from marble_rl.runs.checkpoint import load_newest
from marble_rl.training.batch import training_batch
from marble_rl.training.trainer import Trainer
from runs import lora_bytes, train
from stages import policy_gradients, trained_on

CPU = torch.device("cpu")


@pytest.mark.full
def test_the_micro_batch_finds_what_fits(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halved until it fits, with the update of a run that was told so; a resumed run knows the size."""
    predict = SD3Model.predict
    sizes: list[int] = []

    def starved(self: SD3Model, x: Tensor, *rest: Any) -> Tensor:
        if torch.is_grad_enabled():
            sizes.append(len(x))
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return predict(self, x, *rest)

    train(config_file, tmp_path / "told", "--set", "trainer.steps=3", "--set", "trainer.micro_batch=2")
    monkeypatch.setattr(SD3Model, "predict", starved)
    auto = ("--set", "trainer.micro_batch=auto")
    outcome = train(config_file, tmp_path / "auto", "--set", "trainer.steps=2", *auto)
    assert [size for size in sizes if size > 2] == [4, 4], "a half holds 4 samples: 8 and 4 a pass are too many"
    assert "2 samples a training pass from here on" in outcome.err
    sizes.clear()
    train(config_file, tmp_path / "auto", "--resume", "--set", "trainer.steps=3", *auto)
    assert max(sizes) == 2
    assert lora_bytes(tmp_path / "auto") == lora_bytes(tmp_path / "told")


def test_an_automatic_micro_batch_does_not_begin_with_a_size_that_was_set() -> None:
    def sized(setting: Any) -> MicroBatch:
        return MicroBatch(setting, 16, lambda message: None)

    auto = sized("auto")
    auto.load_state_dict(sized(1).state_dict())
    assert auto.size == 16
    auto.size = 4
    again = sized("auto")
    again.load_state_dict(auto.state_dict())
    assert again.size == 4


def automatic(samples: int, say: Any = lambda message: None) -> MicroBatch:
    return MicroBatch("auto", samples, say)


def test_a_stop_for_want_of_memory_elsewhere_is_no_reason_for_a_smaller_micro_batch() -> None:
    micro_batch = automatic(16)

    def stopped(size: int) -> None:
        raise OutOfMemory("rank 1 of 2: not enough memory")

    with pytest.raises(OutOfMemory):
        micro_batch.with_retries(stopped)
    assert micro_batch.size == 16


def test_an_exchange_is_not_made_twice_where_memory_runs_out_after_it(
    tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other processes make it once."""
    model, rollout, policy, _ = trained_on(tiny_sd3, MemorySettings())
    exchanges: list[int] = []

    class Two(World):
        size = 2

        def sum_(self, tensor: Tensor) -> None:
            exchanges.append(tensor.numel())

    def starved(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    config = NftSettings(timesteps_per_sample=1)
    batch = training_batch(rollout, 0, Nft(config), seed=5, step=9)
    micro_batch = automatic(8)
    monkeypatch.setattr(GradientAccumulator, "finish", starved)
    with pytest.raises(torch.OutOfMemoryError):
        policy_gradients(
            model, policy, batch, torch.ones(8, 1), config, per_column=False, micro_batch=micro_batch, world=Two()
        )
    assert len(exchanges) == 1
    assert micro_batch.size == 8


def test_all_processes_go_on_with_the_smallest_micro_batch(config_file: Path, tmp_path: Path) -> None:
    """So that the size in the checkpoint is that of all, whenever it is written."""

    class Pressed(World):
        """Another process has come down to 2 samples a pass."""

        def largest(self, value: int) -> int:
            return max(value, -2)

    said: list[str] = []
    for micro_batch, size in ((automatic(16, said.append), 2), (automatic(1, said.append), 1)):
        micro_batch.agree(Pressed())
        assert micro_batch.size == size
    assert said == ["out of memory on another rank: 2 samples a training pass from here on (trainer.micro_batch: auto)"]
    told = MicroBatch(8, 16, said.append)
    told.agree(Pressed())
    assert told.size == 8

    trainer = Trainer(
        load_config(config_file, ["trainer.micro_batch=auto", "trainer.steps=1"]), tmp_path / "run", world=Pressed()
    )
    trainer.train()
    saved = load_newest(tmp_path / "run" / "checkpoints", said.append)
    assert saved is not None
    assert saved.state["micro_batch"] == {"size": 2}
