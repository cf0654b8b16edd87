"""Configs, prompt files, LoRAs and folders of strangers: exit code 2 in bounded time, and a short message."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from marble_rl import load_config
from runs import base_config, marble, write_config

LONGEST = 3_000
"""Characters of what is printed."""
SECONDS = 10.0
"""Far more than any of these takes, far less than a loop over all steps or an expanded alias."""


def refused(*arguments: object) -> str:
    """What the command line says while it refuses."""
    began = time.monotonic()
    outcome = marble(*arguments)
    assert outcome.code == 2, outcome.err[:LONGEST]
    assert "Traceback" not in outcome.err
    assert len(outcome.err) < LONGEST
    assert time.monotonic() - began < SECONDS
    return outcome.err


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 300))
TEXTS: dict[str, tuple[str, str]] = {
    "aliases of aliases": (BOMB, "more than 100,000 values"),
    "merged aliases": (MERGED, "more than 100,000 values"),
    "a chain of aliases": (CHAIN, "more than 50 deep"),
    "an alias within itself": ("model: &a {path: *a}\n", "the alias *a stands within the value that it names"),
    "a document within itself": ("&a\nmodel: *a\n", "the alias *a stands within the value that it names"),
    "brackets": (f"model: {'[' * 500}{']' * 500}\n", "more than 50 deep"),
    "an object of Python": ("model: !!python/object:os.system {}\n", "the tag !!python/object:os.system is not read"),
    "bytes": ("model: !!binary a\n", "the tag !!binary is not read"),
    "a set": ("model: !!set {a, b}\n", "the tag !!set is not read"),
    "a tagged date": ("model: !!timestamp abc\n", "the tag !!timestamp is not read"),
    "no integer": ("model: !!int abc\n", "'abc' is not a value of the type !!int"),
    "no boolean": ("model: !!bool abc\n", "'abc' is not a value of the type !!bool"),
    "an impossible date": ("model: 2026-13-45\n", 'got "2026-13-45"'),
    "5,000 digits": (f"trainer: {{steps: {'9' * 5000}}}\n", "has too many digits for a number"),
    "a number in base 60": (f"trainer: {{steps: {':'.join(['59'] * 5000)}}}\n", "has too many digits for a number"),
    "65 bits": (f"trainer: {{steps: {2**64}}}\n", "integers have at most 64 bits"),
    "a file that is too long": ("#" * 10_000_001, "more than 10,000,000 characters"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_yaml(case: str, tmp_path: Path) -> None:
    text, says = TEXTS[case]
    config = tmp_path / "config.yaml"
    config.write_text(text)
    assert says in refused("config", "check", config)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.steps=!!binary a", "the tag !!binary is not read"),
        (f"trainer.steps={'[' * 500}{']' * 500}", "more than 50 deep"),
        ("trainer.steps=&a [*a]", "stands within the value that it names"),
        (f"trainer.steps={'9' * 5000}", "too many digits"),
        (f"rollout.groups=1{'0' * 90}", "integers have at most 64 bits"),
        ("trainer.steps=2026-13-45", 'got "2026-13-45"'),
        ("trainer.steps=\udc80", "half of a character"),
        ("rewards.²=1", "must be an index from 0 to 2"),
        (f"rewards.{'9' * 5000}=1", "must be an index from 0 to 2"),
        (f"trainer.steps={'x' * 300_000}", 'trainer.steps: expected a valid integer, got "xxx'),
        (f"{'x' * 300_000}=1", "characters) unknown key"),
        ("rollout.groups=1000000000000", "groups need"),
        ("prompts.train.0.share=1e+308", "prompts.train.0.share: expected a number less than or equal to"),
    ],
)
def test_overrides(config_file: Path, override: str, says: str) -> None:
    assert says in refused("config", "check", config_file, "--set", override)


def test_a_config_of_many_mistakes_names_the_first_and_their_number(tiny_sd3: Path, tmp_path: Path) -> None:
    file = write_config(tmp_path / "c.yaml", tiny_sd3, **{f"key{i}": 1 for i in range(5000)})
    message = refused("config", "check", file)
    assert "key0: unknown key 'key0'" in message
    assert "4,990 more mistakes" in message


def test_a_config_of_many_rewards(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = [{"name": f"n{i}", "type": "brightness"} for i in range(5000)]
    assert "rewards: " in refused("config", "check", write_config(tmp_path / "c.yaml", tiny_sd3, rewards=rewards))


def test_control_characters_do_not_reach_the_terminal(config_file: Path) -> None:
    message = refused("config", "check", config_file, "--set", 'balance.type="\\e[2Jgone"')
    assert "\x1b" not in message


def test_a_check_does_not_depend_on_the_number_of_steps(tiny_sd3: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    assert load_config(write_config(tmp_path / "c.yaml", tiny_sd3, trainer={"steps": 10**9})).trainer.steps == 10**9
    reward = {"name": "bright", "type": "brightness"}
    for schedule in ([[0, 5], [9, None]], [[0, 10**8], [10**8 + 1, None]]):
        file = write_config(
            tmp_path / "c.yaml", tiny_sd3, trainer={"steps": 10**9}, rewards=[{**reward, "schedule": schedule}]
        )
        first = -(-int(schedule[0][1] or 0) // 2) * 2  # of a rollout, which has two updates
        covered = any(begin <= first and (end is None or first < end) for begin, end in schedule)
        if covered:
            load_config(file)
        else:
            assert f"covers step {first};" in refused("config", "check", file)
    assert time.monotonic() - began < SECONDS


PATHS = {"long": "x" * 5000, "deep": "x/" * 3000, "nobody's": "~no-such-user/x"}


@pytest.mark.parametrize("case", [*PATHS, "a loop"])
def test_paths_on_the_command_line(case: str, config_file: Path, finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = PATHS.get(case, str(tmp_path / "loop"))
    for arguments in (
        ("config", "check", path),
        ("train", path),
        ("train", config_file, "--out", path),
        ("evaluate", path),
        ("evaluate", finished_run, "--prompts", path),
        ("sample", path, "--prompt", "x"),
        ("sample", finished_run, "--prompt", "x", "--out", path),
        ("export", path, "--out", tmp_path / "new"),
        ("diagnose", path),
        ("report", path),
        ("compare", path, "--table-only"),
        ("compare", finished_run, path),
        ("runs", path),
        ("init", "mini-demo", "--out", path),
    ):
        assert "cannot be a path" in refused(*arguments)


def test_a_file_name_may_hold_any_byte(config_file: Path, tmp_path: Path) -> None:
    for command in ("check", "show"):
        assert "not found" in refused("config", command, os.fsdecode(bytes(tmp_path) + b"/a\xffb.yaml"))
    for command in ("report", "runs", "diagnose"):
        refused(command, os.fsdecode(bytes(tmp_path) + b"/a\xffb"))


@pytest.mark.parametrize("case", [*PATHS, "a loop", "a zero", "half a character"])
@pytest.mark.parametrize(
    "key",
    [
        "model.path={}",
        "lora.init={}",
        "prompts.train.0={{name: p, file: {}}}",
        "prompts.train.0={{name: p, generate: {{type: ocr, count: 3, exclude: {}}}}}",
        "logging.trackers=[{{type: tensorboard, dir: {}}}]",
        "rewards.0={{name: c, type: clipscore, params: {{model: {}}}}}",
    ],
)
def test_paths_in_a_config(case: str, key: str, config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = {**PATHS, "a loop": str(tmp_path / "loop"), "a zero": "a\0b", "half a character": "a\ud800b"}[case]
    refused("config", "check", config_file, "--set", key.format(json.dumps(path)))


@pytest.mark.parametrize(
    ("suffix", "data", "says"),
    [
        (".jsonl", b'{"prompt": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deep"),
        (".jsonl", b'{"prompt": "x", "a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (".jsonl", b'{"prompt": "x", "rewards": "' + b"x" * 3_000_000 + b'"}', 'expected "rewards" to be a list'),
        (".jsonl", b'{"prompt": "x", "rewards": ["' + b"x" * 3_000_000 + b'"]}', "unknown name"),
        (".jsonl", b'{"' + b"x" * 3_000_000 + b'": 1}', 'expected a row with "prompt"'),
        (".csv", b'prompt\n"' + b"x" * 3_000_000 + b'"\n', "field larger than field limit"),
        (".txt", b"a\0b", "zero byte"),
        (".txt", b"a\xffb", "0xFF is not UTF-8"),
    ],
)
def test_prompt_files(config_file: Path, tmp_path: Path, suffix: str, data: bytes, says: str) -> None:
    file = tmp_path / f"prompts{suffix}"
    file.write_bytes(data)
    override = f"prompts.train.0={{name: p, file: {file}}}"
    assert says in refused("config", "check", config_file, "--set", override)


HEADERS: dict[str, str] = {
    "a list": "[1]",
    "null": "null",
    "brackets": "[" * 100_000,
    "alpha as text": '{"transformer.lora_alpha": "x"}',
    "alpha null": '{"transformer.lora_alpha": null}',
    "a large alpha": f'{{"transformer.lora_alpha": 1{"0" * 400}}}',
    "alpha not a number": '{"transformer.lora_alpha": NaN}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_lora_headers(case: str, config_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    matrices = {"transformer.x.lora_A.weight": torch.zeros(2, 4), "transformer.x.lora_B.weight": torch.zeros(4, 2)}
    save_file(matrices, file, metadata={"lora_adapter_metadata": HEADERS[case]})
    assert "lora_adapter_metadata" in refused("config", "check", config_file, "--set", f"lora.init={file}")


def test_loras_that_hold_no_matrices(config_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    save_file({"transformer.x.lora_A.weight": torch.tensor(1.0)}, file)
    assert "expected matrices" in refused("config", "check", config_file, "--set", f"lora.init={file}")


def test_a_lora_that_diffusers_cannot_load(finished_run: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    """Its own keys of the adapter's config are wrong, which only diffusers and peft can say."""
    tensors = load_file(finished_run / "lora" / "pytorch_lora_weights.safetensors")
    file = tmp_path / "lora.safetensors"
    save_file(tensors, file, metadata={"lora_adapter_metadata": '{"transformer.no_such_key": 1}'})
    message = refused("sample", file, "--prompt", "x", "--model", tiny_sd3, "--out", tmp_path / "samples")
    assert "does not hold a LoRA that diffusers can load" in message


def changed_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], str]:
    return lambda model: json.dumps(change(json.loads((model / "model_index.json").read_text())))


INDEXES: dict[str, tuple[Callable[[Path], str], str]] = {
    "a list of classes": (
        changed_index(lambda tree: {**tree, "_class_name": ["StableDiffusion3Pipeline"]}),
        "is not supported",
    ),
    "a list": (lambda model: "[1]", "not a diffusers pipeline"),
    "brackets": (lambda model: "[" * 100_000, "not a diffusers pipeline"),
    "a long name": (changed_index(lambda tree: {**tree, "_class_name": "x" * 300_000}), "is not supported"),
    "another library": (
        changed_index(lambda tree: {**tree, "transformer": ["os", "system"]}),
        'loads "transformer" from ["os", "system"]',
    ),
    "three words": (changed_index(lambda tree: {**tree, "vae": ["diffusers", "a", "b"]}), 'loads "vae" from'),
}


@pytest.mark.parametrize("case", INDEXES)
def test_model_folders(case: str, config_file: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    text, says = INDEXES[case]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text(text(tiny_sd3))
    assert says in refused("config", "check", config_file, "--set", f"model.path={tmp_path / 'model'}")
    assert says in refused("sample", tmp_path / "model", "--prompt", "x", "--out", tmp_path / "samples")


class Exploit:
    """What a pickle can do while it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize(
    ("part", "name"), [("text_encoder", "pytorch_model.bin"), ("transformer", "diffusion_pytorch_model.bin")]
)
def test_no_pickle_of_a_model_folder_is_run(part: str, name: str, tiny_sd3: Path, tmp_path: Path) -> None:
    model, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(tiny_sd3, model)
    for file in (model / part).glob("*.safetensors"):
        file.unlink()
    torch.save({"weight": Exploit(mark)}, model / part / name)
    message = refused("sample", model, "--prompt", "x", "--out", tmp_path / "samples")
    assert f"{model / part / name} is a pickle" in message
    assert "save_pretrained" in message
    assert not mark.exists()


def test_no_pickle_beside_the_weights_is_run(tiny_sd3: Path, tmp_path: Path) -> None:
    model, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(tiny_sd3, model)
    for file in ("text_encoder/pytorch_model.bin", "transformer/diffusion_pytorch_model.bin"):
        (model / file).write_bytes(pickle.dumps(Exploit(mark)))
    outcome = marble("sample", model, "--prompt", "x", "--steps", 1, "--out", tmp_path / "samples")
    assert outcome.code == 0, outcome.err
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"\xff\0", b"[1]", b"[" * 100_000, b"9" * 5000, b"{}"], ids=["bytes", "list", "deep", "digits", "empty"]
)
def test_broken_scores(content: bytes, finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "evaluation").mkdir(exist_ok=True)
    (run / "evaluation" / "scores.json").write_bytes(content)
    assert "is not an evaluation" in refused("export", run, "--out", tmp_path / "lora")
    assert not (tmp_path / "lora").exists()
    assert "is not an evaluation" in refused("compare", run, finished_run)


JOB = {
    "method": "marble",
    "about": "",
    "seed": 0,
    "overrides": [],
    "config": {},
    "config_hash": "",
    "versions": {},
    "failed": None,
    "means": {"a": 1.0},
    "per_prompt": {"a": [1.0]},
    "prompts": 1,
    "images_per_prompt": 1,
}


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"rewards": [1]}},
        {"config": {"rewards": 3}},
        {"config": {"rewards": [{"guard": {}}]}},
        {"config": {"prompts": 3}},
        {"means": {}},
        {"per_prompt": {}},
        {"per_prompt": {"a": []}},
        {"per_prompt": {"a": [None]}},
        {"prompts": 2},
        {"method": "x" * 100_000},
        None,
    ],
    ids=str,
)
def test_broken_jobs(change: dict[str, Any] | None, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    text = "[" * 100_000 if change is None else json.dumps({**JOB, **change})
    (tmp_path / "jobs" / "a.json").write_text(text)
    assert "is not the result of a job" in refused("compare", tmp_path, "--table-only")


def test_jobs_without_a_score(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "a.json").write_text(json.dumps({**JOB, "means": {}, "per_prompt": {}}))
    assert "no reward has scores in all results" in refused("compare", tmp_path, "--table-only")


@pytest.mark.parametrize("seeds", ["0-1000000000", "9" * 5000])
def test_seeds(seeds: str, config_file: Path, tmp_path: Path) -> None:
    assert "--seeds" in refused("compare", config_file, "--seeds", seeds, "--out", tmp_path / "compare")


def test_a_config_is_read_as_before(tiny_sd3: Path, tmp_path: Path) -> None:
    """Merged mappings, dates as text, and in JSON characters as pairs."""
    tree = base_config(tiny_sd3)
    file = tmp_path / "config.yaml"
    file.write_text(
        "evaluation: {steps: 2}\nlogging: {trackers: [{type: wandb, group: 2026-01-02}]}\n"
        + yaml.safe_dump({key: tree[key] for key in ("model", "prompts", "rewards")})
    )
    config = load_config(file, ["trainer={steps: 7}", "evaluation={<<: {steps: 4}, seed: 1}"])
    assert (config.trainer.steps, config.evaluation.steps, config.evaluation.seed) == (7, 4, 1)
    assert config.logging.trackers[0].group == "2026-01-02"  # type: ignore[union-attr]
    texts = {"train": [{"name": "a", "texts": ["a \U0001f600\U0001f600 \\ud83d", "b \\\U0001f600"]}]}
    file.write_text(json.dumps({**tree, "prompts": texts}))
    assert load_config(file).prompts.train[0].texts == texts["train"][0]["texts"]
