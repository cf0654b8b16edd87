"""manifest.json of a checkpoint: its step, and the SHA-256 digest of each of its files. Imports no torch.

Format 2 also has a checksum of the manifest itself. Format 1, which has none, is read too.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from marble_rl import __version__
from marble_rl.errors import InputError
from marble_rl.runs.layout import checkpoint_steps
from marble_rl.storage import file_digest, parse_json, read_json, read_regular, reason, write_json

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ("adapters", "optimizer")
FILES = frozenset({*(f"{name}.safetensors" for name in TENSORS), STATE})
MOST_BYTES = 1 << 16
"""Of a manifest; it has less than a thousand."""
CHECKSUM = "checksum"


class DamagedCheckpoint(Exception):
    """A checkpoint is incomplete or damaged; the message says how."""


class Manifest(BaseModel):
    """What the file says, beside its checksum."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    format: int
    marble: str | None = None
    """The version that wrote it; the first ones did not say"""
    step: NonNegativeInt
    sha256: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]
    """By the name of the file"""


def write_manifest(folder: Path, step: int) -> None:
    """Written last, so that a checkpoint with a manifest is complete."""
    digests = {name: file_digest(folder / name) for name in sorted(FILES)}
    tree = Manifest(format=FORMAT, marble=__version__, step=step, sha256=digests).model_dump()
    write_json(folder / MANIFEST, {**tree, CHECKSUM: _checksum(tree)})


def read_manifest(folder: Path, step: int) -> Manifest:
    """The manifest of the checkpoint of ``step``. Raises DamagedCheckpoint; of a later version InputError."""
    try:
        tree = _tree(folder)
        found = tree.get("format")
        if type(found) is int and found not in (1, FORMAT):
            # Not damaged: if it were skipped, the run would start from scratch and overwrite it.
            raise InputError(
                f"{folder}: written in format {found} {written_by(tree.get('marble'))}; this is marble "
                f"{__version__}, which reads formats 1 to {FORMAT}. Use the version that made it"
            )
        checksum = tree.pop(CHECKSUM, None)
        manifest = Manifest.model_validate(tree)
    except InputError:
        raise
    except FileNotFoundError:
        raise DamagedCheckpoint(f"incomplete, {MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is not readable ({reason(error)})") from None
    if checksum != (None if manifest.format == 1 else _checksum(tree)):
        raise DamagedCheckpoint(f"{MANIFEST} does not match its own checksum")
    if manifest.step != step:
        raise DamagedCheckpoint(f"{MANIFEST} is of step {manifest.step}, in the folder of step {step}")
    if manifest.sha256.keys() != FILES:
        raise DamagedCheckpoint(f"{MANIFEST} does not have the digests of {', '.join(sorted(FILES))} and no other")
    return manifest


def verify(folder: Path, step: int, digest: Callable[[Path], str] = file_digest) -> Manifest:
    """Compare every file with its digest. Raises like `read_manifest`."""
    manifest = read_manifest(folder, step)
    for name, expected in manifest.sha256.items():
        try:
            found = digest(folder / name)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"incomplete, {name} is missing") from None
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"{name} is not readable ({reason(error)})") from None
        if found != expected:
            raise DamagedCheckpoint(f"{name} does not match its digest")
    return manifest


def existing(final: Path) -> Path:
    """The folder of a checkpoint: under its final name, or aside if a crash came between the two renames."""
    return aside(final) if aside(final).exists() and not final.exists() else final


def aside(final: Path) -> Path:
    """Where the older checkpoint of a step is kept while the newer one is renamed to the final name."""
    return final.with_name(f".{final.name}.aside")


def newest_verified(folder: Path) -> int | None:
    """Step of the newest checkpoint whose files all match their digests."""
    for step in reversed(checkpoint_steps(folder)):
        try:
            return verify(existing(folder / f"step-{step}"), step).step
        except (DamagedCheckpoint, InputError):
            continue
    return None


def complete_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints that look whole at a glance: a valid manifest, and the files are there, ascending. Those
    of a later version count too."""
    return [step for step in checkpoint_steps(folder) if _looks_whole(existing(folder / f"step-{step}"), step)]


def _looks_whole(folder: Path, step: int) -> bool:
    try:
        names = read_manifest(folder, step).sha256
        return all(stat.S_ISREG((folder / name).stat().st_mode) for name in names)
    except InputError:
        return True
    except (DamagedCheckpoint, OSError):
        return False


def best_checkpoint(folder: Path) -> tuple[int, float] | None:
    """Step and score of the best of the checkpoints in ``folder`` (training/best.py), from the state of the newest;
    None where none was chosen."""
    try:
        newest = max(complete_steps(folder))
        best = read_json(existing(folder / f"step-{newest}") / STATE)["best"]
        return int(best["step"]), float(best["score"])
    except (ValueError, LookupError, TypeError, OverflowError):
        return None


def version_of(folder: Path) -> str | None:
    """The version of marble that wrote the newest of these checkpoints; None if no manifest names one."""
    for step in reversed(checkpoint_steps(folder)):
        try:
            version = _tree(existing(folder / f"step-{step}")).get("marble")
        except (OSError, ValueError):
            continue
        if isinstance(version, str):
            return version
    return None


def written_by(version: object) -> str:
    return f"by marble {version}" if isinstance(version, str) else "by an unknown version of marble"


def _tree(folder: Path) -> dict[str, Any]:
    """The manifest as parsed. Raises OSError or ValueError."""
    tree = parse_json(read_regular(folder / MANIFEST, MOST_BYTES))
    if not isinstance(tree, dict):
        raise ValueError("not a JSON object")
    return tree


def _checksum(tree: Mapping[str, Any]) -> str:
    """SHA-256 of all that a manifest says but the checksum itself, in a form that does not depend on white space."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
