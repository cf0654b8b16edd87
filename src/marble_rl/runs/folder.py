"""A run's folder: its files, the lock that keeps other runs out, and the check whether a run may continue in it.

config.json  metrics.jsonl  metrics.dropped.jsonl  samples/  checkpoints/step-N/  lora/  evaluation/  diagnosis/
trackers.json  base_scores.json  history.json  train.log
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from marble_rl import __version__
from marble_rl.config import RunConfig, dump_config, load_config
from marble_rl.config.effect import WITHOUT_EFFECT, matches
from marble_rl.distributed.world import World
from marble_rl.errors import InputError
from marble_rl.runs.history import Change
from marble_rl.runs.layout import LOCK, checkpoint_steps, evaluation_folder, in_use
from marble_rl.runs.manifest import version_of
from marble_rl.storage import read_regular, reading, reason, storage_errors, write_bytes
from marble_rl.trust import guard

IDENTITY = ("model", "lora", "prompts", "rewards", "balance")
"""Sections that define a run: with another value it is another run, which `--resume` refuses."""
FREE = ("evaluation", "logging")
"""Sections that do not affect the weights: they may change on `--resume`."""
STEPS = "trainer.steps"
FREE_KEYS = (STEPS, "prompts.heldout*", *WITHOUT_EFFECT)
"""Further keys that do not affect the weights of the steps done so far"""
CHANGEABLE_KEYS = (
    "rewards.*.clip*",
    "rewards.*.schedule*",
    "rewards.*.guard.floor",
    "rewards.*.guard.band",
    "rewards.*.batch_size",
    "rewards.*.precision",
    "model.dtype",
    "model.vae_dtype",
    "model.attention",
    "model.quantize",
    "model.gradient_checkpointing",
    "model.decoding",
)
"""Keys of the `IDENTITY` sections that may change on `--resume`: bounds on a reward that was exploited, floors of
guards, and settings that help against an out-of-memory error."""
StartMode = Literal["new", "resume", "resume_or_start"]


class RunFolder:
    """Paths of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """As it was given, for messages"""
        self.root = root = path.absolute()
        """For files: a reward may change the current folder while the run goes on"""
        self.config = root / "config.json"
        self.metrics = root / "metrics.jsonl"
        self.samples = root / "samples"
        self.checkpoints = root / "checkpoints"
        self.lora = root / "lora"
        self.evaluation = evaluation_folder(root)
        self.diagnosis = root / "diagnosis"
        self.base_scores = root / "base_scores.json"
        self.history = root / "history.json"

    @property
    def exists(self) -> bool:
        return self.config.is_file()

    def load_config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """The config of an existing run; refused if it was written by a version whose config this one cannot read."""
        if not self.exists:
            raise InputError(
                f"{self.path} is not a run folder: it has no config.json. Give the --out of a training run"
            )
        if not self.checkpoints.exists() and RunFolder(self.path / "run").exists:
            raise InputError(f"{self.path} is the folder of a job; its run is {self.path / 'run'}: give that")
        guard(self.root)
        try:
            load_config(self.config)
        except InputError as error:
            version = version_of(self.checkpoints)
            maker = (
                "the run does not say which version made it" if version is None else f"marble {version} made the run"
            )
            raise InputError(
                f"{self.path}: this version of marble ({__version__}) cannot read its config; {maker}. Use "
                f"the version that made it, or fix the key in config.json. {error}"
            ) from None
        return load_config(self.config, overrides)

    def check_start(self, config: RunConfig, mode: StartMode) -> list[Change]:
        """Refuse a config that may not start or continue here. Returns what changed since the run was last started."""
        if not self.exists:
            # Only hidden files: a run was killed here before it wrote its config.
            if self.path.is_dir() and any(not entry.name.startswith(".") for entry in self.path.iterdir()):
                raise InputError(f"--out: {self.path} is not empty and not a run; give another folder")
            if mode == "resume":
                raise InputError(
                    f"--resume: there is no run in {self.path}; give the --out of a run, leave --resume out to start "
                    "one, or use --resume-or-start"
                )
            return []
        if mode == "new":
            raise InputError(
                f"--out: {self.path} already holds a run; continue it with --resume, or give another folder"
            )
        changes = _changes(_tree(self.load_config()), _tree(config))
        for key, before, after in changes:
            if key.split(".")[0] in IDENTITY and not _is_free(key) and not matches(key, CHANGEABLE_KEYS):
                raise InputError(
                    f"--resume: {key} was {before!r} in {self.path}, now {after!r}; that is another run. "
                    "Restore the value, or give another --out"
                )
        scheduled = config.optimizer.schedule != "constant"  # the learning rate then depends on the last step
        return [
            Change(key=key, before=before, after=after, free=_is_free(key) and not (key == STEPS and scheduled))
            for key, before, after in changes
        ]

    @contextmanager
    def opened(self, config: RunConfig, world: World) -> Iterator[None]:
        """Create the folder, lock it and save the resolved config; rank 0 does this for all ranks.

        If an `InputError` ends the block before a new checkpoint is written, the folder is restored. A new run's files
        are removed. A resumed run gets its earlier config and history back.
        """
        with ExitStack() as held:
            with world.failing_together():
                if world.first:
                    before = set(self.root.iterdir()) if self.root.is_dir() else None
                    contents = _contents((self.config, self.history)) if self.exists else None
                    steps_before = checkpoint_steps(self.checkpoints)
                    held.enter_context(self._locked())
                    with storage_errors(f"run folder {self.path}"):
                        write_bytes(self.config, dump_config(config).encode())
            try:
                yield
            except InputError:
                if world.first and set(checkpoint_steps(self.checkpoints)) <= set(steps_before):
                    if contents is None:
                        self._remove_except(before)
                    else:
                        with storage_errors(f"run folder {self.path}"):
                            for file, content in contents.items():
                                write_bytes(file, content)
                raise

    def _remove_except(self, before: set[Path] | None) -> None:
        """Remove all entries that are not in ``before``; None: remove the folder, which did not exist before."""
        if before is None:
            shutil.rmtree(self.root)
            return
        for entry in set(self.root.iterdir()) - before:
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _locked(self) -> IO[str]:
        """The lock file, locked until it is closed."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = open(self.root / LOCK, "a+")  # noqa: SIM115  held until the run ends
        except OSError as error:
            raise InputError(f"--out: cannot write to {self.path}: {reason(error)}; give another folder") from error
        if not _lock(lock):
            lock.close()
            raise InputError(f"--out: another process is training in {self.path}; wait for it or stop it")
        with storage_errors(f"run folder {self.path}"):
            lock.truncate(0)
            lock.write(socket.gethostname())
            lock.flush()
        return lock

    def in_use(self) -> bool | None:
        """Whether a process is training in this folder; None if unknown."""
        return in_use(self.root)


def _contents(files: Sequence[Path]) -> dict[Path, bytes]:
    """Of those that are there."""
    contents = {}
    for file in files:
        if os.path.lexists(file):
            with reading(file):
                contents[file] = read_regular(file)
    return contents


def _lock(file: IO[str]) -> bool:
    """Lock the file. Tries three times, because `in_use` of another process holds the lock for a moment."""
    for pause in (0.05, 0.05, 0.0):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause)
        else:
            return True
    return False


def _is_free(key: str) -> bool:
    """Whether a key does not affect the weights of the steps done so far."""
    return key.split(".")[0] in FREE or matches(key, FREE_KEYS)


def _tree(config: RunConfig) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(dump_config(config))
    return tree


def _changes(before: Any, after: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """(key, before, after) of every leaf that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [*before, *(name for name in after if name not in before)]
        pairs = [(f"{key}.{name}".lstrip("."), before.get(name), after.get(name)) for name in names]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(f"{key}.{i}", b, a) for i, (b, a) in enumerate(zip(before, after, strict=True))]
    else:
        return [] if before == after else [(key, before, after)]
    return [change for name, b, a in pairs for change in _changes(b, a, name)]
