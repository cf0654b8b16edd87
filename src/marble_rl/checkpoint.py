"""Checkpoints that survive a crash at any moment, and exact resumption.

A checkpoint is written into a folder with a temporary name; the manifest, with the digest of every file, comes last;
then the folder gets its real name in one step. A folder whose manifest is missing or does not match is named, skipped,
and the one before it is used. Nothing random is saved: randomness follows from the step (see seeding.py).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from marble_rl.storage import file_digest, save_safetensors, storage_errors, sync_folder, write_json

FORMAT = 1
MANIFEST = "manifest.json"
TENSORS = ("adapters", "optimizer")


@dataclass(frozen=True)
class Checkpoint:
    """The state after ``step`` optimizer updates."""

    step: int
    adapters: dict[str, Tensor]
    """`default/...`, `old/...` and `ema/...`"""
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    """Small JSON values: coefficients, signal."""

    def adapter(self, name: str) -> dict[str, Tensor]:
        """Tensors of one adapter, by parameter name."""
        prefix = f"{name}/"
        return {k.removeprefix(prefix): v for k, v in self.adapters.items() if k.startswith(prefix)}


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps with a folder under its final name, ascending; complete or not."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name)))


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write ``folder/step-N`` and delete all but the ``keep`` newest."""
    final = folder / f"step-{checkpoint.step}"
    temporary = folder / f".step-{checkpoint.step}.partial"
    with storage_errors(f"checkpoint {final}"):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            for name in TENSORS:
                save_safetensors(temporary / f"{name}.safetensors", getattr(checkpoint, name), {"format": "pt"})
            write_json(temporary / "state.json", checkpoint.state)
            digests = {path.name: file_digest(path) for path in sorted(temporary.iterdir())}
            write_json(temporary / MANIFEST, {"format": FORMAT, "step": checkpoint.step, "sha256": digests})
            sync_folder(temporary)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync_folder(folder)
        for step in checkpoint_steps(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{step}")
        for leftover in folder.glob(".step-*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
    return final


def load_newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is complete and undamaged; None where there is none."""
    for step in reversed(checkpoint_steps(folder)):
        path = folder / f"step-{step}"
        try:
            return load_checkpoint(path)
        except DamagedCheckpoint as damage:
            warn(f"skipped checkpoint {path}: {damage}")
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint folder."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise DamagedCheckpoint(f"written in format {manifest['format']}, this version reads {FORMAT}")
        for name, digest in manifest["sha256"].items():
            if file_digest(path / name) != digest:
                raise DamagedCheckpoint(f"{name} does not match its digest")
        tensors = {name: load_file(path / f"{name}.safetensors") for name in TENSORS}
        state = json.loads((path / "state.json").read_text())
        return Checkpoint(int(manifest["step"]), **tensors, state=state)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"incomplete, {Path(error.filename).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"not readable ({error})") from None


class DamagedCheckpoint(Exception):
    """Why a checkpoint cannot be used."""
