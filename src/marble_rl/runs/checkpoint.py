"""Checkpoints that survive a crash at any moment, and exact resumption.

A checkpoint is written into a folder with a temporary name. The manifest, with the SHA-256 digest of every file, is
written last. Then the folder is renamed to its final name, `step-N`. An older folder of that name is renamed to
`.step-N.aside` before that; if a crash comes between the two renames, the older folder is read. No state of random
generators is saved: everything random is seeded by the step (see seeding.py).

A folder that does not match its manifest is damaged. Readers report and skip it, and use the checkpoint before it. The
training renames it to `damaged-step-N` when it saves its next checkpoint: then it neither counts among the checkpoints
to keep, nor is it ever deleted. Only `save_checkpoint` renames or deletes: the process that holds the run's lock.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from marble_rl import __version__
from marble_rl.errors import InputError, MarbleError
from marble_rl.runs.layout import DAMAGED, checkpoint_steps, step_of
from marble_rl.runs.manifest import (
    STATE,
    TENSORS,
    DamagedCheckpoint,
    aside,
    existing,
    verify,
    write_manifest,
    written_by,
)
from marble_rl.runs.run_log import LOG
from marble_rl.storage import (
    file_digest,
    parse_json,
    read_regular,
    reason,
    save_safetensors,
    storage_errors,
    sync_folder,
    write_json,
)

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


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int, best: int | None = None) -> Path:
    """Write ``folder/step-N`` and delete all but it, the newest others up to ``keep``, and that of step ``best``.
    Damaged ones do not count, and are kept under another name."""
    final = folder / f"step-{checkpoint.step}"
    temporary = folder / f".step-{checkpoint.step}.partial"
    with storage_errors(f"checkpoint {final}"):
        _remove(temporary)
        try:
            temporary.mkdir(parents=True)
            for name in TENSORS:
                save_safetensors(temporary / f"{name}.safetensors", getattr(checkpoint, name), {"format": "pt"})
            write_json(temporary / STATE, checkpoint.state)
            write_manifest(temporary, checkpoint.step)
            sync_folder(temporary)
        except OSError:
            _remove(temporary)
            raise
        _put_in_place(temporary, final, checkpoint.step)
        whole = _whole_steps(folder)
        if checkpoint.step not in whole:
            raise OSError(errno.EIO, "what was written cannot be read back")
        others = [step for step in whole if step != checkpoint.step]
        _delete(folder, set(others[keep - 1 :]) - {best})
    return final


def _put_in_place(temporary: Path, final: Path, step: int) -> None:
    """Rename the new folder; an older one of that name is kept aside until the new name is durable."""
    if os.path.lexists(final) and _whole_or_renamed(final, step):
        _remove(aside(final))
        final.rename(aside(final))
    temporary.rename(final)
    sync_folder(final.parent)


def _whole_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints that match their manifests, the newest first. The others are renamed."""
    steps = reversed(checkpoint_steps(folder))
    return [step for step in steps if _whole_or_renamed(existing(folder / f"step-{step}"), step)]


def _whole_or_renamed(path: Path, step: int) -> bool:
    """Whether a checkpoint matches its manifest. A damaged one is renamed, never over an earlier one."""
    try:
        verify(path, step, _digest)
    except DamagedCheckpoint as damage:
        name = f"{DAMAGED}step-{step}"
        names = chain([name], (f"{name}-{i}" for i in count(2)))
        kept = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
        path.rename(kept)
        LOG.warning(f"damaged checkpoint {path}: {damage}. It is kept as {kept.name}")
        return False
    except InputError:  # of a later version: neither counted nor deleted
        return False
    return True


def _delete(folder: Path, steps: set[int]) -> None:
    """Delete these checkpoints and what earlier kills have left. Renamed first: a kill leaves no half of one."""
    leftovers = [folder.glob(f".step-*.{kind}") for kind in ("partial", "deleted")]
    for leftover in (*(path for paths in leftovers for path in paths), *map(aside, folder.glob("step-*"))):
        _remove(leftover)
    for step in steps:
        path, hidden = existing(folder / f"step-{step}"), folder / f".step-{step}.deleted"
        path.rename(hidden)
        _remove(hidden)


def _remove(path: Path) -> None:
    """Delete a folder, or whatever else has its name. What cannot be deleted is tried again after the next save."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    """As `file_digest`; of a file that has not changed since this process computed it, without reading it."""
    about = path.stat()
    return _digest_once(path, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@lru_cache(maxsize=4096)
def _digest_once(path: Path, *_identity: int) -> str:
    return file_digest(path)


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
    """Read and verify one checkpoint folder, under its final name `step-N`."""
    step = step_of(path.name)
    assert step is not None, f"{path.name} is not the name of a checkpoint"
    path = existing(path)
    manifest = verify(path, step)
    try:
        tensors = {name: load_file(path / f"{name}.safetensors") for name in TENSORS}
        state = parse_json(read_regular(path / STATE))
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedCheckpoint(f"not readable ({reason(error)})") from None
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{STATE} is not a JSON object")
    return Checkpoint(step, **tensors, state=state, made_by=manifest.marble)


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
            f"{run}: the state of its checkpoint of step {checkpoint.step}, written {written_by(checkpoint.made_by)}, "
            f"{what}. This is marble {__version__}; use the version that made the run, or start a new one"
        ) from None
