"""Training on served rewards is training in process, weight for weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from marble_rl.config.schema import RewardConfig
from marble_rl.rewards.registry import build_rewards
from marble_rl.rewards.scoring import Scorer
from marble_rl.rewards.server import Limits, RewardsServer
from runs import base_config, lora_bytes, marble, train, write_config


@contextmanager
def serving(rewards: list[dict[str, Any]]) -> Iterator[str]:
    server = RewardsServer("127.0.0.1", 0, None, Limits())
    configs = [RewardConfig(**reward) for reward in rewards]
    server.start(Scorer(configs, build_rewards(configs)))
    try:
        yield server.url
    finally:
        server.stop()


def remote_config(path: Path, model: Path, *urls: str) -> Path:
    rewards = [
        {"name": r["name"], "type": "remote", "params": {"url": list(urls), "reward": r["name"], "retries": 0}}
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
    assert "ConnectionRefusedError" in gone.err

    with serving(rewards) as c:
        train(remote_config(tmp_path / "c.yaml", tiny_sd3, c), run, "--resume", "--set", steps(4))
    train(write_config(tmp_path / "own.yaml", tiny_sd3), tmp_path / "own", "--set", steps(4))
    assert lora_bytes(run) == lora_bytes(tmp_path / "own")
