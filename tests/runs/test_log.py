"""metrics.jsonl and the progress display."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from marble_rl.distributed.world import World
from marble_rl.runs.log import Display, MetricsFile
from marble_rl.runs.run_log import LOG, logging_to


def test_metrics_file_drops_what_lies_beyond_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in range(4):
        file.append(step, {"b": 1.0, "a": 0.5})
    with open(path, "a") as torn:
        torn.write('{"step": 4, "rew')
    MetricsFile(path, 2).append(2, {"a": 9.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2] == {"step": 2, "a": 9.0}
    assert list(lines[0]) == ["step", "a", "b"]


@pytest.mark.parametrize("terminal", [True, False])
def test_display_shows_stage_rewards_and_time_left(terminal: bool, tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=150, color_system=None)
    display = Display(console, total=4, done=1, rewards=["ocr", "bright"], print_every=1)
    with logging_to(tmp_path, World(), console), display.progress:
        with display.stage("rollout"):
            display.within(1, 0.5)
        assert 0.0 <= display.take_times()["time/rollout"] < 5
        assert display.take_times() == {}
        display.step_done(2, {"reward/ocr": 0.25})
        with display.stage("gradients"):
            display.progress.refresh()
    shown = text.getvalue()
    assert "ocr 0.250" in shown
    assert "2/4" in shown
    assert "left" in shown
    assert ("gradients" in shown) == terminal
    assert "step 2/4  ocr 0.250" in (tmp_path / "train.log").read_text()


def test_a_log_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    def stopped() -> None:
        with logging_to(tmp_path / "gone", World(), Console(quiet=True)):
            LOG.warning("nobody reads this")
            raise RuntimeError("the real one")

    with pytest.raises(RuntimeError, match="the real one"):
        stopped()


def test_what_json_cannot_hold_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, 0).append(3, {"loss/kl": float("nan"), "a": 1.0, "reward/x": float("-inf")})
    assert json.loads(path.read_text(), parse_constant=refuse) == {"step": 3, "a": 1.0}
    assert "step 4 has no finite loss/kl, reward/x; left out of metrics.jsonl" in caplog.text
