"""Guards in the wind tunnel: the package's own rules, floors and levels on the small flow."""

from __future__ import annotations

import pytest

from tools.tunnel.rules import section_of
from tools.tunnel.training import base_table, before, run
from tools.tunnel.world import REGIMES


def test_a_floor_is_a_setting_of_a_rule() -> None:
    assert section_of("fair:guard.plain=-0.1") == {"type": "fair", "guard.plain": -0.1}


@pytest.mark.full
@pytest.mark.parametrize("rule", ["fair", "uniform"])
def test_an_opposing_reward_is_held_at_its_floor(rule: str) -> None:
    """As an objective or without a floor it ends elsewhere; the floor is kept on training and held-out prompts."""
    guarded = run(section_of(f"{rule}:guard.plain=-0.05"), "opposed", seed=0)
    assert guarded.gains["plain"] == pytest.approx(-0.05, abs=0.02)
    assert guarded.levels["plain"] == pytest.approx(-0.05, abs=0.03)
    assert all(gain > 0 for name, gain in guarded.gains.items() if name != "plain")
    lower = run(section_of(f"{rule}:guard.plain=-0.1"), "opposed", seed=0)
    assert lower.gains["plain"] < guarded.gains["plain"] - 0.02


@pytest.mark.full
def test_base_scores_are_those_of_the_starting_model() -> None:
    """Training and held-out prompts are alike, so their means are close."""
    table, held_out = base_table("opposed"), before("opposed")
    for reward in REGIMES["opposed"].rewards:
        assert table.mean(reward.name) == pytest.approx(held_out[reward.name], abs=0.05)
