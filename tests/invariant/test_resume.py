"""A run that was killed, stopped or damaged ends in the very weights of the uninterrupted one."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from marble_rl.config import load_config
from marble_rl.distributed.world import World
from marble_rl.errors import InputError
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.resuming import how_to_continue
from runs import lora_bytes, marble, metrics, start, train, wait_for_step, write_config


@pytest.fixture
def whole(finished_run: Path) -> Path:
    """The uninterrupted run."""
    return finished_run


@pytest.mark.full
def test_killed_three_times(whole: Path, config_file: Path, tmp_path: Path) -> None:
    run, dice = tmp_path / "run", random.Random(7)
    for reached in (1, 4, 6):
        process = start("train", config_file, "--out", run, "--resume-or-start")
        wait_for_step(process, run, reached)
        time.sleep(dice.uniform(0.0, 0.15))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (run / "lora").exists()
    train(config_file, run, "--resume")
    assert lora_bytes(run) == lora_bytes(whole)
    assert metrics(run) == metrics(whole)


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopped_by_signal(whole: Path, config_file: Path, tmp_path: Path, signum: signal.Signals) -> None:
    run = tmp_path / "run"
    process = start("train", config_file, "--out", run)
    wait_for_step(process, run, 1)
    process.send_signal(signum)
    output, _ = process.communicate()
    assert process.returncode == 128 + signum, output
    done = len(metrics(run))
    assert (run / "checkpoints" / f"step-{done}" / "manifest.json").exists()
    assert f"stopped after step {done}" in output
    train(config_file, run, "--resume")
    assert lora_bytes(run) == lora_bytes(whole)


def damage(checkpoint: Path, how: str) -> None:
    weights = checkpoint / "adapters.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "flipped bit":
        data = bytearray(weights.read_bytes())
        data[-7] ^= 1
        weights.write_bytes(bytes(data))
    elif how == "no manifest":
        (checkpoint / "manifest.json").unlink()
    elif how == "garbage manifest":
        (checkpoint / "manifest.json").write_text("{")


@pytest.mark.parametrize("how", ["truncated", "flipped bit", "no manifest", "garbage manifest"])
def test_damaged_newest_checkpoint_is_named_and_skipped(
    whole: Path, config_file: Path, tmp_path: Path, how: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "lora")
    damage(run / "checkpoints" / "step-8", how)
    outcome = train(config_file, run, "--resume")
    assert "skipped checkpoint" in outcome.err
    assert "step-8" in outcome.err
    assert "continuing after step 6" in outcome.err
    assert "metrics.jsonl: moved 2 lines of steps after 6, or damaged, to metrics.dropped.jsonl" in outcome.err
    assert "It is kept as damaged-step-8" in outcome.err
    assert lora_bytes(run) == lora_bytes(whole)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["damaged-step-8", "step-6", "step-8"]
    dropped = (run / "metrics.dropped.jsonl").read_text().splitlines(keepends=True)
    assert dropped == (whole / "metrics.jsonl").read_text().splitlines(keepends=True)[6:]
    assert metrics(run) == metrics(whole)


@pytest.mark.parametrize("how", ["--resume", "--resume-or-start"])
@pytest.mark.parametrize("renamed", [False, True], ids=["found now", "found before"])
def test_a_run_with_damaged_checkpoints_only_is_not_begun_anew(
    whole: Path, config_file: Path, tmp_path: Path, how: str, renamed: bool
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for step in (6, 8):
        damage(run / "checkpoints" / f"step-{step}", "truncated")
    if renamed:
        (run / "checkpoints" / "step-8").rename(run / "checkpoints" / "damaged-step-8")
        shutil.rmtree(run / "checkpoints" / "step-6")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "train.log"}
    outcome = marble("train", config_file, "--out", run, how)
    assert outcome.code == 2
    names = "damaged-step-8" if renamed else "step-6, step-8 (skipped checkpoint"
    assert f"every checkpoint in {run / 'checkpoints'} is damaged: {names}" in outcome.err
    for words in ("They are kept as they are", "start again with another --out", "--resume begins at step 0"):
        assert words in outcome.err
    assert len(outcome.err.splitlines()) == 1
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "train.log"}
    assert after == before


def test_the_step_that_is_called_saved_is_one_that_can_be_read(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    folder = run / "checkpoints"
    assert how_to_continue(run, folder, 1) == f"Step 8 is saved. Continue with: marble train {run} --resume"
    damage(folder / "step-8", "flipped bit")
    assert how_to_continue(run, folder, 1).startswith("Step 6 is saved.")
    damage(folder / "step-6", "no manifest")
    said = how_to_continue(run, folder, 1)
    assert said.startswith(f"No step is saved: every checkpoint in {folder} is damaged (step-6, step-8)")
    assert "--resume" not in said
    shutil.rmtree(folder)
    assert how_to_continue(run, folder, 1).startswith("No step is saved yet. Continue with: marble train")


@pytest.mark.full
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_at_step_0(
    whole: Path, config_file: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "lora")
    logged = (run / "metrics.jsonl").read_bytes()
    train(config_file, run, "--resume")
    assert lora_bytes(run) == lora_bytes(whole)
    assert (run / "metrics.dropped.jsonl").read_bytes() == logged


def test_more_steps_than_before(config_file: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config_file, run, "--set", "trainer.steps=5")
    train(config_file, run, "--resume")
    assert lora_bytes(run) == lora_bytes(whole)


def test_more_steps_of_a_schedule_are_another_run(config_file: Path, tmp_path: Path) -> None:
    linear = ("--set", "optimizer.schedule=linear")
    train(config_file, tmp_path / "run", *linear, "--set", "trainer.steps=2")
    outcome = train(config_file, tmp_path / "run", *linear, "--resume", "--set", "trainer.steps=3")
    assert "trainer.steps was 2, now 3: from here on the run differs from the one that was started" in outcome.err


def test_momenta_of_fair_balancing(config_file: Path, tmp_path: Path) -> None:
    """The momenta that step 4 weighs by are the checkpoint's; one reward is switched off in step 5."""
    rewards = (
        "rewards=[{name: bright, type: brightness}, {name: small, type: jpeg_compressibility, schedule: [[0, 4]]}]"
    )
    fair = ("--set", "balance={type: fair}", "--set", rewards)
    train(config_file, tmp_path / "whole", *fair)
    train(config_file, tmp_path / "run", *fair, "--set", "trainer.steps=3")
    train(config_file, tmp_path / "run", *fair, "--resume")
    assert lora_bytes(tmp_path / "run") == lora_bytes(tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert metrics(tmp_path / "whole")[3]["share/small"] > 0
    assert metrics(tmp_path / "whole")[4]["share/small"] == 0


def test_the_second_epoch_of_a_rollout(config_file: Path, tmp_path: Path) -> None:
    """The same images are trained on again, without another rollout; a run that is stopped in between samples them
    again from the same old policy."""
    twice = ("--set", "rollout.epochs=2")
    train(config_file, tmp_path / "whole", *twice)
    lines = metrics(tmp_path / "whole")
    rewards = [line["reward/small"] for line in lines]
    assert rewards[:2] == rewards[2:4] != rewards[4:6] == rewards[6:]
    timed = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert ["time/rollout" in line for line in timed] == [True, False, False, False] * 2
    assert lines[0]["loss/policy"] != lines[2]["loss/policy"], "new noise"
    for steps in (3, 6):
        train(config_file, tmp_path / "run", *twice, "--set", f"trainer.steps={steps}", "--resume-or-start")
    train(config_file, tmp_path / "run", *twice, "--resume")
    assert lora_bytes(tmp_path / "run") == lora_bytes(tmp_path / "whole")
    assert metrics(tmp_path / "run") == lines


def test_resuming_a_finished_run_changes_nothing(whole: Path, config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    train(config_file, run, "--resume")
    assert lora_bytes(run) == lora_bytes(whole)
    assert metrics(run) == metrics(whole)


def test_settings_that_turn_out_bad_are_not_left_in_the_run(whole: Path, config_file: Path, tmp_path: Path) -> None:
    """Found once the model is loaded: Stable Diffusion 3 has no choice of attention."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    outcome = marble("train", config_file, "--out", run, "--resume", "--set", "model.attention=native")
    assert outcome.code == 2
    assert (run / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    outcome = marble("sample", run, "--prompt", "a cup", "--steps", 2, "--out", tmp_path / "samples")
    assert outcome.code == 0, outcome.err


def test_settings_that_a_run_went_on_with_stay(whole: Path, config_file: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    folder, config = RunFolder(tmp_path / "run"), load_config(config_file, ["trainer.steps=20"])

    def goes_on() -> None:
        with folder.opened(config, World()):
            shutil.copytree(folder.checkpoints / "step-8", folder.checkpoints / "step-11")
            raise InputError("found late")

    with pytest.raises(InputError, match="found late"):
        goes_on()
    assert folder.load_config().trainer.steps == 20


def test_second_run_into_the_same_folder_is_refused(whole: Path, config_file: Path) -> None:
    before = lora_bytes(whole)
    outcome = marble("train", config_file, "--out", whole)
    assert outcome.code == 2
    assert "already holds a run" in outcome.err
    assert lora_bytes(whole) == before


@pytest.mark.full
def test_two_processes_in_one_folder(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start("train", config_file, "--out", run, "--set", "trainer.steps=500")
    try:
        wait_for_step(first, run, 1)
        outcome = marble("train", config_file, "--out", run, "--resume", "--set", "trainer.steps=500")
    finally:
        first.kill()
        first.communicate()
    assert outcome.code == 2
    assert "another process is training" in outcome.err


def test_same_seed_same_bytes_other_seed_other_bytes(whole: Path, config_file: Path, tmp_path: Path) -> None:
    train(config_file, tmp_path / "same")
    train(config_file, tmp_path / "other", "--set", "trainer.seed=1")
    assert lora_bytes(tmp_path / "same") == lora_bytes(whole)
    assert metrics(tmp_path / "same") == metrics(whole)
    assert lora_bytes(tmp_path / "other") != lora_bytes(whole)


def test_another_model_or_reward_set_is_another_run(whole: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    other = tmp_path / "other-model"
    shutil.copytree(tiny_sd3, other)
    outcome = marble("train", write_config(tmp_path / "a.yaml", other), "--out", whole, "--resume")
    assert outcome.code == 2
    assert "model.path" in outcome.err

    config = write_config(tmp_path / "b.yaml", tiny_sd3)
    outcome = marble("train", config, "--out", whole, "--resume", "--set", "rewards.1.params={target: 0.5}")
    assert outcome.code == 2
    assert "rewards.1.params" in outcome.err
