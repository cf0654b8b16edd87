"""The comparison of step times: a tree beside itself takes its own time and gives its own rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.step_times import main
from tools.work_trees import HERE


@pytest.mark.full
def test_a_tree_beside_itself(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(str(HERE), config=str(config_file), set_=["balance.refresh_every=1"], steps=4, rounds=1)
    *_, first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("round 1: ")
    assert last.startswith("median ")
    assert last.endswith("rewards of the first step differ by at most 0.0e+00")
