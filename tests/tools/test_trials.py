"""The judge of the settings that the plan tries, on results with known answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import result
from marble_rl.compare.job_result import CurvePoint, JobResult
from marble_rl.compare.methods import specialist
from tools.study.registered import BALANCED, RARE, Part
from tools.study.trials import FOLDERS, TRIALS, judged

STEPS = 60


def job(method: str, seed: int, share: float, worst: float | None = None, half_way: int = STEPS // 2) -> JobResult:
    """Shares of 1 are a gain of 0.5. ``half_way``: the step at which half of it is there."""
    gains = dict.fromkeys(RARE.rewards, 0.5 * share) | {"ocr": 0.5 * (share if worst is None else worst)}
    points = [(half_way, 0.5), (2 * half_way, 1.0)]
    curve = [CurvePoint(step=s, seconds=2.0 * s, means={k: 0.2 + f * v for k, v in gains.items()}) for s, f in points]
    scores = {name: [0.2 + gain] for name, gain in gains.items()}
    return result(method, seed, scores, steps=STEPS, curve=curve if method in ("ours", "plain") else [], clock="CPU")


def finished(folder: Path, part: Part) -> None:
    """The parts that have denominators and the base model."""
    jobs = [result("base", seed, {name: [0.2] for name in RARE.rewards}) for seed in range(5)]
    for reward in RARE.rewards:
        for seed in part.specialists_seeds:
            gain = {reward: 0.5 + 0.01 * (seed - 1.5)}
            scores = {name: [0.2 + gain.get(name, 0.0)] for name in RARE.rewards}
            jobs.append(result(specialist(reward), seed, scores))
    write(folder / FOLDERS[part.name], jobs)


def write(folder: Path, jobs: list[JobResult]) -> None:
    for made in jobs:
        made.write(folder / "jobs" / f"{made.name}.json")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    finished(tmp_path, RARE)
    finished(tmp_path, BALANCED)
    return tmp_path


def test_nothing_is_judged_before_all_jobs_are_there(kept: Path) -> None:
    (sentence,) = judged("F", kept)
    assert sentence == "F: not measured yet; 20 jobs are missing, the first is fair_group seed 0 in noise/rare."


@pytest.mark.parametrize(("gain", "verdict"), [(0.2, "confirmed"), (0.0, "not confirmed")])
def test_a_setting_that_gains_in_two_configs(kept: Path, gain: float, verdict: str) -> None:
    noise = (0.02, -0.01, 0.01, -0.02, 0.0)
    for folder in TRIALS["F"].folders:
        write(kept / folder, [job("fair_group", s, 0.7 + gain + noise[s], worst=0.5) for s in range(5)])
    for part in FOLDERS.values():
        write(kept / part, [job("fair", s, 0.7, worst=0.5) for s in range(5)])
    mean, worst = judged("F", kept)
    assert mean.startswith(f"F1: {verdict}. Mean share: ")
    assert float(mean.split("Mean share: ")[1].split()[0]) == pytest.approx(0.8 * gain, abs=0.005)
    assert mean.endswith("10 pairs), expected above 0.")
    assert worst.startswith("F2: confirmed. Worst share: +0.000")


def test_a_setting_that_must_not_lose_much(kept: Path) -> None:
    write(kept / "lazy", [job("every", s, 0.8, worst=0.6) for s in range(5)])
    write(kept / "lazy", [job("lazy", s, 0.75, worst=0.6 - 0.1 * s) for s in range(5)])
    mean, worst = judged("H", kept)
    assert mean.startswith("H1: confirmed. Mean share: -0.0")
    assert worst.startswith("H2: not confirmed. Worst share: -0.2")
    assert worst.endswith("5 pairs), expected above -0.3.")


def test_time_to_score(kept: Path) -> None:
    """Twice as fast in one config, and not there in the other."""
    for folder, half_way, share in (("time/rare", 15, 0.8), ("time/study", 30, 0.4)):
        write(kept / folder, [job("plain", s, 0.8, worst=0.6) for s in range(5)])
        write(kept / folder, [job("ours", s, share, worst=0.6, half_way=half_way) for s in range(5)])
    first, second, *worst = judged("T", kept)
    assert first.startswith("T1 in time/rare: confirmed.")
    assert "2.00 times shorter" in first
    assert second.startswith("T1 in time/study: not confirmed.")
    assert [line.split(".")[0] for line in worst] == ["T2 in time/rare: confirmed", "T2 in time/study: not confirmed"]
