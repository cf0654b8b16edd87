"""Levels of guards, the rates that follow from them, and what a checkpoint keeps."""

from __future__ import annotations

import json

import pytest

from marble_rl.rewards.core.settings import GuardConfig
from marble_rl.training.base_images import Reading
from marble_rl.training.floors import PATIENCE, Floors


def read(difference: float, squares: float = 8.0, freedom: int = 2) -> dict[str, Reading]:
    return {"plain": Reading(difference, squares, freedom)}


def floors(**guard: float) -> Floors:
    return Floors({"plain": GuardConfig(**guard)})


def test_levels_are_smoothed_from_the_first_one_on() -> None:
    run = floors()
    for difference, level in ((-0.5, -0.5), (0.5, -0.3), (0.5, -0.14)):
        levels = run.after(read(difference))
        assert levels.figures["floor/plain/level"] == pytest.approx(level)
        run.commit(levels, {})


@pytest.mark.parametrize(
    ("level", "rate"), [(5.0, -1.0), (0.2, -1.0), (0.0, -0.5), (-0.1, -0.25), (-0.2, 0.0), (-0.3, 0.25), (-9.0, 0.5)]
)
def test_the_rate_follows_the_level(level: float, rate: float) -> None:
    assert floors(floor=-0.2, band=0.4).after(read(level)).rates == {"plain": pytest.approx(rate)}


def test_the_default_band_is_a_quarter_of_the_base_models_std_within_a_prompt() -> None:
    """A variance of 4, so a std of 2 and a band of 1/2; pooled with a second rollout's variance of 16."""
    run = floors()
    first = run.after(read(-0.125))
    assert first.rates == {"plain": pytest.approx(0.25)}
    run.commit(first, {})
    assert run.after(read(-0.125, squares=32.0)).rates == {"plain": pytest.approx(0.25 / 10**0.5 * 2)}


def test_scores_of_a_base_model_that_do_not_vary() -> None:
    assert floors().after(read(-1e-3, squares=0.0)).rates == {"plain": 0.5}
    assert floors().after(read(0.0, squares=0.0)).rates == {"plain": 0.0}
    assert floors().after(read(1e-3, squares=0.0)).rates == {"plain": -1.0}


def test_without_a_score_nothing_changes() -> None:
    run = floors(floor=-0.1)
    assert run.after({}).rates == {}
    assert run.after({}).figures == {"floor/plain/limit": -0.1}
    run.commit(run.after(read(-0.4)), {})
    assert run.after({}).figures["floor/plain/level"] == -0.4


def test_reading_a_rollout_twice_counts_once_until_it_is_committed() -> None:
    run = floors()
    run.commit(run.after(read(0.0)), {})
    first, again = run.after(read(1.0)), run.after(read(1.0))
    assert first.rates == again.rates
    assert run.levels.by_guard["plain"].value == 0.0


def test_state_is_restored_exactly() -> None:
    run, other = floors(), floors()
    for difference in (0.1, -1 / 3, 0.7):
        run.commit(run.after(read(difference)), {"floor/plain/slack": 1.0})
    other.load_state_dict(json.loads(json.dumps(run.state_dict())))
    assert other.levels == run.levels
    with pytest.raises(KeyError):
        Floors({"other": GuardConfig()}).load_state_dict(run.state_dict())


def test_floors_that_contradict_each_other_are_reported_after_some_rollouts() -> None:
    run = floors(floor=0.25)
    messages = [run.commit(run.after(read(0.0)), {"floor/plain/slack": slack}) for slack in [0.2] * PATIENCE]
    assert messages[:-1] == [None] * (PATIENCE - 1)
    assert messages[-1] == (
        f"no direction satisfies all floors, for {PATIENCE} rollouts: plain stands at +0, its floor is +0.25. "
        "Lower a floor (rewards[].guard.floor), or remove a guard"
    )
    assert run.commit(run.after(read(0.0)), {"floor/plain/slack": 0.01}) is None
    assert [run.commit(run.after(read(0.0)), {"floor/plain/slack": 0.2}) for _ in range(PATIENCE - 1)] == [None] * (
        PATIENCE - 1
    )
