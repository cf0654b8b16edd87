"""The study's rules, on results with known differences, and the page that is committed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from marble_rl.compare.job_result import Failure, JobResult, read_results
from marble_rl.config import load_config
from marble_rl.diagnose.record import AdvantageFacts, AppliedFigures, Diagnosis, DirectionFigures, QpFacts
from marble_rl.errors import InputError
from marble_rl.intervals import Interval
from tools.study.__main__ import PAGES, take
from tools.study.claims import (
    PAPER,
    UNSCALED,
    Claim,
    all_of,
    best_joint_method,
    better,
    follows_difficulty,
    held_out_rewards_rise,
    in_batch_harmony,
    independent_harmony,
    judge_paper,
    no_specialist_wins,
    rewards_rise,
)
from tools.study.findings import Study, Whole, parts_in, read_whole
from tools.study.page import gradients_page, paper_page, results_page, tables_page
from tools.study.registered import RARE
from tools.study.variants import OURS, REMOVED, judge_ours

ROOT = Path(__file__).parents[2]
REWARDS = ["geneval", "ocr", "pickscore", "clipscore", "hpsv2", "aesthetic"]
NOISE = (0.0, 0.01, -0.01)
"""What the seeds differ by."""


def job(method: str, seed: int, scores: list[float], **training: float) -> JobResult:
    means = dict(zip(REWARDS, scores, strict=True))
    return JobResult(
        method=method,
        about=f"about {method}",
        seed=seed,
        overrides=[],
        config={"prompts": {}, "balance": {"type": method}},
        config_hash=method,
        versions={"marble": "0"},
        failed=None,
        means=means,
        held_out=["aesthetic"],
        prompts=1,
        images_per_prompt=1,
        per_prompt={name: [value] for name, value in means.items()},
        train_seconds=60.0,
        training=training,
    )


def study(scores: dict[str, list[float]], diagnoses: dict[str, Diagnosis] | None = None, **training: float) -> Study:
    """Each method's scores by reward; in every seed a little more or less, of each reward in another one."""
    jobs = [
        job(method, seed, [value + NOISE[(seed + i) % 3] for i, value in enumerate(values)], **training)
        for method, values in scores.items()
        for seed in range(3)
    ]
    return Study(jobs, diagnoses or {})


LOW, HIGH = [0.1] * 6, [0.5] * 6


def test_the_page_shows_how_much_of_a_specialists_gain_each_method_has() -> None:
    own = {f"only-{name}": [0.5 if name == other else 0.1 for other in REWARDS] for name in REWARDS[:5]}
    page = tables_page(Whole(study({"base": LOW, "marble": [0.3, 0.2, 0.1, 0.0, 0.5, 0.2], **own})))
    assert "## How much of a specialist's gain" in page
    assert "| marble | 3 | 0.500000 ±" in page


def test_better_means_an_interval_above_zero() -> None:
    found = study({"base": LOW, "weighted_sum": LOW, "marble": HIGH})
    assert better("marble", "weighted_sum")(found).verdict == "confirmed"
    reversed_ = better("weighted_sum", "marble")(found)
    assert reversed_.verdict == "contradicted"
    assert "the other way round" in reversed_.text
    assert reversed_.text.endswith("; 3 seeds.")
    assert "geneval ▼ -0.4000 (-0.4000 to -0.4000)" in reversed_.details


def test_what_cannot_be_told_apart_is_not_confirmed() -> None:
    jobs = [job("marble", s, [0.3 + (s - 1) / 10] * 6) for s in range(3)] + [
        job(method, s, [0.3] * 6) for method in ("uniform", "base") for s in range(3)
    ]
    found = better("marble", "uniform")(Study(jobs, {}))
    assert found.verdict == "not confirmed"
    assert "no clear difference" in found.text


def test_a_method_that_was_not_run_is_not_judged() -> None:
    found = better("marble", "dropout")(study({"marble": HIGH}))
    assert (found.verdict, found.text) == ("not measured", "There are not two seeds of dropout yet.")
    jobs = [job("marble", 0, HIGH), job("marble", 1, HIGH), job("uniform", 1, LOW), job("uniform", 2, LOW)]
    found = better("marble", "uniform")(Study(jobs, {}))
    assert (found.verdict, found.text) == ("not measured", "There are not two common seeds of marble and uniform yet.")


def test_a_claim_of_two_parts() -> None:
    data = study({"base": LOW, "marble": HIGH, "marble_n5": LOW, "marble_n20": [0.9] * 6})
    five, twenty = better("marble", "marble_n5"), better("marble", "marble_n20")
    assert all_of({"N = 5": five})(data).verdict == "confirmed"
    assert all_of({"N = 5": five, "N = 20": twenty})(data).verdict == "partly"
    assert all_of({"N = 20": twenty})(data).verdict == "contradicted"
    alike = study({"base": LOW, "marble": HIGH, "marble_n5": HIGH, "marble_n20": [0.9] * 6})
    assert all_of({"N = 5": five})(alike).verdict == "not confirmed"
    assert all_of({"N = 5": five, "N = 20": twenty})(alike).verdict == "contradicted"
    assert all_of({"N = 5": five, "other": better("marble", "other")})(data).verdict == "partly"
    assert all_of({"other": better("marble", "other")})(data).verdict == "not measured"


def test_rewards_rise() -> None:
    data = study({"base": LOW, "marble": [0.5, 0.5, 0.5, 0.5, 0.1, 0.05]})
    assert rewards_rise(data).verdict == "partly"
    assert held_out_rewards_rise(data).verdict == "contradicted"
    assert "aesthetic ▼" in held_out_rewards_rise(data).text
    assert rewards_rise(study({"base": LOW, "marble": HIGH})).verdict == "confirmed"


def test_the_best_joint_method() -> None:
    joint = ("weighted_sum", "marble")
    two = best_joint_method(joint)(study({"weighted_sum": LOW, "marble": HIGH}))
    assert (two.verdict, two.text) == ("not measured", "There is no composite of fewer than three methods.")
    assert best_joint_method(joint)(study({"base": LOW, "weighted_sum": LOW, "marble": HIGH})).verdict == "confirmed"
    found = best_joint_method(joint)(study({"base": LOW, "weighted_sum": HIGH, "marble": LOW}))
    assert found.verdict == "not confirmed"
    assert found.text.startswith("rank 2 of 2: weighted_sum +1.41")
    near = [job("marble", s, [0.3 + s / 10] * 6) for s in range(3)] + [
        job(method, s, [0.35] * 6) for method in ("weighted_sum", "base") for s in range(3)
    ]
    found = best_joint_method(joint)(Study(near, {}))
    assert (found.verdict, "not significantly" in found.text) == ("partly", True)


def test_specialists() -> None:
    own = {f"only-{name}": [0.8 if name == other else 0.1 for other in REWARDS] for name in REWARDS[:5]}
    found = no_specialist_wins(study({"marble": HIGH, **own}))
    assert found.verdict == "confirmed"
    assert "Specialists for geneval, ocr, pickscore, clipscore and hpsv2 are ahead on their own" in found.text
    assert no_specialist_wins(study({"marble": LOW, **own})).verdict == "not confirmed"


def test_coefficients_follow_difficulty() -> None:
    def shares(geneval: float, hpsv2: float) -> Study:
        return study({"marble": HIGH}, **{"alpha_bar/geneval": geneval, "alpha_bar/hpsv2": hpsv2})

    assert follows_difficulty(shares(0.3, 0.1)).verdict == "confirmed"
    assert follows_difficulty(shares(0.3, 0.3)).verdict == "partly"
    assert follows_difficulty(shares(0.1, 0.3)).verdict == "contradicted"
    assert follows_difficulty(shares(0.2, 0.2)).verdict == "not confirmed"
    assert follows_difficulty(shares(0.1, 0.3)).text.endswith("The other way round for geneval and hpsv2.")
    assert "other way" not in follows_difficulty(shares(0.3, 0.1)).text
    assert follows_difficulty(study({"marble": HIGH})).verdict == "not measured"


def diagnosis(in_batch: tuple[float, float], independent: tuple[float, float]) -> Diagnosis:
    """Conflict rates of the weighted sum and of MARBLE."""

    def about(mean: float) -> Interval:
        return Interval(mean, max(0.0, mean - 0.02), min(1.0, mean + 0.02))

    def figures(rate: float) -> dict[str, Interval]:
        return dict.fromkeys(("min_cos", "mean_cos", "conflict"), about(rate))

    directions = {
        name: DirectionFigures(
            figures(in_batch[i]), figures(independent[i]), figures(independent[i]), [about(0.1 + 0.2 * i), about(-0.3)]
        )
        for i, name in enumerate(("weighted_sum", "marble"))
    }
    return Diagnosis(
        names=tuple(REWARDS[:2]),
        step=60,
        batches=50,
        images=96,
        directions=directions,
        larger={2: directions},
        applied=dict.fromkeys(directions, AppliedFigures(about(0.1), about(0.1))),
        signal={1.0: [0.1, 0.2], 16.0: [0.6, None]},
        cosines=[[1.0, None], [None, 1.0]],
        advantages=AdvantageFacts(
            [[1.0, -0.3], [-0.3, 1.0]], about(0.95), [about(0.4), about(0.6)], [about(0.45), about(0.55)]
        ),
        qp=QpFacts([0.5, 0.3], 0.25),
    )


def test_harmony_on_its_own_and_on_other_batches() -> None:
    data = study({"marble": HIGH}, {"marble-seed0": diagnosis((0.8, 0.0), (0.9, 0.85))})
    assert in_batch_harmony(data).verdict == "confirmed"
    assert in_batch_harmony(data).text == "conflict rate 0.80 -> 0.00 (marble-seed0)."
    assert "conflict rate +0.80 (+0.78 to +0.82) -> +0.00" in in_batch_harmony(data).details
    assert independent_harmony(data).verdict == "not confirmed"
    assert in_batch_harmony(study({"marble": HIGH})).verdict == "not measured"
    seldom = study({"marble": HIGH}, {"marble-seed0": diagnosis((0.08, 0.0), (0.08, 0.0))})
    assert in_batch_harmony(seldom).verdict == "confirmed", "MARBLE's is none by theorem there"


def test_a_reward_that_is_silent_in_all_batches_is_a_question_mark() -> None:
    known = diagnosis((0.8, 0.0), (0.9, 0.85))
    directions = {name: replace(of, each=[of.each[0], None]) for name, of in known.directions.items()}
    silent = known.model_copy(update={"directions": directions})
    assert "| +0.30 (+0.28 to +0.32) | ? |" in gradients_page(Whole(study({"marble": HIGH}, {"x": silent})))


def test_every_claim_is_judged_and_told() -> None:
    scores = {"base": LOW, "weighted_sum": LOW, "sequential": LOW, "gdpo": LOW, "uniform": LOW, "marble": HIGH}
    data = study(scores | dict.fromkeys(OURS, HIGH), {"marble-seed0": diagnosis((0.8, 0.0), (0.9, 0.85))})
    whole = Whole(data, study({"base": LOW, "marble": HIGH}))
    page = paper_page(whole)
    for judged in (*judge_paper(data), *judge_ours(data)):
        assert f"| {judged['claim']} |" in page
        assert f"**{judged['verdict']}** | {judged['text']} |" in page
        assert judged["details"] in page
    assert len(judge_paper(data)) == len(PAPER)
    assert "| `marble-seed0`, step 60 | 0.100 to 0.200 | +0.80 (0.80) -> +0.00 (0.00) |" in page
    assert "| `marble-seed0` | 0.40 (0.45) | 0.60 (0.55) |" in page
    gradients = gradients_page(Whole(data))
    assert "| signal at this batch size | 0.100 | 0.200 |" in gradients
    assert "| at 16 times as many images | 0.600 | ? |" in gradients
    assert "| cosine of `marble`'s direction with the mean of other images | +0.30 (+0.28 to +0.32) |" in gradients
    assert "is 0.400 on average; 25 % of the mini-batches" in gradients
    against = tables_page(whole).count("| marble | 3 | ▲ +0.4")
    assert against == 3, "the weighted sum, the base model, and the same with conflict"


def test_nothing_is_said_of_held_out_rewards_that_are_not_there() -> None:
    jobs = [job(method, seed, values) for method, values in (("base", LOW), ("marble", HIGH)) for seed in range(2)]
    data = Study([one.model_copy(update={"held_out": []}) for one in jobs], {})
    assert held_out_rewards_rise(data).verdict == "not measured"


def test_what_crashed_is_told() -> None:
    crash = job("sequential", 0, LOW).model_copy(update={"failed": Failure("train", 3, ["out of luck"])})
    data = Study([*study({"base": LOW, "marble": HIGH}).results, crash], {})
    assert "HOLE: sequential seed 0 crashed (train, exit code 3): out of luck" in tables_page(Whole(data))
    assert "There are not two seeds of sequential yet. 1 of sequential crashed." in paper_page(Whole(data))


def written(folder: Path) -> Path:
    for one in study({"base": LOW, "marble": HIGH}).results:
        one.write(folder / "jobs" / f"{one.method}-seed{one.seed}.json")
    return folder


def test_results_are_taken_over_whole_or_not_at_all(tmp_path: Path) -> None:
    new, kept = written(tmp_path / "new"), written(tmp_path / "kept")
    (kept / "jobs" / "old.json").touch()
    (new / "conflict" / "jobs").mkdir(parents=True)  # begun, and no job has ended
    (new / "diagnoses" / "x" / "diagnosis").mkdir(parents=True)
    damaged = new / "diagnoses" / "x" / "diagnosis" / "diagnosis.json"
    damaged.write_text('{"directions": {}}')
    with pytest.raises(InputError, match=r"diagnosis.json is not a diagnosis that this version reads"):
        take(new, kept)
    with pytest.raises(InputError, match=r"--take .*new2: these are the results that are kept"):
        take(written(tmp_path / "other" / ".." / "new2"), tmp_path / "new2")
    assert (kept / "jobs" / "old.json").exists()
    damaged.unlink()
    (kept / "plan.md").touch()
    written(kept / "rare")
    take(new, kept)
    assert (kept / "plan.md").exists()
    assert (kept / "rare" / "jobs" / "base-seed0.json").exists(), "a part that the new study does not have"
    assert sorted(file.name for file in (kept / "jobs").iterdir()) == [
        f"{method}-seed{seed}.json" for method in ("base", "marble") for seed in range(3)
    ]
    assert [folder.name for folder in tmp_path.iterdir() if folder.name.startswith(".")] == []


@pytest.mark.parametrize("claim", PAPER, ids=lambda claim: claim.text)
def test_a_claim_without_data_is_not_judged(claim: Claim) -> None:
    verdict = claim.judge(study({"base": LOW})).verdict
    assert (
        verdict in ("not measured", "not testable here") or "performance.md" in claim.judge(study({"base": LOW})).text
    )


def test_a_page_of_the_base_model_alone() -> None:
    whole = Whole(study({"base": LOW}))
    assert "Where rewards conflict" not in tables_page(whole)
    assert "**not measured**" in paper_page(whole)
    assert "B1 (worst share): not measured yet." in results_page(whole)


def test_the_registered_parts_are_told_with_their_verdicts() -> None:
    own = {f"only-{name}": [0.5 if name == other else 0.1 for other in REWARDS] for name in RARE.rewards}
    scores = {"base": LOW, **own, "fair": [0.45] * 6, "weighted_sum": [0.2] * 6, "gdpo": HIGH, "uniform": HIGH}
    jobs = [
        job(method, seed, [value + NOISE[(seed + i) % 3] * (method != "base") for i, value in enumerate(values)])
        for method, values in (scores | {"marble": HIGH}).items()
        for seed in range(8)
    ]
    page = results_page(Whole(study({"base": LOW}), rare=Study(jobs, {})))
    assert "| `fair` | 8 | " in page
    assert "partly confirmed. The worst share of fair is above that of weighted_sum, below that of gdpo" in page
    assert "### Rare specialists (part A)" in page


def test_the_conflicting_reward_is_all_that_differs() -> None:
    plain, conflict = (load_config(ROOT / "configs" / f"mini-{name}.yaml") for name in ("study", "conflict"))
    assert [reward for reward in conflict.rewards if reward not in plain.rewards] == [conflict.rewards[5]]
    assert conflict.model_copy(update={"rewards": plain.rewards}) == plain


def test_larger_batches_are_all_that_differs() -> None:
    plain, large = (load_config(ROOT / "configs" / f"mini-{name}.yaml") for name in ("study", "large"))
    same = large.model_copy(
        update={
            "rollout": large.rollout.model_copy(update={"groups": plain.rollout.groups}),
            "optimizer": large.optimizer.model_copy(update={"lr": plain.optimizer.lr}),
            "trainer": large.trainer.model_copy(update={"steps": 60, "save_every": 30}),
        }
    )
    assert same == plain


def test_the_sum_without_scales_takes_every_reward_as_published() -> None:
    config = load_config(ROOT / "configs" / "mini-study.yaml")
    trained = [reward for reward in config.rewards if not reward.held_out]
    assert "weights:" + ",".join(str(reward.params.get("divide_by", 1)) for reward in trained) == UNSCALED


@pytest.mark.full
def test_the_page_is_made_of_the_results_beside_it() -> None:
    kept = read_whole(ROOT / "docs/results")
    for path, page in PAGES.items():
        assert (ROOT / path).read_text(encoding="utf-8") == page(kept), "run make results"


SETTINGS = {".": ("mini-study.yaml",), "closely": ("mini-rare.yaml", "evaluation.images_per_prompt=8")}
"""Config of each part and what scripts/study.sh sets; of a part that is not here, the config with its name"""


@pytest.mark.parametrize("folder", [".", *parts_in(ROOT / "docs/results")])
def test_the_results_kept_are_of_the_studys_config(folder: str) -> None:
    from marble_rl.compare.jobs import identity, plan_jobs

    kept = {file.stem: result for file, result in read_results(ROOT / "docs/results" / folder).items()}
    assert kept
    methods = ["all", UNSCALED] if folder == "." else ["all"]
    config, *settings = SETTINGS.get(folder, (f"mini-{folder}.yaml",))
    planned = {job.name: job for job in plan_jobs(ROOT / "configs" / config, settings, methods, range(18), ROOT)}
    for name, result in kept.items():
        if result.method not in REMOVED:
            assert result.config == identity(planned[name].config), name
