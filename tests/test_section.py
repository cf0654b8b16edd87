"""The types of config sections, and how mistakes in them are explained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt, ValidationError

from marble_rl.section import FOLDER, FilePath, Fraction, ModelPath, Section, Weights, explain


class Square(Section):
    type: Literal["square"]
    side: PositiveInt


class Circle(Section):
    type: Literal["circle"]
    radius: Annotated[float, Field(gt=0, le=10)] = 1.0


class Drawing(Section):
    shape: Annotated[Square | Circle, Field(discriminator="type")]
    shapes: list[Circle] = Field(default_factory=list)
    pair: tuple[Fraction, Fraction] = (0, 1)
    weights: Weights = Field(default_factory=dict)
    mode: Literal["line", "page"] | Annotated[int, Field(ge=2)] | None = None
    step: Annotated[int, Field(multiple_of=8)] = 8
    on: bool = True


SQUARE = {"type": "square", "side": 1}


@pytest.mark.parametrize(
    ("tree", "lines"),
    [
        ({}, ["shape: is missing; add it"]),
        ({"shape": {}}, ["shape: needs a `type`; docs/config.md lists the valid ones"]),
        ({"shape": {"type": "sqare"}}, ["shape: unknown type 'sqare'. Did you mean 'square'? Valid: square, circle"]),
        ({"shape": {"type": "square"}}, ["shape.side: is missing; add it"]),
        ({"shape": {**SQUARE, "side": "ten"}}, ['shape.side: expected a valid integer, got "ten"']),
        ({"shape": {**SQUARE, "sied": 1}}, ["shape.sied: unknown key 'sied'. Did you mean 'side'? Valid: type, side"]),
        ({"shape": [1]}, ["shape: expected a mapping (key: value), got [1]"]),
        (
            {"shape": SQUARE, "shapes": [{"type": "circle", "radius": 11}]},
            ["shapes.0.radius: expected a number less than or equal to 10, got 11"],
        ),
        ({"shape": SQUARE, "shapes": 3}, ["shapes: expected a valid list, got 3"]),
        ({"shape": SQUARE, "pair": [0, 2]}, ["pair.1: expected a number less than or equal to 1, got 2"]),
        ({"shape": SQUARE, "pair": 2}, ["pair: expected a valid list, got 2"]),
        (
            {"shape": SQUARE, "weights": {"ocr": -1}},
            ["weights.ocr: expected a number greater than or equal to 0, got -1"],
        ),
        ({"shape": SQUARE, "weights": {"ocr": float("inf")}}, ["weights.ocr: expected a finite number, got Infinity"]),
        (
            {"shape": SQUARE, "mode": 1},
            ["mode: expected 'line' or 'page' or a number greater than or equal to 2, got 1"],
        ),
        ({"shape": SQUARE, "step": 9, "on": "x"}, ["step: expected a multiple of 8, got 9"]),
        ({"shape": SQUARE, "on": None}, ["on: expected a valid boolean, got null"]),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_with_key_expectation_and_value(tree: dict[str, Any], lines: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        Drawing.model_validate(tree)
    explained = explain(refused.value, Drawing, tree)
    assert explained[: len(lines)] == lines
    assert len(explained) == len(lines) + ("step" in tree)


def test_a_long_value_is_cut() -> None:
    tree = {"shape": "x" * 1000}
    with pytest.raises(ValidationError) as refused:
        Drawing.model_validate(tree)
    (line,) = explain(refused.value, Drawing, tree, "drawings.0.")
    assert line.startswith('drawings.0.shape: expected a mapping (key: value), got "xxx')
    assert len(line) < 200


class Files(Section):
    model: ModelPath = "mini"
    file: FilePath | None = None


def test_paths_are_made_absolute_only_while_a_config_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs" / "clip").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs"

    def loaded(**values: str) -> Files:
        return Files.model_validate(values, context={FOLDER: folder})

    assert loaded(model="clip").model == str(folder / "clip")
    assert loaded(model="here").model == str(tmp_path / "here")  # as typed with `--set`
    assert loaded(model="owner/name").model == "owner/name"
    assert loaded(file="head.pth").file == folder / "head.pth"
    assert loaded(file="../head.pth").file == tmp_path / "head.pth"
    assert loaded(file=str(tmp_path / "x")).file == tmp_path / "x"
    assert Files(model="clip", file=Path("head.pth")) == Files.model_validate({"model": "clip", "file": "head.pth"})
    assert Files(model="clip").model == "clip"


def test_a_folder_called_mini_is_not_the_model_mini(tmp_path: Path) -> None:
    (tmp_path / "mini").mkdir()
    assert Files.model_validate({"model": "mini"}, context={FOLDER: tmp_path}).model == "mini"
