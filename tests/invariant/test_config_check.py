"""What `marble config check` and the start of a training show: who scores what, and what a step costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from runs import base_config, marble, train, write_config

QUOTED = ['Ellie from "the last of us" game', *(f"a red cup {i}" for i in range(5))]
REWARDS = [
    {"name": "small", "type": "jpeg_compressibility"},
    {"name": "reads", "type": "rewards_for_tests:QuotedOnly"},
    {"name": "colour", "type": "colour", "held_out": True},
]


def check(path: Path, *more: object) -> dict[str, Any]:
    outcome = marble("config", "check", path, "--json", *more)
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def test_which_rewards_apply_to_which_prompts(tiny_sd3: Path, tmp_path: Path) -> None:
    prompts = {
        "train": [{"name": "pick", "texts": QUOTED}, {"name": "mine", "texts": ["a hat"], "rewards": ["colour"]}],
        "heldout": [{"name": "pick", "texts": ["a blue cup"]}],
    }
    rollout = {**base_config(tiny_sd3)["rollout"], "groups": 2, "updates": 1}
    settings = {"rewards": REWARDS, "rollout": rollout}
    path = write_config(tmp_path / "c.yaml", tiny_sd3, prompts=prompts, **settings)
    found = check(path, "--set", "model.text_length=64")
    by_place = {(source["name"], source["split"]): source for source in found["plan"]["sources"]}
    assert by_place["pick", "train"]["rewards"] == {"small": 6, "reads": 1, "colour": 5}
    assert by_place["pick", "heldout"]["rewards"] == {"small": 1, "reads": 0, "colour": 1}
    assert by_place["mine", "train"]["rewards"] == {"small": 0, "reads": 0, "colour": 0}
    few, unscored = found["remarks"]
    assert "prompts.train (pick): reads applies to 1 of 6 prompts" in few
    assert "the last of us" in few
    assert "`rewards: [small, colour]`" in few
    assert unscored.startswith("prompts.train (mine): to 1 of 1 prompts no reward applies that is trained on")

    shown = marble("config", "check", path).out
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["small"] == ["small", "all", "-", "/"]
    assert rows["reads"] == ["reads", "1", "/", "-", "-", "/"]
    assert "warning: prompts.train (pick): reads applies to 1 of 6" in shown

    prompts["train"] = [{"name": "pick", "texts": QUOTED, "rewards": ["small", "reads"]}]  # as advised: it is meant
    path = write_config(tmp_path / "c.yaml", tiny_sd3, prompts=prompts, **settings)
    assert check(path, "--set", "model.text_length=64")["remarks"] == []


def test_prompts_that_the_model_reads_in_part(tiny_sd3: Path, tmp_path: Path) -> None:
    long = " ".join(["word"] * 60)
    prompts = {"train": [{"name": "things", "texts": ["a cup", "a hat", long]}]}
    rollout = {**base_config(tiny_sd3)["rollout"], "groups": 2}
    path = write_config(tmp_path / "c.yaml", tiny_sd3, prompts=prompts, rewards=REWARDS[:1], rollout=rollout)
    found = check(path)
    assert found["plan"]["text_limit"] == 16
    assert found["plan"]["sources"][0]["too_long"] == 1
    assert (
        "1 of 3 prompts are longer than the 16 tokens that the model reads, such as 'word word" in found["remarks"][0]
    )
    told = train(path, tmp_path / "run", "--set", "trainer.steps=1", "--set", "rollout.updates=1").err
    assert "1 of 3 prompts are longer than the 16 tokens" in told
    assert check(path, "--set", "model.text_length=500")["remarks"] == []

    away = marble("config", "check", path, "--set", "model.path=nobody/nothing")
    assert away.code == 0
    assert "not checked for their length; the tokenizer of nobody/nothing is not on this machine" in away.out
    assert "Disk and memory: the model is not on this machine" in away.out


def test_what_a_step_costs(
    config_file: Path, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = marble("config", "check", config_file)
    costs = [
        "A rollout, for 2 steps, samples 16 images of the model's own size (48 forward passes) and has 40 scores of "
        "rewards. A step trains on 8 noised samples",
        "In all: 8 steps, 64 images, 160 scores.",
    ]
    for line in costs:
        assert line in outcome.out
    assert "no run in runs/ has these settings" in outcome.out
    saved = check(config_file)["plan"]["model"]
    written = sum(path.stat().st_size for path in (finished_run / "checkpoints" / "step-8").glob("*.safetensors"))
    assert saved["checkpoint"] == pytest.approx(written, rel=0.5), "the rest are headers: the adapter is tiny"

    told = train(config_file, tmp_path / "runs" / "one", "--set", "trainer.steps=2").err
    assert costs[0] in told
    assert "In all: 2 steps, 16 images, 40 scores." in told
    seconds = [
        sum(value for key, value in json.loads(line).items() if key in ("time/rollout", "time/gradients"))
        for line in (tmp_path / "runs" / "one" / "metrics.jsonl").read_text().splitlines()
    ]
    plan = check(config_file, "--set", "trainer.steps=100")["plan"]
    assert plan["measured_in"] == "runs/one"
    assert sum(seconds) / 2 <= plan["seconds"] < 2 * sum(seconds)
    assert check(config_file, "--set", "rollout.steps=4")["plan"]["seconds"] is None, "other settings, another time"


def test_a_check_imports_no_models(tiny_sd3: Path, tmp_path: Path) -> None:
    """Importing them takes seconds, and several times that where the disk is slow."""
    config = base_config(tiny_sd3)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    code = f"""
import sys
from marble_rl.cli import main
try:
    main(["config", "check", {str(tmp_path / "c.yaml")!r}])
except SystemExit as exit_:
    assert not exit_.code
found = {{"diffusers", "transformers", "peft", "scipy", "matplotlib"}} & set(sys.modules)
sys.exit(f"imported {{found}}" if found else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
