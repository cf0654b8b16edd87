"""Run folders of other versions: used as they are, or refused with the folder, what does not fit, and a fix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from marble_rl import __version__
from marble_rl.storage import file_digest
from runs import lora_bytes, marble


@pytest.fixture
def made(finished_run: Path) -> Path:
    """The folder of a run with its config beside it."""
    return finished_run.parent


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def edit_checkpoints(run: Path, name: str, change: Callable[[Path], object], version: str | None) -> None:
    """Change a file of every checkpoint as another version might have written it: with a digest that is right."""
    for checkpoint in (run / "checkpoints").iterdir():
        change(checkpoint / name)

        def about(manifest: dict[str, Any], file: Path = checkpoint / name) -> None:
            manifest["format"] = 1  # whose manifests have no checksum
            manifest.pop("checksum", None)
            manifest["sha256"][name] = file_digest(file)
            manifest.pop("marble")
            if version is not None:
                manifest["marble"] = version

        edit(checkpoint / "manifest.json", about)


def commands(run: Path, made: Path) -> dict[str, tuple[object, ...]]:
    out = run.parent / "out"
    return {
        "report": ("report", run),
        "evaluate": ("evaluate", run, "--images", 1),
        "sample": ("sample", run, "--prompt", "a cup", "--steps", 1, "--out", out),
        "export": ("export", run, "--out", out),
        "diagnose": ("diagnose", run, "--batches", 3),
        "resume": ("train", made / "config.yaml", "--out", run, "--resume", "--set", "trainer.steps=9"),
    }


COMMANDS = ["report", "evaluate", "sample", "export", "diagnose", "resume"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_that_is_not_known_is_named_with_the_version(run: Path, made: Path, command: str) -> None:
    edit(run / "config.json", lambda tree: tree["balance"].update(temperature=2))
    edit_checkpoints(run, "state.json", lambda file: None, "9.8.7")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    outcome = marble(*commands(run, made)[command])
    assert outcome.code == 2
    said = (str(run), f"({__version__})", "marble 9.8.7 made the run", "balance.temperature: unknown key 'temperature'")
    for text in (*said, "Use the version that made it, or fix the key in config.json"):
        assert text in outcome.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("command", COMMANDS)
def test_state_and_keys_that_came_later_are_not_needed(run: Path, made: Path, command: str) -> None:
    """As the first versions wrote it: no version, and nothing of what was added since."""

    def first_version(tree: dict[str, Any]) -> None:
        for section, keys in {"balance": ["apply"], "loss": ["type"], "model": ["dtype", "quantize"]}.items():
            for key in keys:
                del tree[section][key]
        del tree["logging"]
        tree["balance"] |= {"solver": "min_norm", "smooth": "alpha", "normalize": True}

    edit(run / "config.json", first_version)
    later = ("scale", "skipped", "micro_batch", "watches")
    edit_checkpoints(run, "state.json", lambda f: edit(f, lambda t: [t.pop(key) for key in later]), None)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if not k.startswith(("memory/", "scoring/", "qp/"))} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    outcome = marble(*commands(run, made)[command])
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("command", ["diagnose", "resume"])
def test_state_that_lacks_is_named(run: Path, made: Path, command: str) -> None:
    edit_checkpoints(run, "state.json", lambda f: edit(f, lambda tree: tree.pop("balancer")), None)
    outcome = marble(*commands(run, made)[command])
    assert outcome.code == 2
    assert f"{run}: the state of its checkpoint of step 8, written by an unknown version of marble" in outcome.err
    assert f"has no 'balancer'. This is marble {__version__}; use the version that made the run" in outcome.err
    assert lora_bytes(run) == lora_bytes(made / "run")


def without_ema(file: Path) -> None:
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith("ema/")}, file)


def narrower(file: Path) -> None:
    save_file({name: tensor[:1].clone() for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize(("change", "says"), [(without_ema, "has other layers"), (narrower, "is of another size")])
@pytest.mark.parametrize("command", ["sample", "export", "resume"])
def test_adapters_that_do_not_fit_are_named(
    run: Path, made: Path, command: str, change: Callable[[Path], None], says: str
) -> None:
    edit_checkpoints(run, "adapters.safetensors", change, "0.0.1")
    outcome = marble(*commands(run, made)[command])
    assert outcome.code == 2
    assert "checkpoint of step 8, written by marble 0.0.1, does not fit: the saved adapter" in outcome.err
    assert says in outcome.err


@pytest.mark.parametrize("command", ["sample", "resume"])
def test_a_format_of_a_later_version_is_refused_and_not_begun_anew(run: Path, made: Path, command: str) -> None:
    for checkpoint in (run / "checkpoints").iterdir():
        edit(checkpoint / "manifest.json", lambda tree: tree.update(format=3, marble="9.0.0"))
    logged = (run / "metrics.jsonl").read_text()
    outcome = marble(*commands(run, made)[command])
    assert outcome.code == 2
    assert "written in format 3 by marble 9.0.0" in outcome.err
    assert f"this is marble {__version__}, which reads formats 1 to 2" in outcome.err
    assert (run / "metrics.jsonl").read_text() == logged
