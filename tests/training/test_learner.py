"""Stages 5 to 8: a proposal changes nothing, applying it changes everything at once, a checkpoint holds all of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marble_rl.errors import NonFiniteGradient
from steps import Parts, parts


def state(built: Parts) -> tuple[torch.Tensor, str]:
    """The trained weights, and everything small that a checkpoint holds."""
    return built.policy.flat.clone(), json.dumps(built.learner.checkpoint().state)


def same(a: tuple[torch.Tensor, str], b: tuple[torch.Tensor, str]) -> bool:
    return torch.equal(a[0], b[0]) and a[1] == b[1]


BALANCES = {
    "marble": {"type": "marble", "refresh_every": 1},
    "unit_mean": {"type": "unit_mean", "refresh_every": 1},
    "min_variance": {"type": "min_variance"},
    "weighted_sum": {"type": "weighted_sum"},
}


@pytest.mark.parametrize("name", BALANCES)
def test_a_proposal_changes_nothing_and_applying_it_moves_weights_and_rule(
    tiny_sd3: Path, tmp_path: Path, name: str
) -> None:
    built = parts(tiny_sd3, tmp_path, balance=BALANCES[name])
    experience = built.gather()
    before = state(built)
    first, second = built.propose(experience), built.propose(experience)
    assert torch.equal(first.gradient, second.gradient)
    assert same(state(built), before)

    metrics = built.learner.apply(second, last_of_rollout=False)
    assert metrics["update/norm"] == pytest.approx(float(second.gradient.double().norm()))
    assert built.learner.step == 1
    weights, small = state(built)
    assert not torch.equal(weights, before[0])
    if name != "weighted_sum":
        assert small != before[1], "the rule remembers the step"


def test_refresh_steps_have_one_gradient_per_reward_and_log_it(tiny_sd3: Path, tmp_path: Path) -> None:
    built = parts(tiny_sd3, tmp_path, balance={"type": "marble", "refresh_every": 2})
    experience = built.gather()
    refresh = built.propose(experience)
    built.learner.apply(refresh, last_of_rollout=False)
    ordinary = built.propose(experience, update=1)
    for key in ("qp/norm", "harmony/min_cos", "heldout/min_cos", "signal/bright", "ws_harmony/min_cos"):
        assert key in refresh.figures
        assert key not in ordinary.figures
    for key in ("loss/policy", "loss/kl", "alpha_bar/bright"):
        assert key in refresh.figures
        assert key in ordinary.figures


def test_the_refreshed_gradient_is_the_weighted_sum_of_the_rewards_gradients(tiny_sd3: Path, tmp_path: Path) -> None:
    """Against each reward trained alone on the same batch: update - shared = sum_k w_k (update_k - shared)."""
    alone = {}
    for reward in ("small", "bright", "colour"):
        built = parts(tiny_sd3, tmp_path / reward, balance={"type": "single", "reward": reward})
        alone[reward] = built.propose(built.gather()).gradient
    silent = parts(tiny_sd3, tmp_path / "silent", balance={"type": "fixed", "coefficients": {"small": 1.0}})
    experience = silent.gather()
    nothing = dataclasses.replace(experience.scored, advantages=0 * experience.scored.advantages)
    shared = silent.propose(dataclasses.replace(experience, scored=nothing)).gradient

    built = parts(tiny_sd3, tmp_path / "marble", balance={"type": "marble", "refresh_every": 1})
    update = built.propose(built.gather())
    g = torch.stack([alone[name] - shared for name in built.config.trained_rewards]).double()
    norms = g.norm(dim=1)
    alpha = torch.tensor([update.figures[f"alpha/{name}"] for name in built.config.trained_rewards]).double()
    expected = (alpha * norms.mean() / norms) @ g + shared.double()
    torch.testing.assert_close(update.gradient.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_checkpoint_restores_everything_that_the_next_step_needs(tiny_sd3: Path, tmp_path: Path) -> None:
    first = parts(tiny_sd3, tmp_path / "a", balance={"type": "marble", "refresh_every": 2})
    experience = first.gather()
    for update in (0, 1):
        first.learner.apply(first.propose(experience, update), last_of_rollout=update == 1)
    second = parts(tiny_sd3, tmp_path / "b", balance={"type": "marble", "refresh_every": 2})
    second.learner.restore(first.learner.checkpoint())
    assert same(state(second), state(first))
    for built in (first, second):
        built.learner.apply(built.propose(built.gather(1)), last_of_rollout=False)
    assert same(state(second), state(first))


def test_a_gradient_that_is_not_finite_stops_before_anything_changes_and_keeps_the_batch(
    tiny_sd3: Path, tmp_path: Path
) -> None:
    built = parts(tiny_sd3, tmp_path)
    experience = built.gather()
    experience.rollout.x0[0] = float("nan")
    before = state(built)
    with pytest.raises(NonFiniteGradient, match=r"step 1.*Lower optimizer\.lr, or look at the batch in"):
        built.propose(experience)
    assert same(state(built), before)
    (dump,) = tmp_path.glob("nonfinite-step-1*.safetensors")
    assert load_file(dump)["x0"].isnan().any()
