"""Checkpoints that survive a crash at any moment, and exact resumption.

A checkpoint is written into a folder with a temporary name. The manifest, with the SHA-256 digest of every file, is
written last. Then the folder is renamed to its final name, `step-N`. An older folder of that name is renamed to
`.step-N.aside` before that; if a crash comes between the two renames, the older folder is read. A folder whose manifest
is missing or does not match is reported and skipped, and the checkpoint before it is used. No state of random
generators is saved: everything random is seeded by the step (see seeding.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from marble_rl import __version__
from marble_rl.errors import InputError, MarbleError
from marble_rl.runs.layout import checkpoint_steps
from marble_rl.storage import file_digest, save_safetensors, storage_errors, sync_folder, write_json

FORMAT = 1
MANIFEST = "manifest.json"
TENSORS = ("adapters", "optimizer")
RULE = "balancer/"
"""Prefix of the balancing rule's tensors, which are in the optimizer's file."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after ``step`` optimizer updates."""

    step: int
    adapters: dict[str, Tensor]
    """`default/...`, `old/...` and `ema/...`"""
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    """Small JSON values, such as the coefficients and the signal"""
    made_by: str | None = None
    """Version of marble that wrote it, if the manifest names one"""

    @property
    def moments(self) -> dict[str, Tensor]:
        """State of the optimizer alone."""
        return {name: tensor for name, tensor in self.optimizer.items() if not name.startswith(RULE)}

    @property
    def of_the_rule(self) -> dict[str, Tensor]:
        """Tensors of the balancing rule, such as momenta, by the rule's own names."""
        return {name.removeprefix(RULE): x for name, x in self.optimizer.items() if name.startswith(RULE)}

    def adapter(self, name: str) -> dict[str, Tensor]:
        """Tensors of one adapter, by parameter name."""
        prefix = f"{name}/"
        return {k.removeprefix(prefix): v for k, v in self.adapters.items() if k.startswith(prefix)}


def _aside(final: Path) -> Path:
    """Where the older checkpoint of a step is kept while the newer one is renamed to the final name."""
    return final.with_name(f".{final.name}.aside")


def _existing(final: Path) -> Path:
    """The folder of a checkpoint: under its final name, or aside if a crash came between the two renames."""
    return _aside(final) if _aside(final).exists() and not final.exists() else final


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int, best: int | None = None) -> Path:
    """Write ``folder/step-N`` and delete all but the ``keep`` newest and that of step ``best``."""
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
            about = {"format": FORMAT, "marble": __version__, "step": checkpoint.step}
            write_json(temporary / MANIFEST, {**about, "sha256": digests})
            sync_folder(temporary)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _put_in_place(temporary, final)
        replaced = (_aside(path) for path in folder.glob("step-*"))
        for leftover in (*folder.glob(".step-*.partial"), *replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        for step in checkpoint_steps(folder)[:-keep]:
            if step != best:
                shutil.rmtree(_existing(folder / f"step-{step}"))
    return final


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename the new folder; an older one of that name is kept aside until the new name is durable."""
    if final.exists():
        shutil.rmtree(_aside(final), ignore_errors=True)
        final.rename(_aside(final))
    temporary.rename(final)
    sync_folder(final.parent)


def load_newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is complete and undamaged, if any. ``warn`` is called for each one skipped."""
    for step in reversed(checkpoint_steps(folder)):
        path = folder / f"step-{step}"
        try:
            return load_checkpoint(path)
        except DamagedCheckpoint as damage:
            warn(f"skipped checkpoint {path}: {damage}")
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint folder, under its final name."""
    path = _existing(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            # Not damaged: if it were skipped, the run would start from scratch and overwrite it.
            raise InputError(
                f"{path}: written in format {manifest['format']!r} {_by(manifest.get('marble'))}; this is marble "
                f"{__version__}, which reads format {FORMAT}. Use the version that made it"
            )
        for name, digest in manifest["sha256"].items():
            if file_digest(path / name) != digest:
                raise DamagedCheckpoint(f"{name} does not match its digest")
        tensors = {name: load_file(path / f"{name}.safetensors") for name in TENSORS}
        state = json.loads((path / "state.json").read_text())
        return Checkpoint(int(manifest["step"]), **tensors, state=state, made_by=manifest.get("marble"))
    except InputError:
        raise
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"incomplete, {Path(error.filename).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"not readable ({error})") from None


def version_of(folder: Path) -> str | None:
    """The version of marble that wrote the newest of these checkpoints; None if no manifest names one."""
    for step in reversed(checkpoint_steps(folder)):
        try:
            return str(json.loads((_existing(folder / f"step-{step}") / MANIFEST).read_text())["marble"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


@contextmanager
def restoring(checkpoint: Checkpoint, run: Path) -> Iterator[None]:
    """Turn errors from missing or incompatible state (another version of marble) into an `InputError`."""
    try:
        yield
    except MarbleError:
        raise
    except (KeyError, ValueError, TypeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else f"does not fit: {error}"
        raise InputError(
            f"{run}: the state of its checkpoint of step {checkpoint.step}, written {_by(checkpoint.made_by)}, {what}. "
            f"This is marble {__version__}; use the version that made the run, or start a new one"
        ) from None


def _by(version: str | None) -> str:
    return "by an unknown version of marble" if version is None else f"by marble {version}"


class DamagedCheckpoint(Exception):
    """A checkpoint is incomplete or damaged; the message says how."""
