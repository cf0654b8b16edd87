"""The wind tunnel: its trainings are seeded, its results are kept, its shares are those of the definition."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.tunnel import __main__ as command
from tools.tunnel.results import ALONE, Job, Results, rows
from tools.tunnel.rollouts import GROUP, roll_out
from tools.tunnel.training import Outcome, base, run
from tools.tunnel.world import REGIMES

NAMES = [reward.name for reward in REGIMES["balanced"].rewards]


def test_a_training_follows_from_its_seed() -> None:
    first, again, other = (run({"type": "fair"}, "rare", seed, steps=2) for seed in (0, 0, 1))
    assert first == again
    assert first.gains != other.gains
    assert set(first.gains) == set(NAMES)
    assert first.length > 0


def test_settings_of_the_loss_and_the_old_policy() -> None:
    def gains(**settings: object) -> dict[str, float]:
        return run({"type": "fair", **settings}, "balanced", 0, steps=4).gains

    plain = gains()
    assert gains(**{"loss.noise": "group"}) != plain
    off_policy = gains(old_policy="default")
    assert off_policy != plain
    assert gains(old_policy="default", **{"loss.regularize_every": 4}) != off_policy
    assert gains(**{"loss.regularize_every": 4}) == plain, "on-policy there is no shared part"
    for wrong in ({"los.noise": "group"}, {"old_policy": "slo"}, {"loss.nois": "group"}):
        with pytest.raises(ValueError, match=r"slo|los|nois"):
            gains(**wrong)


def test_a_rollout_that_is_used_twice_is_followed_by_the_next() -> None:
    """In two steps with two epochs there is one rollout; the third step has another one."""

    def gains(steps: int, **settings: object) -> dict[str, float]:
        return run({"type": "fair", **settings}, "balanced", 0, steps=steps).gains

    assert gains(1, **{"rollout.epochs": 2}) == gains(1)
    assert gains(2, **{"rollout.epochs": 2}) != gains(2)


def test_scouts_choose_noise_whose_samples_differ_more() -> None:
    """Of each prompt's candidates those with the largest advantages: rewards of the samples scatter more."""

    def spread(scouts: int) -> float:
        rollout = roll_out(base(), REGIMES["balanced"], seed=0, number=0, scouts=scouts)
        values = rollout.seen.table.values.view(-1, GROUP, len(NAMES))
        return float(values.std(dim=1).mean())

    assert spread(3) > 1.1 * spread(1)


def test_shares_by_hand_and_results_are_kept(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for seed in (0, 1):
        for k, name in enumerate(NAMES):
            results.add(Job("balanced", ALONE + name, seed), Outcome(dict.fromkeys(NAMES, 0.1 * (k + 1)), 1.0))
        gains = {name: 0.1 * (k + 1) * (0.25 if k == 2 else 0.5) for k, name in enumerate(NAMES)}
        results.add(Job("balanced", "gdpo", seed), Outcome(gains, 1.0))
    read = Results(tmp_path)
    jobs = command.jobs_for(["gdpo"], ["balanced"], [0, 1])
    assert read.missing(jobs) == []
    (row,) = rows(read, "balanced", ["gdpo", "fair"], [0, 1])
    assert row.worst.mean == pytest.approx(0.25)
    assert row.mean.mean == pytest.approx(0.45)
    assert read.missing(command.jobs_for(["fair"], ["balanced"], [0])) == [Job("balanced", "fair", 0)]
    page = command.markdown(read, ["gdpo", "fair"], ["balanced", "rare"], [0, 1])
    assert page.splitlines()[2:] == ["| `gdpo` | 0.25 (0.25 to 0.25), 0.45 |  |", "| `fair` |  |  |"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rules", "fairr"], "unknown rule 'fairr'"),
        (["--rules", "fair:momentum"], "expected key=value"),
        (["--regimes", "rar"], "--regimes"),
        (["--rules", "fair:rollout.epochs=0"], "rollout.epochs: 0 is not a whole number above 0"),
        (["--rules", "fair:rollout.scouts=two"], "rollout.scouts: 'two' is not"),
    ],
)
def test_bad_input(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["tunnel", *arguments, "--out", str(tmp_path)])
    assert command.main() == 2
    assert says in capsys.readouterr().err
