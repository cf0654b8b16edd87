"""A small study that the tests of this folder copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from built_once import built_once
from ratings import prepare_study


@pytest.fixture(scope="session")
def prepared(finished_run: Path, tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models on four prompts."""
    return built_once(tmp_path_factory, "study", lambda folder: prepare_study(folder, finished_run, tiny_sd3, 4))


@pytest.fixture
def study(prepared: Path, tmp_path: Path) -> Path:
    """A copy for one test."""
    return Path(shutil.copytree(prepared / "study", tmp_path / "study"))
