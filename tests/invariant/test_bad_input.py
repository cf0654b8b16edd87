"""Bad input: exit code 2, one clear line that names the key, the value and the fix, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from runs import base_config, marble


def sections(model: Path, /, **changes: Any) -> str:
    return yaml.safe_dump({**base_config(model), **changes})


def text(**changes: Any) -> Any:
    return lambda model: sections(model, **changes)


ROLLOUT = {"groups": 4, "group_size": 4, "steps": 3}
CASES: dict[str, tuple[Any, list[str]]] = {
    "broken YAML": (lambda model: "model: {path: x\nrewards: [", ["not valid YAML", "line"]),
    "a key given twice": (
        lambda model: sections(model, trainer={"steps": 2}) + "trainer: {seed: 1}\n",
        ["not valid YAML at line", "'trainer' is there twice"],
    ),
    "a number that JSON does not have": (
        text(optimizer={"lr": float("inf")}),
        ["optimizer.lr: expected a finite number, got Infinity"],
    ),
    "one in a reward's parameters": (
        text(rewards=[{"name": "x", "type": "brightness", "params": {"a": [1.0, float("nan")]}}]),
        ["rewards.0 (x).params.a.1", "not a finite number"],
    ),
    "a list where a mapping belongs": (text(rollout=[1, 2]), ["rollout: expected a mapping (key: value), got [1, 2]"]),
    "a mapping where a list belongs": (
        text(rewards={"name": "x"}),
        ["rewards: expected a valid list", 'got {"name": "x"}'],
    ),
    "the whole file is a list": (lambda model: "- 1\n- 2\n", ["expected a mapping", "got [1, 2]"]),
    "empty file": (lambda model: "", ["expected a mapping", "got null"]),
    "unknown section": (text(optimiser={"lr": 1}), ["unknown key 'optimiser'", "Did you mean 'optimizer'?"]),
    "unknown key": (text(trainer={"stepz": 3}), ["trainer.stepz", "unknown key", "Did you mean 'steps'?"]),
    "unknown key of a variant": (
        text(balance={"type": "marble", "refresh_evry": 2}),
        ["balance.refresh_evry", "Did you mean 'refresh_every'?"],
    ),
    "unknown variant": (text(balance={"type": "marbel"}), ["balance", "'marbel'", "Did you mean 'marble'?"]),
    "unknown tracker": (
        text(logging={"trackers": ["tensorbord"]}),
        ["logging.trackers.0", "'tensorbord'", "Did you mean 'tensorboard'?"],
    ),
    "unknown key of a tracker": (
        text(logging={"trackers": ["tensorboard", {"type": "wandb", "projekt": "x"}]}),
        ["logging.trackers.1.projekt", "Did you mean 'project'?", "entity"],
    ),
    "a tracker that is no list": (text(logging={"trackers": "wandb"}), ["logging.trackers", "expected a valid list"]),
    "a tracker given twice": (
        text(logging={"trackers": ["tensorboard", "tensorboard"]}),
        ["logging.trackers.1: tensorboard is given twice"],
    ),
    "wrong type": (text(trainer={"steps": "many"}), ['trainer.steps: expected a valid integer, got "many"']),
    "out of range": (text(optimizer={"lr": -1}), ["optimizer.lr: expected a number greater than 0, got -1"]),
    "missing section": (lambda model: "model: {path: x}\nprompts: {train: []}", ["rewards", "missing"]),
    "unknown reward": (
        text(rewards=[{"name": "x", "type": "brightnes"}]),
        ["rewards.0 (x).type", "'brightnes'", "Did you mean 'brightness'?"],
    ),
    "reward module that is not there": (
        text(rewards=[{"name": "x", "type": "no_such_module:score"}]),
        ["cannot import 'no_such_module'"],
    ),
    "reward function that is not there": (
        text(rewards=[{"name": "x", "type": "rewards_for_tests:steadi"}]),
        ["no 'steadi'", "Did you mean 'steady'?"],
    ),
    "unknown argument of a reward": (
        text(rewards=[{"name": "x", "type": "brightness", "params": {"targt": 1}}]),
        ["rewards.0 (x).params.targt: unknown key 'targt'", "Did you mean 'target'?"],
    ),
    "bad argument of a reward": (
        text(rewards=[{"name": "x", "type": "colour", "params": {"colour": "mauve"}}]),
        ["rewards.0 (x).params.colour: expected 'red', ", 'got "mauve"'],
    ),
    "a video reward for an image model": (
        text(rewards=[{"name": "moves", "type": "motion"}]),
        ["rewards (moves): scores videos, but was given images"],
    ),
    "two rewards of one name": (text(rewards=[{"name": "x", "type": "brightness"}] * 2), ["'x' is used twice"]),
    "only evaluation-only rewards": (
        text(rewards=[{"name": "x", "type": "brightness", "held_out": True}]),
        ["at least one must be trained"],
    ),
    "an optional reward that is trained on": (
        text(rewards=[{"name": "x", "type": "brightness", "optional": True}]),
        ["rewards.0 (x).optional", "held_out: true"],
    ),
    "zero prompts": (text(prompts={"train": [{"name": "a", "texts": []}]}), ["prompts.train.0 (a)", "zero prompts"]),
    "zero sources": (text(prompts={"train": []}), ["prompts.train", "zero prompt sources"]),
    "prompt file that is not there": (
        text(prompts={"train": [{"name": "a", "file": "nowhere.txt"}]}),
        ["prompts.train.0 (a)", "not found", "nowhere.txt"],
    ),
    "no prompts": (text(prompts={"train": [{"name": "a"}]}), ["one of `file`, `texts` and `generate`", "none of them"]),
    "more groups than prompts": (text(rollout={**ROLLOUT, "groups": 40}), ["rollout.groups", "lower rollout.groups"]),
    "fewer groups than sources": (
        text(rollout={**ROLLOUT, "groups": 1}),
        ["rollout.groups", "too few for the prompt sources", "Use 2 groups"],
    ),
    "group size 1": (
        text(rollout={**ROLLOUT, "group_size": 1}),
        ["rollout.group_size: expected a number greater than or equal to 2, got 1"],
    ),
    "updates that do not divide the groups": (text(rollout={**ROLLOUT, "updates": 3}), ["rollout.updates: 3"]),
    "a reward that applies to no prompt": (
        text(prompts={"train": [{"name": "a", "texts": ["one", "two", "three", "four"]}]}),
        ["'colour' applies to no training prompt"],
    ),
    "a source naming an unknown reward": (
        text(prompts={"train": [{"name": "a", "texts": ["a red cup"] * 4, "rewards": ["colr"]}]}),
        ["'colr'", "Did you mean 'colour'?"],
    ),
    "coefficients off the simplex": (
        text(balance={"type": "fixed", "coefficients": {"bright": 3.0}}),
        ["balance.coefficients", "sum to 3"],
    ),
    "Adam's metric": (
        text(balance={"type": "marble", "metric": "adam"}),
        ["balance.metric: adam was removed", "Remove the key"],
    ),
    "a stage of an unknown reward": (
        text(balance={"type": "sequential", "stages": [{"reward": "brigth", "steps": 2}]}),
        ["balance.stages.0.reward", "Did you mean 'bright'?"],
    ),
    "model folder that is not there": (text(model={"path": "/nowhere/model"}), ["model.path", "/nowhere/model"]),
    "model folder that is not a pipeline": (text(model={"path": "."}), ["model.path", "model_index.json"]),
    "unknown device": (lambda model: sections(model, model={"path": str(model), "device": "tpux"}), ["model.device"]),
    "LoRA on modules that are not there": (text(lora={"targets": ["nothing_like_this"]}), ["lora.targets"]),
}


@pytest.mark.parametrize("case", CASES)
def test_config(case: str, tiny_sd3: Path, tmp_path: Path) -> None:
    make, says = CASES[case]
    path = tmp_path / "config.yaml"
    path.write_text(make(tiny_sd3))
    outcome = marble("train", path, "--out", tmp_path / "run")
    assert outcome.code == 2, outcome.err
    for words in says:
        assert words in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "nowhere.yaml"], ["config file not found", "nowhere.yaml"]),
        (["config", "check", "nowhere.yaml"], ["config file not found"]),
        (["export", "nowhere", "--out", "x"], ["nowhere", "not a run folder"]),
        (["sample", "./nowhere", "--prompt", "x"], ["nowhere"]),
        (["sample", "./nowhere", "--prompt", "x", "--weights", "emma"], ["--weights", "'emma'"]),
        (["sample", "./nowhere", "--prompt", "x", "--solver", "heun"], ["--solver", "'heun'"]),
        (
            ["sample", "./nowhere", "--prompt", "x", "--seed", "99999999999999999999"],
            ["'--seed'"],
        ),
        (["sample", "./nowhere", "--prompt", "caf\udce9"], ["--prompt", "'caf\\udce9'", "UTF-8"]),
        (["evaluate", "./nowhere"], ["--config"]),
    ],
)
def test_arguments(arguments: list[str], says: list[str]) -> None:
    outcome = marble(*arguments)
    assert outcome.code == 2
    for words in says:
        assert words in outcome.err


def test_a_device_that_there_is_not(config_file: Path) -> None:
    outcome = marble("config", "show", config_file, "--on", "gpu")
    assert outcome.code == 2
    assert "--on: unknown device 'gpu'" in outcome.err


def test_what_was_in_the_folder_stays(tiny_sd3: Path, tmp_path: Path) -> None:
    """Hidden files do not make a folder a run, and a start that fails does not own them."""
    path = tmp_path / "config.yaml"
    path.write_text(sections(tiny_sd3, lora={"targets": ["nothing_like_this"]}))
    (tmp_path / "run" / ".git").mkdir(parents=True)
    (tmp_path / "run" / ".git" / "HEAD").touch()
    outcome = marble("train", path, "--out", tmp_path / "run")
    assert outcome.code == 2
    assert "lora.targets" in outcome.err
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == [".git"]
    assert (tmp_path / "run" / ".git" / "HEAD").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.steps", "expected key=value"),
        ("trainer.steps=[1", "not a valid YAML value"),
        ("rewards.9.name=x", "index from 0 to 2"),
        ("trainer.steps.deep=1", "below a plain value"),
        ("trainer.stepz=1", "Did you mean 'steps'?"),
    ],
)
def test_overrides(config_file: Path, override: str, says: str) -> None:
    outcome = marble("config", "check", config_file, "--set", override)
    assert outcome.code == 2
    assert says in outcome.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{broken", "not valid JSON"),
        ('{"text": "x"}', 'with "prompt"'),
        ('{"prompt": "x", "rewards": "bright"}', "to be a list"),
        ('{"prompt": "x", "rewards": ["brigth"]}', "Did you mean 'bright'?"),
    ],
)
def test_prompt_files(tiny_sd3: Path, tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": "a red cup"}}\n{line}\n')
    path = tmp_path / "config.yaml"
    source = {"name": "a", "file": "prompts.jsonl"}
    path.write_text(sections(tiny_sd3, prompts={"train": [source]}, rollout={**ROLLOUT, "groups": 2}))
    outcome = marble("config", "check", path)
    assert outcome.code == 2
    assert says in outcome.err


def test_what_works_but_was_hardly_meant_is_remarked_on(tiny_sd3: Path, tmp_path: Path) -> None:
    """A watch that hears nothing, a held-out reward without a prompt, and held-out prompts that were trained on."""
    train = [{"name": "a", "texts": ["a red cup", "a Sign"], "rewards": ["bright"]}]
    heldout = [{"name": "b", "texts": ["a blue cup", "a  sign"], "rewards": ["bright"]}]
    rewards = [
        {"name": "bright", "type": "brightness"},
        {"name": "small", "type": "jpeg_compressibility", "held_out": True, "watch": {}},
        {"name": "colour", "type": "colour", "held_out": True},
    ]
    settings = {"rewards": rewards, "rollout": {**ROLLOUT, "groups": 2}}
    path = tmp_path / "config.yaml"
    path.write_text(sections(tiny_sd3, prompts={"train": train, "heldout": heldout}, **settings))
    outcome = marble("config", "check", path)
    assert outcome.code == 0
    assert "'small' applies to no training prompt, so it is never watched" in outcome.out
    assert "'colour' applies to no held-out prompt, so it is never computed" in outcome.out
    assert (
        "prompts.heldout (b): 1 of 2 prompts ask for what a training prompt asks for, such as 'a  sign'" in outcome.out
    )
    for source in (*train, *heldout):
        del source["rewards"]
    heldout[0]["texts"] = ["a blue cup"]
    path.write_text(sections(tiny_sd3, prompts={"train": train, "heldout": heldout}, **settings))
    assert json.loads(marble("config", "check", path, "--json").out)["remarks"] == []


def test_reward_that_cannot_be_imported_or_built(
    tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward.py").write_text("def score(images prompts):\n")
    monkeypatch.syspath_prepend(tmp_path)
    for kind, says in [
        ("broken_reward:score", "SyntaxError"),
        ("rewards_for_tests:NoMethods", "has no method `applies_to`"),
        ("rewards_for_tests:Picky", "rewards.0 (x).params: too picky"),
    ]:
        path = tmp_path / "config.yaml"
        path.write_text(sections(tiny_sd3, rewards=[{"name": "x", "type": kind}]))
        outcome = marble("config", "check", path)
        assert outcome.code == 2
        assert says in outcome.err


def test_reward_whose_weights_cannot_be_loaded_leaves_no_run(tiny_sd3: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(sections(tiny_sd3, rewards=[{"name": "x", "type": "rewards_for_tests:NoWeights"}]))
    outcome = marble("train", path, "--out", tmp_path / "run")
    assert outcome.code == 2
    assert "'x' cannot be loaded: FileNotFoundError" in outcome.err
    assert not (tmp_path / "run").exists()


def test_out_below_a_file(config_file: Path, tmp_path: Path) -> None:
    outcome = marble("train", config_file, "--out", config_file / "run")
    assert outcome.code == 2
    assert "--out: cannot write" in outcome.err


def test_size_that_the_model_cannot_draw(config_file: Path, tmp_path: Path) -> None:
    outcome = marble("train", config_file, "--out", tmp_path / "run", "--set", "rollout.height=18")
    assert outcome.code == 2
    assert "height: 18 is not a multiple of 4" in outcome.err


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("prompts.txt", b"\xff\xfe\x00binary", ["prompts.train.0 (a)", "prompts.txt", "UTF-8"]),
        ("prompts.jsonl", b'{"prompt": "a cup"}\n{"prompt": "a h', ["prompts.train.0 (a)", "prompts.jsonl", "line 2"]),
        ("prompts.png", b"\x89PNG", ["prompts.train.0 (a)", "prompts.png", ".jsonl"]),
        ("prompts.txt", None, ["prompts.train.0 (a)", "prompts.txt"]),
    ],
    ids=["not text", "cut off", "another suffix", "a folder without prompts"],
)
def test_prompt_files_that_cannot_be_read(
    tiny_sd3: Path, tmp_path: Path, name: str, content: bytes | None, says: list[str]
) -> None:
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "config.yaml"
    path.write_text(sections(tiny_sd3, prompts={"train": [{"name": "a", "file": name}]}))
    outcome = marble("train", path, "--out", tmp_path / "run")
    assert outcome.code == 2, outcome.err
    for words in says:
        assert words in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_pipeline_of_another_class(config_file: Path, tmp_path: Path) -> None:
    """Wherever a model is named."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    for arguments in (
        ["train", config_file, "--set", f"model.path={folder}", "--out", tmp_path / "run"],
        ["config", "check", config_file, "--set", f"model.path={folder}"],
        ["sample", folder, "--prompt", "x", "--out", tmp_path / "run"],
        ["evaluate", folder, "--config", config_file, "--out", tmp_path / "run"],
    ):
        outcome = marble(*arguments)
        assert outcome.code == 2
        assert "StableDiffusionXLPipeline is not supported. Supported: StableDiffusion3Pipeline" in outcome.err


def test_export_before_there_is_anything_to_export(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(marble("config", "show", config_file, "--json").out)
    for arguments, says in [
        ([], "has no usable checkpoint yet"),
        (["--weights", "base"], "Invalid value for '--weights'"),
        (["--merged", "--dtype", "int4"], "Invalid value for '--dtype'"),
    ]:
        outcome = marble("export", run, "--out", tmp_path / "out", *arguments)
        assert outcome.code == 2
        assert says in outcome.err
        assert not (tmp_path / "out").exists()
