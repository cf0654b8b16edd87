"""The retry policy: how many attempts, after which pauses, until when, and what is counted."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from marble_rl.rewards.core.base import deadline_in
from marble_rl.rewards.core.retries import AllAttemptsFailed, AttemptFailed, Outage, RetryPolicy


class Attempts:
    """Fails with each of ``errors`` in turn, then succeeds with the attempt's number. Notes when it was called."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = errors
        self.times: list[float] = []
        self.repeats = 0

    def __call__(self, number: int) -> int:
        self.times.append(time.monotonic())
        assert number == len(self.times) - 1
        if number < len(self.errors):
            raise self.errors[number]
        return number

    def count(self) -> None:
        self.repeats += 1

    def run(self, retries: int, backoff: float = 0.0, **settings: Any) -> int:
        options = {key: settings.pop(key) for key in ("jitter", "stop", "outage") if key in settings}
        return RetryPolicy(retries, backoff, self.count, **settings).call(self, **options)

    def pauses(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def failing(count: int, **attributes: Any) -> list[AttemptFailed]:
    errors = [AttemptFailed(f"failure {number}") for number in range(count)]
    for error in errors:
        vars(error).update(attributes)
    return errors


def test_the_first_success_counts_and_every_further_attempt_is_counted() -> None:
    attempts = Attempts(*failing(2))
    assert attempts.run(retries=3) == 2
    assert attempts.repeats == 2


def test_after_the_last_attempt_all_reasons_are_known() -> None:
    same = AttemptFailed("busy")
    with pytest.raises(AllAttemptsFailed) as caught:
        Attempts(same, AttemptFailed("gone"), same).run(retries=2)
    assert caught.value.failures == [same, caught.value.failures[1], same]
    assert (caught.value.attempts, caught.value.reasons()) == ("3 attempts", "busy (2 times); gone")
    with pytest.raises(AllAttemptsFailed) as caught:
        Attempts(same).run(retries=0)
    assert (caught.value.attempts, caught.value.reasons(repr)) == ("1 attempt", "AttemptFailed('busy')")


def test_pauses_double_up_to_the_longest() -> None:
    attempts = Attempts(*failing(4))
    attempts.run(retries=4, backoff=0.02, longest_pause=0.05)
    assert all(pause >= least for pause, least in zip(attempts.pauses(), (0.02, 0.04, 0.05, 0.05), strict=True))
    assert sum(attempts.pauses()) < 5


def test_jitter_takes_up_to_half_off() -> None:
    attempts = Attempts(*failing(1))
    attempts.run(retries=1, backoff=0.2, jitter=random.Random(0))
    assert attempts.pauses()[0] >= 0.1


def test_a_server_may_ask_for_a_longer_pause_but_not_for_any() -> None:
    attempts = Attempts(*failing(1, pause=0.1))
    attempts.run(retries=1)
    assert attempts.pauses()[0] >= 0.1
    attempts = Attempts(*failing(1, pause=1e9))
    attempts.run(retries=1, longest_pause=0.05)
    assert 0.05 <= attempts.pauses()[0] < 5


def test_a_final_failure_is_not_repeated() -> None:
    attempts = Attempts(*failing(1, final=True))
    with pytest.raises(AllAttemptsFailed):
        attempts.run(retries=5)
    assert (len(attempts.times), attempts.repeats) == (1, 0)


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_other_errors_are_raised_at_once(error: BaseException) -> None:
    attempts = Attempts(error)
    with pytest.raises(type(error)):
        attempts.run(retries=5)
    assert len(attempts.times) == 1


def test_even_keyboard_interrupts_of_a_policy_for_all_errors() -> None:
    assert Attempts(ValueError("a bug")).run(retries=1, errors=Exception) == 1
    with pytest.raises(KeyboardInterrupt):
        Attempts(KeyboardInterrupt()).run(retries=1, errors=Exception)


def test_no_attempt_is_made_after_the_deadline_of_the_thread() -> None:
    attempts = Attempts(*failing(9))
    begun = time.monotonic()
    with deadline_in(0.5), pytest.raises(AllAttemptsFailed):
        attempts.run(retries=8, backoff=0.05)
    assert time.monotonic() - begun < 5
    assert len(attempts.times) <= 4, "pauses of 0.05, 0.1 and 0.2 seconds fit, the next does not"


def test_a_pause_ends_when_the_rest_is_stopped() -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    attempts = Attempts(*failing(1))
    with pytest.raises(AllAttemptsFailed):
        attempts.run(retries=1, backoff=30.0, stop=stop)
    assert len(attempts.times) == 1


def test_an_outage_is_waited_for_and_uses_up_no_retries(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts(*failing(5, unreachable=True), AttemptFailed("an answer"), AttemptFailed("another"))
    assert attempts.run(retries=2, outage=Outage("reward 'r'", wait=30)) == 7
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "waiting up to 30 s for the server of reward 'r'",
        "the server of reward 'r' is back after 0 s",
    ]


def test_an_outage_ends_after_the_time_to_wait() -> None:
    attempts = Attempts(*failing(100, unreachable=True))
    outage = Outage("reward 'r'", wait=0.2)
    with pytest.raises(AllAttemptsFailed):
        attempts.run(retries=1, backoff=0.02, longest_pause=0.02, outage=outage)
    assert 3 < len(attempts.times) < 20
