"""Trainings that are killed, or whose disk fails, at random file operations: resumed, they end in the same bytes."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

from tools.campaign.attack import BAD_INPUT, DONE, STOPPED, Attack, Seeded, faults_of
from tools.campaign.operations import Operations
from tools.campaign.process import Ended, Started
from tools.campaign.world import World

KILLED = -signal.SIGKILL
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT)


def _train(world: World, folder: Path, operations: Operations) -> Ended:
    command = ("train", world.config, "--out", "run", "--resume-or-start")
    return Started(command, folder, operations.watch).wait()


def results_of(run: Path) -> dict[str, bytes]:
    """The files of a run that must not depend on what happened to it: LoRA and checkpoints, by path."""
    files = (file for part in ("lora", "checkpoints") for file in (run / part).rglob("*") if file.is_file())
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def _whole(world: World) -> tuple[dict[str, bytes], int]:
    """What the undisturbed training gives, and its number of operations, of which a file keeps count."""
    folder = world.folder / "whole"
    count = folder / "operations.txt"
    if not count.exists():
        folder.mkdir(exist_ok=True)
        operations = Operations(folder / "run")
        ended = _train(world, folder, operations)
        if ended.code:
            raise RuntimeError(f"a training without an attack failed:\n{ended.text}")
        count.write_text(str(operations.begun))
    return results_of(folder / "run"), int(count.read_text())


def killed(world: World, seeded: Seeded) -> Attack:
    """Killed at one to three random operations of the training and of its resumptions, then finished."""
    whole, operations = _whole(world)
    places: list[int] = []
    faults: list[str] = []
    for _ in range(seeded.rng.choice((1, 1, 2, 3))):
        places.append(seeded.rng.randrange(operations))
        ended = _train(world, seeded.folder, Operations(seeded.folder / "run", places[-1]))
        if ended.code != KILLED:
            faults += faults_of(ended, (DONE,))  # a resumed training has fewer operations
    ended = _train(world, seeded.folder, Operations(seeded.folder / "run"))
    faults += [*faults_of(ended, (DONE,)), *_differences(whole, seeded.folder / "run")]
    return Attack(f"killed at operations {', '.join(map(str, places))} of {operations}", ended, faults)


def failing_disk(world: World, seeded: Seeded) -> Attack:
    """An operation fails, once or from then on; then the disk is well again, and the training is resumed."""
    whole, operations = _whole(world)
    at, code, once = seeded.rng.randrange(operations), seeded.rng.choice(ERRORS), seeded.rng.random() < 0.5
    failed = _train(world, seeded.folder, Operations(seeded.folder / "run", at, code, once))
    faults = faults_of(failed, (DONE, BAD_INPUT, STOPPED))
    ended = _train(world, seeded.folder, Operations(seeded.folder / "run"))
    faults += [*faults_of(ended, (DONE,)), *_differences(whole, seeded.folder / "run")]
    what = f"{errno.errorcode[code]} at operation {at} of {operations}, {'once' if once else 'from then on'}"
    return Attack(what, failed if faults_of(failed, (DONE, BAD_INPUT, STOPPED)) else ended, faults)


def _differences(whole: dict[str, bytes], run: Path) -> list[str]:
    """The undisturbed files must be there. A kill between a checkpoint and its clean-up may leave one more."""
    found = results_of(run)
    other = sorted(name for name, content in whole.items() if found.get(name) != content)
    faults = [f"other bytes: {', '.join(other)}"] if other else []
    more = {name.split("/")[1] for name in found.keys() - whole.keys() if name.startswith("checkpoints/step-")}
    return faults + ([f"surplus checkpoints: {', '.join(sorted(more))}"] if more else [])
