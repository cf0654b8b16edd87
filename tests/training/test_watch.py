"""The watch on a held-out reward: false alarms are rare, hacking is noticed, a resumed watch is the same watch."""

from __future__ import annotations

import json

import numpy as np
import pytest

from marble_rl.training.watch import HackingWatch


def alarms(watched: np.ndarray, trained: np.ndarray, window: int = 10) -> list[int]:
    """Rollouts after which the alarm sounded."""
    watch = HackingWatch("held", ["a", "b"], window)
    found = []
    for i, (held, (a, b)) in enumerate(zip(watched, trained, strict=True)):
        if watch.observe({"held": held, "a": a, "b": b}) is not None:
            found.append(i)
    return found


def rising(length: int, dice: np.random.Generator) -> np.ndarray:
    return np.linspace(0, 5, length)[:, None] + dice.normal(size=(length, 2))


@pytest.mark.full
def test_false_alarms_are_rare() -> None:
    """A thousand rollouts in which the held-out reward does not change: fewer than one run of six is alarmed."""
    dice = np.random.default_rng(0)
    alarmed = sum(bool(alarms(dice.normal(size=1000), rising(1000, dice))) for _ in range(100))
    assert alarmed <= 16


def test_a_fall_while_the_others_rise_is_noticed_soon() -> None:
    """It rises with them at first, then falls by four standard deviations of a single rollout."""
    dice = np.random.default_rng(1)
    for _ in range(20):
        truth = np.concatenate([np.linspace(0, 2, 40), np.linspace(2, -2, 60)])
        found = alarms(truth + dice.normal(size=100), rising(100, dice))
        assert found
        assert 50 <= found[0] < 100


def test_no_alarm_where_the_trained_rewards_fall_as_well() -> None:
    """A run that gets worse in everything is not exploiting its rewards."""
    dice = np.random.default_rng(2)
    falling = np.linspace(5, 0, 100)
    assert not alarms(falling + dice.normal(size=100), falling[:, None] + dice.normal(size=(100, 2)))


def test_constant_rewards() -> None:
    flat = np.zeros(40)
    assert not alarms(flat, np.zeros((40, 2)), window=5)
    steps = np.repeat(np.arange(4.0), 10)
    assert alarms(-steps, np.stack([steps, steps], 1), window=10) == [19, 29, 39]


def test_rewards_that_were_not_scored_are_left_out() -> None:
    watch = HackingWatch("held", ["a"], 2)
    for i in range(20):
        assert watch.observe({"a": float(i)} if i % 4 else {"held": -float(i), "a": float(i)}) is None


def test_a_resumed_watch_is_the_same_watch() -> None:
    dice = np.random.default_rng(3)
    truth = np.concatenate([np.zeros(25), -np.linspace(0, 8, 75)]) + dice.normal(size=100)
    trained = rising(100, dice)
    whole, resumed = HackingWatch("held", ["a", "b"], 10), HackingWatch("held", ["a", "b"], 10)
    for held, (a, b) in zip(truth, trained, strict=True):
        means = {"held": float(held), "a": float(a), "b": float(b)}
        expected = whole.observe(means)
        assert resumed.observe(means) == expected
        state = json.loads(json.dumps(resumed.state_dict()))
        resumed = HackingWatch("held", ["a", "b"], 10)
        resumed.load_state_dict(state)
