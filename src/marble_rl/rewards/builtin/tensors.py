"""Published checkpoints as tensors by name, every one of which must be accounted for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from marble_rl.errors import InputError

SHOWN = 10
"""Names of tensors that an error lists."""


def read_tensors(file: Path, key: str, advice: str) -> dict[str, Tensor]:
    """The tensors of a .safetensors or of a file that torch saved, floating ones in float32. Nothing is unpickled."""
    try:
        stored: Any = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, map_location="cpu", weights_only=True)
        )
    except FileNotFoundError:
        raise InputError(f"{key}: no such file: {file}; {advice}") from None
    except Exception as error:  # the type depends on what is wrong with the file
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{key}: {file} cannot be read as tensors, and nothing else is unpickled ({reason})") from None
    if isinstance(stored, Mapping) and isinstance(stored.get("state_dict"), Mapping):
        stored = stored["state_dict"]
    if not isinstance(stored, Mapping) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise InputError(f"{key}: {file} holds something other than tensors by name; {advice}")
    return {str(name): value.float() if value.is_floating_point() else value for name, value in stored.items()}


def shape_of(stored: Mapping[str, Tensor], name: str, rank: int) -> tuple[int, ...]:
    """The shape of a tensor that must be there, with that many dimensions."""
    if name not in stored:
        raise InputError(f"missing: {name}")
    shape = tuple(stored[name].shape)
    if len(shape) != rank:
        raise InputError(f"of another shape: {name} is {list(shape)}, {rank} dimensions are expected")
    return shape


def count_blocks(stored: Mapping[str, Tensor], prefix: str) -> int:
    """One more than the highest number that follows the prefix in a name."""
    return 1 + max(int(name.removeprefix(prefix).partition(".")[0]) for name in stored if name.startswith(prefix))


def renamed(name: str, patterns: Iterable[tuple[str, str]]) -> str:
    """A tensor's name in the other library: each pattern is replaced, one after the other."""
    for pattern, there in patterns:
        name = re.sub(pattern, there, name)
    return name


def check_accounted(stored: Mapping[str, Tensor], wanted: Mapping[str, Sequence[int]], unused: Sequence[str]) -> None:
    """Refuse missing, unknown and misshapen tensors by name. ``unused`` ones may be there."""
    misshapen = [
        f"{name} is {list(stored[name].shape)}, {list(shape)} is expected"
        for name, shape in wanted.items()
        if name in stored and tuple(stored[name].shape) != tuple(shape)
    ]
    by_problem = {
        "missing": [name for name in wanted if name not in stored],
        "unknown": [name for name in stored if name not in wanted and name not in unused],
        "of another shape": misshapen,
    }
    problems = [f"{what}: {_listed(names)}" for what, names in by_problem.items() if names]
    if problems:
        raise InputError("; ".join(problems))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
