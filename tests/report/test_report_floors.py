"""What a page says about the floors of guards."""

from __future__ import annotations

from pathlib import Path

from marble_rl.config import load_config
from marble_rl.report.floors import floors
from marble_rl.report.page import run_page
from marble_rl.report.run_data import RunData
from marble_rl.report.verdicts import verdicts
from marble_rl.types import Metrics
from runs import write_config

REWARDS = [
    {"name": "small", "type": "jpeg_compressibility"},
    {"name": "bright", "type": "brightness", "guard": {"floor": -0.5}},
    {"name": "colour", "type": "colour", "guard": {}},
]


def run(folder: Path, lines: list[Metrics], guarded: bool = True) -> RunData:
    rewards = REWARDS if guarded else REWARDS[:1]
    config = load_config(write_config(folder / "c.yaml", Path("mini"), rewards=rewards, balance={"type": "fair"}))
    return RunData(folder, config, [{"step": float(i), **line} for i, line in enumerate(lines)], None, [], 0.0)


def line(level: float, rate: float, slack: float = 0.0) -> Metrics:
    both = ("bright", "colour")
    values = {"level": level, "rate": rate, "slack": slack, "lambda": 0.3}
    return {f"floor/{name}/{key}": value for name in both for key, value in values.items()}


def answer(data: RunData) -> tuple[str, str]:
    (verdict,) = [v for v in verdicts(data) if v.claim == "Does every guard hold its floor?"]
    return verdict.answer, verdict.text


def test_floors_that_hold(tmp_path: Path) -> None:
    data = run(tmp_path, [line(-9.0, 0.5)] * 6 + [line(0.1, -0.2)] * 6)
    assert answer(data) == ("yes", "All of them hold it.")
    page = run_page(data)
    assert "Floors of the guards" in page
    assert "Does every objective rise?" in page
    section = floors(data)
    assert section is not None
    assert [chart.title for chart in section.charts] == ["bright", "colour", "Pull of the guards"]


def test_floors_that_do_not(tmp_path: Path) -> None:
    data = run(tmp_path, [line(0.1, -1.0)] * 6 + [line(-0.7, 0.4, slack=0.2)] * 6)
    assert answer(data) == (
        "no",
        "bright and colour stood below the floor in the last third of the steps. In 6 of 12 steps no direction "
        "satisfied all floors: lower one.",
    )


def test_guards_without_scores(tmp_path: Path) -> None:
    assert answer(run(tmp_path, []))[0] == "unknown"
    rate_alone = {"floor/bright/rate": 0.1}  # as in a damaged log
    assert answer(run(tmp_path, [rate_alone]))[0] == "unknown"
    only_one = {key: value for key, value in line(0.0, 0.0).items() if "bright" in key}
    assert answer(run(tmp_path, [only_one])) == ("partly", "All of them hold it. Of colour nothing was measured.")
    assert "No guard was measured yet." in run_page(run(tmp_path, []))


def test_a_run_without_guards_says_nothing(tmp_path: Path) -> None:
    data = run(tmp_path, [{}], guarded=False)
    assert floors(data) is None
    assert "Floors of the guards" not in run_page(data)
