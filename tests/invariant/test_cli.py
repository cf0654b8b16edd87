"""The command line as a newcomer meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runs import MARBLE, marble, train

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def seconds(code: str) -> float:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.full
def test_import_adds_less_than_a_second_to_torch() -> None:
    code = "import torch, time; t = time.perf_counter(); import marble_rl; {}; print(time.perf_counter() - t)"
    assert seconds(code.format("pass")) < 0.2
    assert seconds(code.format("marble_rl.Harmonizer(['a']); marble_rl.nft_loss; marble_rl.load_config")) < 1.0


def test_the_method_alone_needs_neither_diffusers_nor_transformers() -> None:
    code = """
import sys, torch
from marble_rl import Harmonizer, group_advantages, min_norm, nft_loss, reward_gradients
Harmonizer(["a", "b"]).refresh(torch.eye(2))
print(sum(name.split(".")[0] in ("diffusers", "transformers", "peft") for name in sys.modules))
"""
    assert seconds(code) == 0


def test_help_is_quick() -> None:
    code = f"""
import subprocess, time
t = time.perf_counter()
subprocess.run({[*MARBLE, "--help"]!r}, check=True, capture_output=True)
print(time.perf_counter() - t)
"""
    assert seconds(code) < 2.0


@pytest.mark.parametrize(
    "command",
    [
        *("train", "sample", "evaluate", "export", "bench", "compare", "diagnose", "report"),
        *("config show", "config check", "rewards list", "rewards check", "rewards serve"),
        *("rate prepare", "rate serve", "rate results"),
    ],
)
def test_each_command_has_help_with_an_example(command: str) -> None:
    outcome = marble(*command.split(), "--help")
    assert outcome.code == 0
    assert f"Example: marble {command}" in " ".join(outcome.out.split())


def test_help_promises_what_is_so() -> None:
    """As plain diffusers draws only with its own solver; exports are of adapters."""
    helps = [marble(command, "--help").out.replace("│", " ") for command in ("sample", "export")]
    sample, export = (" ".join(text.split()) for text in helps)
    assert "With --solver euler they equal those of plain diffusers, called as in the export's README.md" in sample
    assert "ones get a number" in sample
    assert "<ema|default|old>" in export
    assert "or base" not in export


def test_public_names() -> None:
    import marble_rl

    assert sorted(marble_rl.__all__) == sorted(marble_rl._HOME)
    for name in marble_rl.__all__:
        assert getattr(marble_rl, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = marble_rl.nothing_here


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_shipped_config_loads(path: Path) -> None:
    from marble_rl import load_config

    load_config(path)


@pytest.mark.full
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_shipped_config_is_shown_with_its_memory(path: Path) -> None:
    assert marble("config", "show", path).code == 0


def test_shown_config_is_a_config(config_file: Path, tmp_path: Path) -> None:
    shown = marble("config", "show", config_file, "--set", "trainer.steps=77").out
    (tmp_path / "shown.yaml").write_text(shown)
    assert marble("config", "show", tmp_path / "shown.yaml").out == shown
    assert "steps: 77" in shown


def test_resolved_config_is_saved_with_the_run(config_file: Path, tmp_path: Path) -> None:
    from marble_rl import load_config

    train(config_file, tmp_path / "run", "--set", "trainer.steps=2", "--set", "rewards.1.params.target=0.5")
    overrides = ["trainer.steps=2", "rewards.1.params.target=0.5"]
    assert load_config(tmp_path / "run" / "config.json") == load_config(config_file, overrides)


def test_run_folder(config_file: Path, tmp_path: Path) -> None:
    outcome = train(config_file, tmp_path / "run", "--set", "trainer.steps=5", "--json")
    result = json.loads(outcome.out)
    assert result["steps"] == 5
    assert (tmp_path / "run" / "samples" / "step-0.png").stat().st_size > 0
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-3", "step-5"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if not p.name.startswith(".")) == [
        "checkpoints",
        "config.json",
        "history.json",
        "lora",
        "metrics.jsonl",
        "samples",
        "train.log",
    ]


def test_version_and_rewards_list() -> None:
    import marble_rl

    assert marble_rl.__version__ in marble("--version").out
    assert "brightness" in json.loads(marble("rewards", "list", "--json").out)


def test_trainer_from_python(config_file: Path, tmp_path: Path) -> None:
    from marble_rl import Trainer, load_config

    result = Trainer(load_config(config_file, ["trainer.steps=2"]), tmp_path / "run").train()
    assert result.steps == 2
    assert (result.lora / "pytorch_lora_weights.safetensors").exists()
    assert "reward/bright" in result.metrics


@pytest.mark.parametrize("command", [(), ("train",), ("diagnose",), ("config", "show"), ("rewards", "check")])
def test_flags_take_no_value(command: tuple[str, ...]) -> None:
    shown = marble(*command, "--help")
    assert shown.code == 0
    assert "--help" in shown.out
    assert "<bool>" not in shown.out


def test_groups_that_leave_a_source_without_prompts(config_file: Path) -> None:
    outcome = marble("config", "check", config_file, "--set", "prompts.train.0.share=9")
    assert outcome.code == 2
    assert "4 groups are too few for the prompt sources: 'colours', whose share is 1 of 10, gets none" in outcome.err
    assert "Use 10 groups" in outcome.err


@pytest.mark.full
def test_a_constant_reward_is_told_once_in_a_run_and_not_again_after_resume(config_file: Path, tmp_path: Path) -> None:
    rewards = "rewards=[{name: small, type: jpeg_compressibility}, {name: flat, type: 'rewards_for_tests:constant'}]"
    settings = ["--set", rewards, "--set", "rollout.updates=1", "--set", "trainer.save_every=1"]
    told = [train(config_file, tmp_path / "run", *settings, "--set", "trainer.steps=4").err]
    told += [
        train(config_file, tmp_path / "run", *settings, "--set", f"trainer.steps={steps}", "--resume").err
        for steps in (7, 12)
    ]
    said = ["'flat' was constant in the last 20 groups" in text for text in told]
    assert said == [False, True, False], "four groups a step: after the fifth"
    assert "warning after step 5: reward 'flat'" in told[1]
    assert "'small' was constant" not in "".join(told)


@pytest.mark.full
def test_the_builder_of_tiny_pipelines_is_quiet(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.tiny", str(tmp_path / "tiny")]
    done = subprocess.run(command, cwd=CONFIGS[0].parents[1], capture_output=True, text=True, check=True)
    assert "%|" not in done.stderr, "no progress bars"
    assert "[transformers]" not in done.stderr
    assert done.stdout.startswith("wrote a tiny random sd3 pipeline")
