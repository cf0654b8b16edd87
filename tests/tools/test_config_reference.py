"""docs/config.md is made from the schema."""

from __future__ import annotations

from pathlib import Path

from tools.config_reference import config_reference


def test_config_reference_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == config_reference(), "run `make docs`"
