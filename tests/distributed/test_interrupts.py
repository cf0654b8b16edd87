"""Ctrl-C and SIGTERM: remembered until the end of the step, and shared between ranks."""

from __future__ import annotations

import signal

import pytest

from marble_rl.distributed.interrupts import Interrupts
from marble_rl.errors import Interrupted


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
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


def test_a_second_signal_stops_at_once() -> None:
    with Interrupts(lambda text: None):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_handlers_before_are_restored() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts(lambda text: None):
        assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


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
