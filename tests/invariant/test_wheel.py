"""What a user of pip gets: the wheel alone, in a new virtual environment and an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT)]
    subprocess.run(build, check=True)
    return next(out.glob("*.whl"))


@pytest.mark.full
def test_recipes_in_the_wheel_are_those_of_the_repository(wheel: Path) -> None:
    configs = subprocess.run(["git", "ls-files", "configs"], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("marble_rl/recipes/")}
        assert names == {name.replace("configs/", "marble_rl/recipes/", 1) for name in configs.stdout.splitlines()}
        for name in names:
            original = ROOT / name.replace("marble_rl/recipes/", "configs/", 1)
            assert archive.read(name) == original.read_bytes()
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert "Project-URL: Repository" in metadata


@pytest.mark.full
def test_start_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """marble init, train, report. Dependencies come from this environment, marble itself from the wheel."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folder = tmp_path / "empty"
    folder.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def marble(*arguments: str) -> str:
        command = [str(tmp_path / "venv" / "bin" / "python"), "-m", "marble_rl.cli", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "mini-demo" in marble("init")
    marble("init", "mini-demo")
    assert (folder / "my_rewards.py").exists()
    small = ("--set", "trainer.steps=2", "--set", "rollout.groups=3", "--set", "rollout.group_size=2")
    marble("train", "mini-demo.yaml", "--out", "runs/first", *small)
    marble("train", "mini-demo", "--out", "runs/by-name", "--set", "trainer.steps=1", *small[2:])
    marble("report", "runs/first")
    assert (folder / "runs" / "first" / "report.html").stat().st_size > 10_000
