"""Training on served rewards is training in process, weight for weight."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import reward_servers
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.settings import RewardConfig
from runs import base_config, lora_bytes, marble, metrics, start, train, wait_for_step, write_config


@contextmanager
def serving(rewards: list[dict[str, Any]], port: int = 0) -> Iterator[str]:
    with reward_servers.serving(build_rewards([RewardConfig(**reward) for reward in rewards]), port=port) as url:
        yield url


def remote_config(path: Path, model: Path, *urls: str, wait: float = 0) -> Path:
    rewards = [
        {
            "name": r["name"],
            "type": "remote",
            "params": {"url": list(urls), "reward": r["name"], "retries": 0, "wait": wait},
        }
        for r in base_config(model)["rewards"]
    ]
    return write_config(path, model, rewards=rewards)


def test_served_rewards_train_the_same_weights_and_may_move(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = base_config(tiny_sd3)["rewards"]
    run, steps = tmp_path / "served", "trainer.steps={}".format
    with serving(rewards) as a, serving(rewards) as b:
        train(remote_config(tmp_path / "c.yaml", tiny_sd3, a, b), run, "--set", steps(2))

    gone = marble("train", tmp_path / "c.yaml", "--out", run, "--resume", "--set", steps(4))
    assert gone.code == 2
    assert a in gone.err
    assert "Connection refused" in gone.err

    with serving(rewards) as c:
        train(remote_config(tmp_path / "c.yaml", tiny_sd3, c), run, "--resume", "--set", steps(4))
    train(write_config(tmp_path / "own.yaml", tiny_sd3), tmp_path / "own", "--set", steps(4))
    assert lora_bytes(run) == lora_bytes(tmp_path / "own")


@pytest.mark.full
def test_a_server_that_dies_stops_the_run_with_everything_saved(tiny_sd3: Path, tmp_path: Path) -> None:
    """Exit code 3, no made-up score; another server, and the run is the uninterrupted one."""
    kind = "rewards_for_tests:After"
    rewards = [
        {"name": "small", "type": "jpeg_compressibility"},
        {"name": "bright", "type": kind, "params": {"what": "nothing", "calls": 0}},
        {"name": "colour", "type": "colour"},
    ]
    mortal = [rewards[0], {"name": "bright", "type": kind, "params": {"what": "die", "calls": 5}}, rewards[2]]
    served = tmp_path / "served.yaml"
    served.write_text(yaml.safe_dump({"rewards": mortal}))
    run, steps = tmp_path / "served", ["--set", "trainer.steps=4"]
    with reward_servers.server_processes([served]) as ((process, dying),):
        stopped = marble("train", remote_config(tmp_path / "c.yaml", tiny_sd3, dying), "--out", run, *steps)
        assert process.wait(timeout=10) == 1
    assert stopped.code == 3
    assert "reward '" in stopped.err
    assert dying in stopped.err
    done = len(metrics(run))
    assert 0 < done < 4
    assert (run / "checkpoints" / f"step-{done}").is_dir()

    with serving(rewards) as alive:
        train(remote_config(tmp_path / "c.yaml", tiny_sd3, alive), run, "--resume", *steps)
    train(write_config(tmp_path / "own.yaml", tiny_sd3, rewards=rewards), tmp_path / "own", *steps)
    assert lora_bytes(run) == lora_bytes(tmp_path / "own")


@pytest.mark.full
def test_a_server_that_restarts_is_waited_for(tiny_sd3: Path, tmp_path: Path) -> None:
    """Down for some seconds in the middle of the run: the log says so, and the weights are those without a server."""
    rewards = base_config(tiny_sd3)["rewards"]
    run, steps = tmp_path / "run", ("--set", "trainer.steps=20")
    with serving(rewards) as url:
        process = start("train", remote_config(tmp_path / "c.yaml", tiny_sd3, url, wait=60), "--out", run, *steps)
        wait_for_step(process, run, 1)
    time.sleep(2.0)
    with serving(rewards, port=int(url.rpartition(":")[2])):
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "waiting up to 60 s for the server of reward" in output
    assert "is back after" in (run / "train.log").read_text()
    train(write_config(tmp_path / "own.yaml", tiny_sd3), tmp_path / "own", *steps)
    assert lora_bytes(run) == lora_bytes(tmp_path / "own")


@pytest.mark.full
def test_four_runs_train_on_one_server(tiny_sd3: Path, tmp_path: Path) -> None:
    """Four processes at once, each with another seed: each gets the scores of its own images."""
    settings = [["--set", f"trainer.seed={seed}", "--set", "trainer.steps=4"] for seed in range(4)]
    with serving(base_config(tiny_sd3)["rewards"]) as url:
        config = remote_config(tmp_path / "c.yaml", tiny_sd3, url)
        runs = [start("train", config, "--out", tmp_path / f"{i}", *more) for i, more in enumerate(settings)]
        for run in runs:
            output, _ = run.communicate(timeout=300)
            assert run.returncode == 0, output
    own = write_config(tmp_path / "own.yaml", tiny_sd3)
    for i, more in enumerate(settings):
        train(own, tmp_path / f"own-{i}", *more)
        assert lora_bytes(tmp_path / f"{i}") == lora_bytes(tmp_path / f"own-{i}")


@pytest.mark.full
def test_a_reward_as_slow_as_sampling_hides_behind_it(tiny_sd3: Path, tmp_path: Path) -> None:
    """At most 1.15 times sampling and training alone, in one run; the tail is the last group's scoring."""
    config = write_config(
        tmp_path / "c.yaml",
        tiny_sd3,
        prompts={"train": [{"name": "all", "texts": [f"prompt {i}" for i in range(16)]}]},
        rewards=[{"name": "slow", "type": "rewards_for_tests:AsSlowAsSampling"}],
        rollout={"groups": 16, "group_size": 8, "steps": 10},
    )
    train(config, tmp_path / "run", "--set", "trainer.steps=10", "--set", "logging.images_every=null")
    ratios = []
    for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[2:]:
        seconds = {key.removeprefix("time/"): value for key, value in json.loads(text).items() if "time/" in key}
        alone = seconds["rollout"] + seconds["gradients"] + seconds["update"]
        ratios.append((alone + seconds["rewards"]) / alone)
        print(f"scoring {seconds['scoring']:.2f} s, sampling {seconds['rollout']:.2f} s, iteration x {ratios[-1]:.3f}")
        assert seconds["scoring"] >= 0.6 * seconds["rollout"]
    assert statistics.median(ratios) <= 1.15
