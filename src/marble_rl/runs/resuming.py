"""Where a run continues: from its newest whole checkpoint. One that has damaged checkpoints only is refused: it would
silently start again from step 0."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from marble_rl.errors import InputError
from marble_rl.runs.checkpoint import Checkpoint, load_newest
from marble_rl.runs.layout import checkpoint_steps, damaged_checkpoints
from marble_rl.runs.manifest import newest_verified


def resume_point(checkpoints: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint; None for a run that has none yet, which begins at step 0."""
    skipped: list[str] = []
    newest = load_newest(checkpoints, skipped.append)
    if newest is None and (damaged := _damaged(checkpoints)):
        why = f" ({'; '.join(skipped)})" if skipped else ""
        raise InputError(
            f"--resume: every checkpoint in {checkpoints} is damaged: {', '.join(damaged)}{why}. They are kept as they "
            "are. Restore one from a copy, or start again with another --out; if these folders are moved away, "
            "--resume begins at step 0"
        )
    for message in skipped:
        say(message)
    return newest


def how_to_continue(run: Path, checkpoints: Path, ranks: int) -> str:
    """Which step is saved, and the command that goes on from there."""
    try:
        saved, damaged = newest_verified(checkpoints), _damaged(checkpoints)
    except InputError as error:  # this is about an error already
        return f"No step is saved: {error}"
    if saved is None and damaged:
        return (
            f"No step is saved: every checkpoint in {checkpoints} is damaged ({', '.join(damaged)}). They are kept; "
            "start again with another --out"
        )
    state = "No step is saved yet." if saved is None else f"Step {saved} is saved."
    command = (
        f"marble train {shlex.quote(str(run))} --resume"
        if ranks == 1
        else "the same torchrun command and --resume-or-start"
    )
    return f"{state} Continue with: {command}"


def _damaged(checkpoints: Path) -> list[str]:
    """Names of all checkpoints, in a folder where none is whole."""
    return [*(f"step-{step}" for step in checkpoint_steps(checkpoints)), *damaged_checkpoints(checkpoints)]
