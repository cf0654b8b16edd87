"""Ctrl-C, SIGTERM and SIGHUP: remembered until the end of the step, and shared between ranks; or one line and an exit
code."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from marble_rl.distributed.interrupts import SIGNALS, Interrupts, Stopping
from marble_rl.errors import Interrupted


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_stops_the_run_at_the_end_of_the_step(signum: signal.Signals) -> None:
    said: list[str] = []
    with Interrupts(said.append) as interrupts:
        assert not interrupts.pending()
        signal.raise_signal(signum)
        assert interrupts.pending()
        with pytest.raises(Interrupted, match="stopped after step 3") as stop:
            interrupts.stop("stopped after step 3")
    assert stop.value.exit_code == 128 + signum
    assert said == [f"{signum.name}: finishing this step, then saving. Once more stops at once."]


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_signal_stops_at_once_with_its_exit_code(first: signal.Signals, second: signal.Signals) -> None:
    with Interrupts(lambda text: None) as interrupts:
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
        with pytest.raises(Interrupted) as stop:
            interrupts.stop("stopped at once")
    assert stop.value.exit_code == 128 + second


@pytest.mark.parametrize("context", [lambda: Interrupts(print), Stopping])
def test_under_nohup_a_closed_terminal_stops_nothing(context: Callable[[], AbstractContextManager[object]]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with context():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_handlers_before_are_restored() -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    for context in (Interrupts(lambda text: None), Stopping()):
        with context:
            assert not set(before).intersection(signal.getsignal(signum) for signum in SIGNALS)
        assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_a_signal_that_another_rank_received_stops_this_one() -> None:
    with Interrupts(lambda text: None, agree=lambda own: max(own, signal.SIGTERM), launched=True) as interrupts:
        assert interrupts.pending()
        with pytest.raises(Interrupted) as stop:
            interrupts.stop("stopped")
    assert stop.value.exit_code == 143
    assert stop.value.shared


def test_a_signal_during_the_collective_is_not_lost() -> None:
    def receiving(own: int) -> int:
        signal.raise_signal(signal.SIGTERM)
        return own

    with Interrupts(lambda text: None, agree=receiving, launched=True) as interrupts:
        assert not interrupts.pending(), "the other ranks do not know of it yet"
        assert interrupts.pending()


def test_torchrun_may_pass_a_signal_on_twice() -> None:
    said: list[str] = []
    with Interrupts(said.append, launched=True) as interrupts:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.pending()
    assert said == ["SIGTERM: finishing this step, then saving."]


def test_a_second_signal_waits_until_changes_are_complete() -> None:
    with Interrupts(lambda text: None) as interrupts:
        signal.raise_signal(signal.SIGINT)
        with interrupts.shielded():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_deferred()


# A whole command

COMMAND = """
import os, signal, sys
sys.argv = ["marble", "train", "config.yaml"]
import marble_rl.cli as cli

def now():
    os.kill(os.getpid(), signal.{signal})

class Destroyed:
    __del__ = lambda self: now()

def execute(arguments, stopping):
    {what}
    return 0

class Module:
    def __init__(self, **names): vars(self).update(names)

sys.modules["marble_rl.cli.execution"] = Module(execute=execute)
cli.main()
"""
"""The command line, with another command in place of all."""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize(
    "what",
    [
        "now()",
        "import signals_itself",
        "d = Destroyed(); del d",
        "\n    try: now()\n    except KeyboardInterrupt: now()",
        "\n    try: now()\n    except BaseException: pass\n    print('goes on')",
        "stopping.end(); now()",
        "__import__('atexit').register(now)",
    ],
    ids=["running", "importing", "destroying", "twice", "swallowed", "ending", "at exit"],
)
def test_a_signal_ends_a_command_with_one_line(what: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "signals_itself.py").write_text(
        f"import os, signal\ntry: os.kill(os.getpid(), signal.{name})\nexcept BaseException: raise ImportError\n"
    )
    code = COMMAND.format(signal=name, what=what)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (128 + getattr(signal, name), "")
    assert done.stderr == "stopped before the first step; nothing to save\n"
