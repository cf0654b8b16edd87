"""What `marble diagnose` left in RUN/diagnosis/diagnosis.json, with whatever directions it compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marble_rl.intervals import Difference
from marble_rl.report.lenient import UNREADABLE, is_number, number_of, spanned


@dataclass(frozen=True)
class Direction:
    """How one way to combine the rewards serves the one it serves least: means over batches with 95 % intervals."""

    name: str
    meaning: str
    own: dict[str, Difference]
    """`min_cos` and `conflict`, with the gradients of the batch that it was made from"""
    other: dict[str, Difference]
    """With those of independent batches"""
    by_size: dict[int, Difference]
    """Smallest cosine with the mean gradient of all other images, by batch size relative to the run's"""
    step: Difference | None
    """Smallest cosine of the step that AdamW would take, on independent batches"""


@dataclass(frozen=True)
class StoredDiagnosis:
    """Gradients of one checkpoint on fresh batches."""

    rewards: list[str]
    step: int | None
    batches: int
    images: int
    """In each batch"""
    directions: list[Direction]
    cosines: list[list[float | None]]
    """Between the rewards' true gradients; None where one is lost in noise"""
    correlations: list[list[float | None]]
    """Between the rewards' advantages; empty where an older version did not measure them"""
    agreement: Difference | None
    """Of the cosines between gradients in one batch with these"""
    signal: dict[float, list[float | None]]
    """By batch size relative to the run's, for each reward"""
    norms: list[float]
    """Of each batch's min-norm point"""
    combined: list[float]
    """Of each batch's combined gradient, in units of the rewards' mean length"""
    near_zero: float
    """Share of batches with a min-norm point next to nothing"""
    conflict: list[tuple[float, float, float]]
    """Constructed: strength, smallest cosine of the min-norm direction and of the sum"""
    samples: list[tuple[str, str, list[float | None]]]
    """Source, prompt, advantage of each reward; None where it does not apply"""

    def direction(self, name: str) -> Direction | None:
        return next((found for found in self.directions if found.name == name), None)


def read_diagnosis(folder: Path, remarks: list[str]) -> StoredDiagnosis | None:
    """None, with a remark where there is something that cannot be read."""
    file = folder / "diagnosis.json"
    if not file.exists():
        return None
    try:
        return _parse(json.loads(file.read_text(encoding="utf-8")))
    except UNREADABLE as error:
        remarks.append(
            f"diagnosis/diagnosis.json is not what this version of marble writes ({type(error).__name__}: {error}); "
            "it was left out. Run marble diagnose again."
        )
        return None


def _parse(tree: dict[str, Any]) -> StoredDiagnosis:
    rewards = [str(name) for name in tree["names"]]
    meanings, applied = tree.get("meanings", {}), tree.get("applied", {})
    advantages = tree.get("advantages", {})
    directions = []
    for name, figures in tree["directions"].items():
        step = _estimates(applied.get(name, {})).get("min_cos")
        own, other = _estimates(figures["in_batch"]), _estimates(figures["independent"])
        by_size = _worst_by_size(name, tree)
        directions.append(Direction(str(name), str(meanings.get(name, "")), own, other, by_size, step))
    found = StoredDiagnosis(
        rewards,
        tree["step"],
        int(number_of(tree["batches"])),
        int(number_of(tree["images"])),
        directions,
        [_known(row, rewards) for row in tree["cosines"]],
        [_known(row, rewards) for row in advantages.get("correlations", [])],
        _estimates({"agreement": advantages.get("agreement") or {}}).get("agreement"),
        dict(sorted((float(size), _known(row, rewards)) for size, row in tree["signal"].items())),
        [number_of(value) for value in tree["qp"]["norm"]],
        [number_of(value) for value in tree["qp"]["combined"]],
        number_of(tree["qp"]["near_zero"]),
        [_constructed(found) for found in tree["conflict"]],
        [(str(s["source"]), str(s["prompt"]), _known(s["advantages"], rewards)) for s in tree["samples"]],
    )
    _check(found)
    return found


def _check(found: StoredDiagnosis) -> None:
    """What charts rely on. Raises ValueError."""
    rewards = len(found.rewards)
    if not (rewards and found.directions and found.norms and found.combined):
        raise ValueError("it has no directions, or no lengths")
    if len(found.cosines) != rewards or len(found.correlations) not in (0, rewards):
        raise ValueError("it has not a cosine for every reward")
    if min(*found.norms, *found.combined) < 0:
        raise ValueError("a length is negative")
    sizes = [*found.signal, *(size for direction in found.directions for size in direction.by_size)]
    if not all(is_number(size) and size > 0 for size in sizes):
        raise ValueError("a batch has no size")


def _constructed(found: dict[str, Any]) -> tuple[float, float, float]:
    strength, ours, theirs = (number_of(found[key]) for key in ("strength", "min_cos", "weighted_sum_min_cos"))
    return strength, ours, theirs


def _worst_by_size(direction: str, tree: dict[str, Any]) -> dict[int, Difference]:
    sizes = {1: tree["directions"]} | {int(size): of for size, of in tree.get("larger", {}).items()}
    found = {size: _estimates(of.get(direction, {}).get("rest", {})) for size, of in sorted(sizes.items())}
    return {size: figures["min_cos"] for size, figures in found.items() if "min_cos" in figures}


def _estimates(figures: dict[str, Any]) -> dict[str, Difference]:
    known = {name: spanned(found) for name, found in figures.items()}
    return {name: found for name, found in known.items() if found is not None}


def _known(row: list[Any], rewards: list[str]) -> list[float | None]:
    if len(row) != len(rewards):
        raise ValueError(f"{len(row)} values for {len(rewards)} rewards")
    return [float(value) if is_number(value) else None for value in row]
