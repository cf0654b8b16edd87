"""A signal at any moment of a command: one line, the exit code of the signal, never a traceback."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from runs import start


@pytest.mark.full
@pytest.mark.parametrize("command", ["evaluate", "config check"])
def test_a_command_that_is_stopped_says_so_in_one_line(
    command: str, finished_run: Path, config_file: Path, tmp_path: Path
) -> None:
    target = config_file if "check" in command else finished_run
    out = [] if "check" in command else ["--out", tmp_path / "out"]
    dice = random.Random(command)
    began = time.monotonic()
    with start(*command.split(), target, *out) as whole:
        assert whole.wait(300) == 0
    seconds = time.monotonic() - began
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process = start(*command.split(), target, *out)
        time.sleep(dice.uniform(0.3, 0.7) * seconds)  # after Python itself has started
        process.send_signal(signum)
        output, _ = process.communicate(timeout=60)
        # Done before the signal came; or killed in Python's own last moments, which a shell calls 128 + signum too.
        assert process.returncode in (128 + signum, 0, -signum), output
        assert "Traceback" not in output
        assert "Exception ignored" not in output
        if process.returncode > 0:
            assert output.splitlines()[-1] == "stopped"
