"""A reward that does not return: a line says so, and Ctrl-C ends the run with the last complete step saved."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from marble_rl.config import load_config
from marble_rl.rewards.core import call_thread
from runs import lora_bytes, marble, metrics, start, train, wait_for_step, write_config


def hanging(path: Path, model: Path, calls: int, seconds: float = 600, **settings: Any) -> Path:
    """A config with a reward that sleeps after so many batches."""
    params = {"calls": calls, "seconds": seconds}
    odd = {"name": "odd", "type": "rewards_for_tests:Sleeping", "params": params, **settings}
    return write_config(path, model, rewards=[{"name": "bright", "type": "brightness"}, odd])


def test_a_call_may_not_take_for_ever_by_default(config_file: Path) -> None:
    assert {reward.timeout for reward in load_config(config_file).rewards} == {600.0}


def test_a_long_wait_is_mentioned(tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_thread, "FIRST_NOTICE", 0.2)
    config = hanging(tmp_path / "c.yaml", tiny_sd3, calls=0, seconds=1.0)
    outcome = train(config, tmp_path / "run", "--set", "trainer.steps=1")
    line = "waiting for reward 'odd' for 0.2 s (timeout after 600 s)"
    assert line in outcome.err
    assert line in (tmp_path / "run" / "train.log").read_text()
    assert "for 0.8 s (timeout" in outcome.err


@pytest.mark.full
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_gives_a_hanging_reward_up(tiny_sd3: Path, tmp_path: Path, times: int) -> None:
    """Once: after ten seconds of grace. Twice: at once. The run continues as if nothing had happened."""
    run = tmp_path / "run"
    process = start("train", hanging(tmp_path / "c.yaml", tiny_sd3, calls=8), "--out", run)
    wait_for_step(process, run, 4)  # two rollouts of four groups: the third one hangs
    time.sleep(0.5)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < (5 if times == 2 else 20)
    assert process.returncode == 128 + signal.SIGINT, output
    said = "stopped at once, after step 4" if times == 2 else "stopped after step 4: gave up waiting for reward 'odd'"
    assert said in output
    assert f"Step 4 is saved. Continue with: marble train {run} --resume" in output
    assert "Traceback" not in output
    assert len(metrics(run)) == 4

    steps = ("--set", "trainer.steps=6")
    calm = hanging(tmp_path / "calm.yaml", tiny_sd3, calls=99)
    train(calm, tmp_path / "calm", *steps)
    resumed = marble("train", run, "--resume", *steps)  # the counter of the reward starts anew
    assert resumed.code == 0, resumed.err
    assert lora_bytes(run) == lora_bytes(tmp_path / "calm")
