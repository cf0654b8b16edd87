"""Trainings that are killed, or whose disk fails, at the n-th operation on the files of the run."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from runs import write_config
from tools.campaign.kill import (
    KILLED,
    count_operations,
    kill_until_finished,
    results_of,
    run_with_fault,
    run_with_kill,
)


@pytest.mark.full
def test_a_training_that_is_killed_or_has_no_disk_ends_in_the_same_files(tiny_sd3: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", tiny_sd3, trainer={"steps": 3, "save_every": 1, "micro_batch": 16})

    def command(name: str) -> tuple[list[str], Path]:
        return ["train", str(config), "--out", str(tmp_path / name), "--resume-or-start"], tmp_path / name

    operations = count_operations(*command("whole"))
    assert operations > 30
    whole = results_of(tmp_path / "whole")
    assert {"lora/pytorch_lora_weights.safetensors", "checkpoints/step-3/manifest.json"} <= set(whole)

    assert run_with_kill(*command("first"), at=0) == KILLED
    assert not (tmp_path / "first").exists(), "killed before it made its folder"
    assert run_with_kill(*command("whole"), at=10 * operations) == 0, "it ended before"

    assert kill_until_finished(*command("killed"), seed=1, operations=operations) > 0
    assert results_of(tmp_path / "killed") == whole

    full = run_with_fault(*command("full"), at=operations // 2, errno=errno.ENOSPC, once=False)
    assert full.returncode == 3, full.stderr
    assert "No space left on device" in full.stderr
    again = run_with_fault(*command("full"), at=operations, errno=errno.EIO, once=True)
    assert again.returncode == 0, again.stderr
    assert results_of(tmp_path / "full") == whole
