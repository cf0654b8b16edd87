"""The tables of parameters in docs/rewards say what the rewards declare."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from marble_rl.plugins import import_path
from marble_rl.rewards.core.registry import BUILT_IN

PAGES = Path(__file__).resolve().parents[2] / "docs" / "rewards"
SIMPLE = ("jpeg_compressibility", "brightness", "colour")
TYPES = {
    **{name: (name,) for name in ("aesthetic", "clipscore", "frames", "geneval", "hpsv2", "imagereward", "motion")},
    **{name: (name,) for name in ("ocr", "optical_flow", "pickscore", "temporal_consistency", "tesseract")},
    "trajectory": ("trajectory",),
    "simple": SIMPLE,
}
"""Page -> the rewards that it describes. The pages of rewards on other machines have tests of their own."""
TABLE = re.compile(r"^\| param \| default \| \|\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def documented(page: str) -> dict[str, str]:
    """Parameter -> default, as the tables of a page give them."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    rows = [row for table in TABLE.findall(text) for row in table.splitlines()]
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {row[1].strip("`"): row[2].strip('`"') for row in cells}


def declared(reward: str) -> dict[str, Any]:
    target = import_path(BUILT_IN[reward], "type")
    fields = target.params_model({"detector": "photo"} if reward == "geneval" else {}).model_fields
    return {name: "required" if field.is_required() else field.default for name, field in fields.items()}


@pytest.mark.parametrize("page", sorted(TYPES))
def test_the_table_has_every_parameter_with_its_default(page: str) -> None:
    table = documented(page)
    parameters = {name: default for reward in TYPES[page] for name, default in declared(reward).items()}
    assert sorted(table) == sorted(parameters)
    for name, default in parameters.items():
        if default is None:  # described in words
            assert not re.fullmatch(r"[\d.]+|\[.*\]|.*/.*", table[name]), (name, table[name])
        elif isinstance(default, str):
            assert table[name] == default, name
        else:
            assert json.loads(table[name]) == json.loads(json.dumps(default)), name


def test_every_builtin_reward_has_a_page() -> None:
    local = {name for name, path in BUILT_IN.items() if ".builtin." in path}
    assert local == {reward for rewards in TYPES.values() for reward in rewards}


@pytest.mark.parametrize("reward", [name for name, path in BUILT_IN.items() if ".builtin." in path])
def test_every_parameter_is_explained_where_it_is_declared(reward: str) -> None:
    model = import_path(BUILT_IN[reward], "type").params_model({})
    assert [name for name, field in model.model_fields.items() if not field.description] == []
