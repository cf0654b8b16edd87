"""The judge of the registered plan, on results with known answers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import ttest_rel

from jobs import result
from marble_rl.compare.job_result import JobResult
from marble_rl.compare.shares import MEAN, WORST
from marble_rl.config import load_config
from marble_rl.errors import InputError
from tools.study.registered import BALANCED, CLOSELY, MANY, RARE, holm, judge, main, show

WATCHED = {"aesthetic": 5.0, "tesseract": 0.4}


def job(method: str, seed: int, gains: dict[str, float]) -> JobResult:
    scores = {name: [0.2 + gains.get(name, 0.0)] for name in RARE.rewards} | {k: [v] for k, v in WATCHED.items()}
    return result(method, seed, scores, held_out=list(WATCHED))


def plan(**worst: float) -> list[JobResult]:
    """Every job of the plan: specialists gain 1, a method its worst share of ocr and .8 of the rest, with noise."""
    alone = [
        job(f"only-{reward}", seed, {reward: 1.0 + 0.01 * (seed - 1.5)})
        for reward in RARE.rewards
        for seed in RARE.specialists_seeds
    ]
    return [*alone, *joint(RARE.seeds, **worst)]


def joint(seeds: Sequence[int], **worst: float) -> list[JobResult]:
    jobs = [job("base", seed, {}) for seed in seeds]
    levels = {"fair": 0.5, "weighted_sum": 0.2, "gdpo": 0.3, "uniform": 0.1, "marble": 0.4} | worst
    dice = np.random.default_rng(0)
    for method, level in levels.items():
        for seed in seeds:
            jobs.append(job(method, seed, dict.fromkeys(RARE.rewards, 0.8) | {"ocr": level + 0.02 * dice.normal()}))
    return jobs


def shown(jobs: list[JobResult]) -> str:
    file = io.StringIO()
    show(judge(jobs), Console(file=file, width=300, color_system=None))
    return file.getvalue()


def test_holm_by_hand() -> None:
    corrected = holm({"a": 0.04, "b": 0.01, "c": 0.03})
    assert corrected == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    assert holm({"a": 0.6, "b": 0.7})["a"] == 1.0


def test_a_clear_win_is_confirmed() -> None:
    judged = judge(plan())
    against = judged.against["gdpo"]
    assert against.worst.mean == pytest.approx(0.2, abs=0.03)
    assert against.worst_noisy.low < against.worst.mean < against.worst_noisy.high
    assert against.mean.mean == pytest.approx(0.04, abs=0.01)
    assert judged.missing == []
    assert judged.sentences == [
        "A1 (worst share): confirmed. The worst share of fair is above that of weighted_sum, gdpo and uniform "
        "(Holm, level 0.05).",
        "A2 (mean share): confirmed. The mean share of fair is not clearly below that of weighted_sum, gdpo and "
        "uniform.",
    ]
    text = shown(plan())
    assert "marble (no verdict)" in text
    assert "+0.000 (+0.000 to +0.000)" in text, "of the evaluation-only rewards"


def test_p_values_are_those_of_the_paired_t_test() -> None:
    jobs = plan(gdpo=0.49)
    judged = judge(jobs)
    alone = np.mean([1.0 + 0.01 * (seed - 1.5) for seed in RARE.specialists_seeds])
    of = {m: [j.means["ocr"] - 0.2 for j in jobs if j.method == m] for m in ("fair", "gdpo")}
    expected = ttest_rel(np.array(of["fair"]) / alone, np.array(of["gdpo"]) / alone).pvalue
    assert judged.against["gdpo"].p == pytest.approx(expected)
    assert judged.corrected["gdpo"] == pytest.approx(expected), "the largest of three"
    assert judged.corrected["uniform"] == pytest.approx(
        3 * min(a.p for o, a in judged.against.items() if o != "marble")
    )
    assert "partly confirmed" in judged.sentences[0]
    assert "not clearly different from that of gdpo" in judged.sentences[0]


@pytest.mark.parametrize(("gdpo", "verdict"), [(0.55, "confirmed"), (0.64, "not confirmed")])
def test_not_much_below(gdpo: float, verdict: str) -> None:
    """0.05 below is within the margin; 0.14 below has an interval that is not."""
    part = replace(RARE, name="B", margin=0.15)
    (sentence,) = judge(plan(gdpo=gdpo), part).sentences
    assert sentence.startswith(f"B1 (worst share): {verdict}.")
    assert ("may be more than 0.15 below that of gdpo." in sentence) == (verdict != "confirmed")


def test_parts_are_those_of_the_configs() -> None:
    for part, config in ((RARE, "mini-rare"), (BALANCED, "mini-study"), (MANY, "mini-many")):
        found = load_config(Path(__file__).parents[2] / "configs" / f"{config}.yaml")
        assert set(found.trained_rewards) == set(part.rewards)
        assert {reward.name for reward in found.rewards if reward.held_out} == set(part.watched)


def test_a_loss_is_called_one() -> None:
    jobs = plan(weighted_sum=0.75, gdpo=0.75, uniform=0.75)
    worst, mean = judge(jobs).sentences
    assert worst.startswith("A1 (worst share): not confirmed. The worst share of fair is below that of weighted_sum,")
    assert mean == (
        "A2 (mean share): not confirmed. The mean share of fair is below that of weighted_sum, gdpo and uniform."
    )


def test_nothing_is_judged_before_all_jobs_are_there() -> None:
    jobs = plan()
    part = [j for j in jobs if (j.method, j.seed) != ("gdpo", 7)]
    judged = judge(part)
    assert judged.missing == [("gdpo", 7)]
    assert judged.corrected == {}
    assert judged.sentences == ["A1 (worst share): not measured yet.", "A2 (mean share): not measured yet."]
    assert judged.against.keys() == {"weighted_sum", "uniform", "marble"}
    text = shown(part)
    assert "1 of 68 jobs are missing, of gdpo." in text
    for method, seed in (("fair", 0), ("base", 7), ("only-ocr", 3)):
        assert judge([j for j in jobs if (j.method, j.seed) != (method, seed)]).against == {}
    assert judge([]).sentences[0].endswith("not measured yet.")


def test_only_registered_jobs_count() -> None:
    more = [job(m, seed, dict.fromkeys(RARE.rewards, 9.0)) for m in ("fair", "base", "only-ocr") for seed in (8, 9)]
    assert judge([*plan(), *more]) == judge(plan())
    late = [job("only-ocr", seed, {"ocr": 9.0}) for seed in (4, 5)]
    assert judge([*plan(), *late]) == judge(plan())


def test_a_reward_without_a_share_is_named() -> None:
    jobs = [job(j.method, j.seed, {"ocr": (-1) ** j.seed * 0.1}) if j.method == "only-ocr" else j for j in plan()]
    judged = judge(jobs)
    assert list(judged.left_out) == ["ocr"]
    assert judged.against["gdpo"].worst.mean == pytest.approx(0.0, abs=1e-9)
    assert "ocr has no share and is left out: only-ocr does not clearly gain" in shown(jobs)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["registered", str(tmp_path)])
    assert main() == 2
    assert "give the --out of a comparison" in capsys.readouterr().err
    for one in plan():
        one.write(tmp_path / "jobs" / f"{one.method}-seed{one.seed}.json")
    assert main() == 0
    out = capsys.readouterr().out
    assert "A1 (worst share): confirmed" in out
    assert WORST in out
    assert MEAN in out


def test_denominators_of_another_part() -> None:
    """On seeds that the specialists do not have; their base model is that of their own seeds."""
    fresh = joint(CLOSELY.seeds)
    judged = judge(fresh, CLOSELY, plan())
    assert judged.missing == []
    assert judged.against["gdpo"].worst.n == 10
    assert judged.against["gdpo"].worst.mean == pytest.approx(0.2, abs=0.03)
    assert "E1 (worst share): confirmed." in judged.sentences[0]
    with pytest.raises(InputError, match=r"--specialists: 0 of 24 jobs found; give the results of part A"):
        judge(fresh, CLOSELY)
