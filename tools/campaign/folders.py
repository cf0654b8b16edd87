"""Damaged run folders, LoRA files and comparisons: a command refuses them in one line, or gives what it gave before.

A resumed run must end with the bytes of the undisturbed one, because a damaged checkpoint is never used. Scores of an
evaluation must be those of the undamaged run, unless it says that it took an earlier checkpoint. No command may touch
the checkpoints that are not damaged. Settings in config.json are the user's: with other ones the results may differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.campaign import hostile
from tools.campaign.attack import BAD_INPUT, DONE, STOPPED, Attack, Seeded, faults_of
from tools.campaign.process import run
from tools.campaign.world import COMPARED, LATER, LORA, PROMPT, SCORES, World, lora_of

COMMANDS: dict[str, tuple[str, ...]] = {
    "resume": ("train", "run", "--resume", "--set", f"trainer.steps={LATER}"),
    "evaluate": ("evaluate", "run"),
    "export": ("export", "run", "--out", "exported"),
    "sample": ("sample", "run", "--prompt", PROMPT, "--out", "sample.png"),
    "report": ("report", "run"),
    "runs": ("runs", "."),
    "diagnose": ("diagnose", "run", "--batches", "2"),
}
OFTEN = ("resume", "resume", "resume", "evaluate", "evaluate", *COMMANDS)


def damaged_run(world: World, seeded: Seeded) -> Attack:
    rng = seeded.rng
    folder = hostile.folder(seeded.folder / "run", world.run())
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png")
    chosen = rng.sample(files, rng.choice((1, 1, 1, 2, 5)))
    damages = [f"{file.relative_to(folder)}: {hostile.file(rng, file)}" for file in chosen]
    intact = _checkpoints(folder)
    name = rng.choice(OFTEN)
    ended = run(COMMANDS[name], seeded.folder)
    faults = faults_of(ended, (DONE, BAD_INPUT, STOPPED))
    settings_changed = any(file.name == "config.json" for file in chosen)
    if ended.code == DONE and not settings_changed:
        if name == "resume" and lora_of(folder) != world.later():
            faults.append("other weights than without the damage")
        if name == "evaluate" and "skipped checkpoint" not in ended.text:
            faults += _wrong_scores(folder, world.scores())
    if name != "resume" and _checkpoints(folder) != intact:
        faults.append("changed a checkpoint")
    return Attack(f"{name}: {', '.join(damages)}", ended, faults)


def _checkpoints(folder: Path) -> dict[str, bytes | None]:
    """All files of all checkpoints; None for what is not a file."""
    paths = sorted((folder / "checkpoints").rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def _wrong_scores(folder: Path, right: dict[str, Any]) -> list[str]:
    scores = json.loads((folder / SCORES).read_text())
    return [] if _means(scores) == _means(right) else ["other scores than without the damage"]


def _means(scores: dict[str, Any]) -> list[Any]:
    """The step, the scores and their differences."""
    return [scores[key] for key in ("step", "differences", "weights")]


def damaged_lora(world: World, seeded: Seeded) -> Attack:
    rng = seeded.rng
    folder = hostile.folder(seeded.folder / "lora", (world.run() / LORA).parent)
    file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    damage = (
        _other_header(rng, file) if file.suffix == ".safetensors" and rng.random() < 0.5 else hostile.file(rng, file)
    )
    command = ("sample", "lora", "--model", world.pipeline, "--prompt", PROMPT, "--out", "sample.png")
    ended = run(command, seeded.folder)
    return Attack(f"{file.name}: {damage}", ended, faults_of(ended))


def _other_header(rng: Any, file: Path) -> str:
    """Change a value in the JSON header of a safetensors file."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(hostile.tree(rng, json.loads(data[8 : 8 + size])), default=str, skipkeys=True)
    text = header.encode(errors="replace")
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return "another header"


def damaged_comparison(world: World, seeded: Seeded) -> Attack:
    rng = seeded.rng
    source = world.comparison()
    folder = seeded.folder / "comparison"
    (folder / "jobs").mkdir(parents=True)
    for file in (*source.glob("*.json"), *source.glob("jobs/*.json")):
        (folder / file.relative_to(source)).write_bytes(file.read_bytes())
    file = rng.choice(sorted(folder.rglob("*.json")))
    damage = hostile.file(rng, file)
    table = ("compare", source.with_suffix(".yaml"), *COMPARED, "--table-only", "--out", "comparison")
    ended = run(rng.choice((table, ("report", "comparison"))), seeded.folder)
    return Attack(f"{file.relative_to(folder)}: {damage}", ended, faults_of(ended, (DONE, BAD_INPUT, STOPPED)))
