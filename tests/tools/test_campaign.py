"""The campaign of attacks: a short part with fixed seeds, and that it finds what it looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def campaign(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it forks, and the threads of this one would not survive that."""
    command = [sys.executable, "-m", "tools.campaign", "--out", str(out), *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


def test_hostile_inputs_are_refused(tmp_path: Path) -> None:
    counts = ("configs=12", "set=6", "prompts=6")
    found = campaign(tmp_path, "--seed", "1", *(word for count in counts for word in ("--attacks", count)))
    assert found.returncode == 0, found.stdout + found.stderr
    assert not (tmp_path / "failures").exists()


@pytest.mark.full
def test_five_minutes_of_all_parts(tmp_path: Path) -> None:
    found = campaign(tmp_path, "--minutes", "5", "--seed", "2")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.full
def test_an_attack_that_succeeds_is_kept_and_can_be_made_again(tmp_path: Path) -> None:
    """With a limit that the smallest message exceeds, every refusal is a failure."""
    program = (
        "import sys; from tools.campaign import __main__ as campaign, attack; attack.MESSAGE = 0; "
        "sys.exit(campaign.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "--out", str(tmp_path)]
    run = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    found = subprocess.run([*command, "--attacks", "set=3"], **run)
    assert found.returncode == 1, found.stdout + found.stderr
    kept = sorted((tmp_path / "failures").iterdir())
    about = json.loads((kept[0] / "attack.json").read_text())
    assert any("message of" in fault for fault in about["faults"])
    again = subprocess.run([*command, "--again", str(kept[0])], **run)
    assert again.returncode == 1
    assert "message of" in again.stdout
    assert about["what"] in again.stdout


@pytest.mark.parametrize("given", ["configs", "configs=x", "nothing=3"])
def test_a_part_that_does_not_exist_is_named(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.campaign.__main__ import parse

    with pytest.raises(SystemExit) as stop:
        parse(["--attacks", given])
    assert stop.value.code == 2
    assert repr(given) in capsys.readouterr().err
