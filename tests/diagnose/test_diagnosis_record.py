"""The record of a diagnosis: files of the last release, and files that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marble_rl.diagnose.record import Diagnosis
from marble_rl.errors import InputError

KEPT = Path(__file__).parents[2] / "docs" / "results" / "diagnoses" / "marble-seed0.json"


@pytest.fixture
def kept() -> dict[str, Any]:
    """A diagnosis that the last release wrote: without a version, and without samples."""
    tree: dict[str, Any] = json.loads(KEPT.read_text())
    assert "version" not in tree
    return tree


def test_a_diagnosis_of_the_last_release_is_read_and_written_with_a_version(tmp_path: Path) -> None:
    diagnosis = Diagnosis.read(KEPT)
    assert diagnosis.directions["marble"].in_batch["min_cos"].mean == pytest.approx(0.516773647721953)
    assert list(diagnosis.by_size("marble")) == [1, 2, 4, 8, 16]
    diagnosis.write(tmp_path / "new.json")
    assert json.loads((tmp_path / "new.json").read_text())["version"] == 1
    assert Diagnosis.read(tmp_path / "new.json") == diagnosis


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda tree: tree.clear(), "names: Field required"),
        (lambda tree: tree["cosines"].pop(), "expected one value for each of 5 rewards"),
        (lambda tree: tree["signal"].update({"0": [0.5] * 5}), "Input should be greater than 0"),
        (lambda tree: tree["qp"].update(norm=[-0.5]), "qp.norm.0: Input should be greater than or equal to 0"),
        (lambda tree: tree["qp"].update(norm=[float("inf")]), "qp.norm.0: Input should be a finite number"),
        (lambda tree: tree.update(directions={}), "expected rewards, directions and lengths"),
    ],
)
def test_what_is_wrong_is_named(
    kept: dict[str, Any], tmp_path: Path, damage: Callable[[dict[str, Any]], object], reason: str
) -> None:
    damage(kept)
    (tmp_path / "x.json").write_text(json.dumps(kept))
    with pytest.raises(InputError) as caught:
        Diagnosis.read(tmp_path / "x.json")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'x.json'} is not a diagnosis that this version reads (")
    assert reason in message
    assert message.endswith("Run marble diagnose again, or delete the file")
