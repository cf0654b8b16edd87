"""`marble compare` without training: methods, the plan, what is left to do, and the table of results in real files."""

from __future__ import annotations

import csv
import fcntl
import io
import itertools
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from marble_rl.balancing.settings import MarbleBalance, SequentialBalance
from marble_rl.charts.style import LIGHT
from marble_rl.compare import runner
from marble_rl.compare.display import Display
from marble_rl.compare.jobs import Job, config_hash, identity, plan_jobs
from marble_rl.compare.methods import known_methods, method_sets, sequential_stages, tuned_weights
from marble_rl.compare.report import markdown, print_report
from marble_rl.compare.results import Failure, JobResult, finished, job_result, read_result, read_results, write_result
from marble_rl.compare.resume import locked, remaining_jobs
from marble_rl.compare.selection import select_methods, select_seeds
from marble_rl.compare.statistics import Interval, over_seeds
from marble_rl.compare.table import Comparison, compare_results
from marble_rl.config import load_config
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.errors import InputError, StorageFailed
from marble_rl.intervals import paired_difference
from marble_rl.runs.inputs import check_inputs
from marble_rl.storage import write_json
from runs import marble
from tools.study.claims import UNSCALED

CONFIGS = Path(__file__).parents[2] / "configs"
MINI = CONFIGS / "mini.yaml"
FIVE = ["clipscore", "pickscore", "hpsv2", "ocr", "geneval"]


# Methods


def named(*methods: str, steps: int = 60) -> dict[str, list[str]]:
    """{method: overrides} on configs/mini.yaml."""
    found = select_methods(methods, load_config(MINI, [f"trainer.steps={steps}"]))
    return {method.name: list(method.overrides) for method in found}


def test_every_method_is_a_valid_config() -> None:
    methods = named("all", "config", "specialists")
    assert set(known_methods(FIVE)) | {"weights:1,1,1,2,2"} == set(methods)
    for name, overrides in methods.items():
        config = load_config(MINI, overrides)
        kept = config.model_copy(update={"balance": load_config(MINI).balance})
        if name == "base":
            check_inputs(config)
        else:
            assert kept == load_config(MINI), f"{name} changes more than the balance"


def test_marble_is_the_papers_whatever_the_config_says() -> None:
    balances = {name: load_config(MINI, overrides).balance for name, overrides in named("all", "config").items()}
    paper = MarbleBalance(refresh_every=10, ema_decay=0.7)
    assert balances["marble"] == paper
    assert balances["config"] == MarbleBalance(refresh_every=5)
    changed = {
        "marble_every_step": {"refresh_every": 1},
        "marble_no_norm": {"normalize": False},
        "marble_n5": {"refresh_every": 5},
        "marble_n20": {"refresh_every": 20},
        "marble_rho01": {"ema_decay": 0.1},
        "marble_rho09": {"ema_decay": 0.9},
        "marble_alpha_over_norm": {"apply": "alpha_over_norm"},
        "unit_mean": {"solver": "equal", "apply": "alpha_over_norm"},
        "marble_gram": {"smooth": "gram"},
        "marble_smooth_every_step": {"refresh_every": 1, "smooth": "gram", "ema_decay": 0.965},
        "marble_noise_aware": {"smooth": "gram", "solver": "noise_aware"},
        "marble_adam_metric": {"metric": "adam"},
        "marble_late_uniform": {"uniform_after": 48},
    }
    assert {name for name in balances if name.startswith("marble_")} | {"unit_mean"} == changed.keys()
    for name, change in changed.items():
        assert balances[name] == paper.model_copy(update=change)


def test_the_papers_schedule_is_scaled() -> None:
    assert sequential_stages("abc", 1600) == [("a", 800), ("b", 300), ("a", 200), ("b", 200), ("c", 100)]
    assert sequential_stages("abcde", 1800)[4:] == [("c", 100), ("d", 100), ("e", 100)]
    assert sequential_stages("ab", 15) == [("a", 8), ("b", 3), ("a", 2), ("b", 2)]


@pytest.mark.parametrize("steps", [1, 2, 7, 24, 60, 1000])
@pytest.mark.parametrize("rewards", [1, 2, 3, 5, 9])
def test_stages_fill_the_budget(steps: int, rewards: int) -> None:
    stages = sequential_stages([f"r{i}" for i in range(rewards)], steps)
    assert sum(length for _, length in stages) == steps
    assert all(length > 0 for _, length in stages)
    if steps >= 60:
        assert len({reward for reward, _ in stages}) == rewards


def test_sequential_uses_the_steps_of_the_comparison() -> None:
    balance = load_config(MINI, named("sequential", steps=18)["sequential"]).balance
    assert isinstance(balance, SequentialBalance)
    assert [(stage.reward, stage.steps) for stage in balance.stages] == [
        *(("clipscore", 8), ("pickscore", 3), ("clipscore", 2), ("pickscore", 2)),
        *(("hpsv2", 1), ("ocr", 1), ("geneval", 1)),
    ]


def test_weights_double_the_last_two_fifths() -> None:
    assert [tuned_weights(k) for k in (2, 3, 5, 10)] == [
        "weights:1,2",
        "weights:1,1,2",
        "weights:1,1,1,2,2",
        "weights:1,1,1,1,1,1,2,2,2,2",
    ]
    assert "weights" not in " ".join(method_sets(["a"])["ablations"])


def test_names_sets_weights_and_own_methods_can_be_mixed() -> None:
    own = "mine=optimizer.lr=1e-3,balance={type: fixed, coefficients: {ocr: 0.5, geneval: 0.5}},loss.beta=1"
    found = named("base,weights:1,1,1,2,2.5,marble", own, "gdpo,marble,hot=optimizer.lr=1e-2")
    assert list(found) == ["base", "weights:1,1,1,2,2.5", "marble", "mine", "gdpo", "hot"]
    assert found["mine"] == [
        "optimizer.lr=1e-3",
        "balance={type: fixed, coefficients: {ocr: 0.5, geneval: 0.5}}",
        "loss.beta=1",
    ]
    assert found["hot"] == ["optimizer.lr=1e-2"]
    assert load_config(MINI, found["mine"]).loss.beta == 1


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        (["marbel"], "unknown method 'marbel'. Did you mean 'marble'?"),
        (["only-clip"], "Did you mean 'only-clipscore'?"),
        (["weights_11122"], "Did you mean 'weights:1,1,1,1,1'?"),
        (["weights:1,2"], "one number for each of clipscore, pickscore, hpsv2, ocr, geneval"),
        (["weights:1,1,1,1,x"], "must give one number"),
        (["only-aesthetic"], "unknown method 'only-aesthetic'"),
        (["marble,3"], "'3' after 'marble' means nothing"),
        (["marble=optimizer.lr=1"], "'marble' is a method already"),
        (["mine=trainer.seed=3"], "the same for all methods"),
        (["mine=evaluation.steps=3"], "the same for all methods"),
        (["mine=evaluation={steps: 3}"], "the same for all methods"),
        (["mine=prompts.heldout=[]"], "the same for all methods"),
        (["mine=rewards.0.params={divide_by: 2}"], "the same for all methods"),
        (["mine=rewards.0.params.divide_by=2"], "the same for all methods"),
        (["a=loss.beta=1", "a=loss.beta=2"], "'a' is there twice"),
        ([","], "names none"),
    ],
)
def test_bad_methods_are_named(methods: list[str], says: str) -> None:
    with pytest.raises(InputError) as caught:
        named(*methods)
    assert says in str(caught.value)


def test_seeds() -> None:
    assert select_seeds("0-2,7, 2") == [0, 1, 2, 7]
    for bad in ("", "a", "3-1", "-1", "0,"):
        with pytest.raises(InputError, match="--seeds"):
            select_seeds(bad)


def planned(config: str, words: list[str], out: Path) -> set[str]:
    """Names of the jobs that a command line plans."""
    given = {key: [v for k, v in itertools.pairwise(words) if k == key] for key in ("--set", "--methods", "--seeds")}
    (seeds,) = given["--seeds"]
    jobs = plan_jobs(CONFIGS.parent / config, given["--set"], given["--methods"], select_seeds(seeds), out)
    return {job.name for job in jobs}


def test_the_commands_of_the_page_are_plans(tmp_path: Path) -> None:
    page = (CONFIGS.parent / "docs" / "compare.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^marble compare (configs/.*)$", page, re.MULTILINE)]
    assert [len(planned(config, words, tmp_path)) for config, *words in commands] == [55, 3]


def test_the_study_has_five_seeds_of_the_main_methods_and_three_of_the_others(tmp_path: Path) -> None:
    script = (CONFIGS.parent / "scripts" / "study.sh").read_text(encoding="utf-8")
    commands = re.findall(r"^compare (--.*)$", script, re.MULTILINE)
    jobs = set().union(*(planned("configs/mini-study.yaml", shlex.split(line), tmp_path) for line in commands))
    study = CONFIGS / "mini-study.yaml"
    seeds = {"base": range(5), "specialists": range(5), "joint": range(5), "ablations": range(3), "variants": range(3)}
    seeds["marble_alpha_over_norm"] = range(5)  # led with three
    seeds[UNSCALED] = range(3)
    assert jobs == {job.name for name, n in seeds.items() for job in plan_jobs(study, [], [name], n, tmp_path)}


# The plan, and what is left of it


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config with prompt files, which no model is loaded for."""
    (tmp_path / "prompts.txt").write_text("a marble\na kite\n")
    text = (
        "model: {path: mini}\nprompts: {train: [{name: things, file: prompts.txt}]}\n"
        "rewards: [{name: a, type: brightness}, {name: b, type: jpeg_compressibility}]\n"
        "rollout: {groups: 2}\ntrainer: {steps: 8}\nevaluation: {seed: 10}\n"
    )
    (tmp_path / "config.yaml").write_text(text)
    return tmp_path / "config.yaml"


def plan(config: Path, *overrides: str, methods: str = "weighted_sum,marble", seeds: tuple[int, ...] = (0, 1)) -> Any:
    return plan_jobs(config, overrides, [methods], seeds, config.parent / "out")


def finish(job: Job, **figures: Any) -> JobResult:
    figures = {"means": {"a": 1.0, "b": 2.0}, "prompts": 1, "per_prompt": {"a": [1.0], "b": [2.0]}, **figures}
    result = job_result(job, **figures)
    write_result(job.result, result)
    return result


def begin(job: Job) -> None:
    """What is there of a job that was stopped."""
    job.run.mkdir(parents=True)
    write_json(job.identity_file, identity(job.config))


KEEP: dict[str, Any] = {"fresh": False, "evaluate_again": False, "notice": print}


def left(jobs: list[Job], **options: Any) -> list[str]:
    said: list[str] = []
    return [job.name for job in remaining_jobs(jobs, **{**KEEP, "notice": said.append, **options})]


def test_jobs_of_one_seed_share_everything_but_the_balance(config: Path) -> None:
    jobs = plan(config, seeds=(3, 4))
    assert [job.name for job in jobs] == ["weighted_sum-seed3", "marble-seed3", "weighted_sum-seed4", "marble-seed4"]
    assert [(job.config.trainer.seed, job.config.evaluation.seed) for job in jobs] == [
        (3, 13),
        (3, 13),
        (4, 14),
        (4, 14),
    ]
    first, second = (job.config.model_copy(update={"balance": MarbleBalance()}) for job in jobs[:2])
    assert first == second


def test_finished_jobs_are_not_run_again_and_failed_ones_are(config: Path) -> None:
    jobs = plan(config)
    assert len(left(jobs)) == 4
    finish(jobs[0])
    finish(jobs[2], failed=Failure("train", 3, ["out of luck"]), means={})
    assert left(jobs) == ["marble-seed0", "weighted_sum-seed1", "marble-seed1"]
    assert left(plan(config, "logging.print_every=7", "trainer.save_every=3", "model.device=cpu")) == left(jobs)


def test_another_config_is_refused_with_the_reason(config: Path) -> None:
    finish(plan(config)[0])
    with pytest.raises(InputError, match=r"weighted_sum-seed0: trainer.steps was 8, now 9\..*1 job.*--fresh"):
        left(plan(config, "trainer.steps=9"))
    with pytest.raises(InputError, match=r"optimizer.lr was its default, now 0.5"):
        left(plan(config, "optimizer.lr=0.5"))


def test_a_job_that_was_only_begun_is_held_to_its_config(config: Path) -> None:
    (job, *_) = plan(config)
    begin(job)
    assert len(left(plan(config))) == 4
    with pytest.raises(InputError, match=r"trainer.steps was 8, now 9"):
        left(plan(config, "trainer.steps=9"))


def test_a_job_that_was_begun_with_other_prompts_does_not_go_on(config: Path, tmp_path: Path) -> None:
    (job, *_) = plan(config)
    begin(job)
    (tmp_path / "prompts.txt").write_text("a marble\na drum\n")
    with pytest.raises(InputError, match=r"weighted_sum-seed0: prompts.train.0.file was prompts.txt sha256"):
        left(plan(config))
    assert len(remaining_jobs(plan(config), **{**KEEP, "fresh": True})) == 4
    assert not job.folder.exists()


def test_a_run_that_does_not_tell_what_it_was_begun_with_does_not_go_on(config: Path) -> None:
    (job, *_) = plan(config)
    begin(job)
    job.identity_file.unlink()
    with pytest.raises(InputError, match=r"identity.json, which tells what it was begun with, is missing"):
        left(plan(config))


def test_results_that_are_not_in_the_plan_must_fit(config: Path) -> None:
    (gdpo,) = plan(config, methods="gdpo", seeds=(5,))
    finish(gdpo)
    assert len(left(plan(config))) == 4
    with pytest.raises(InputError, match=r"gdpo-seed5: trainer.steps was 8, now 9"):
        left(plan(config, "trainer.steps=9"))


def test_other_budgets_do_not_hide_behind_the_base_model(config: Path) -> None:
    """`base` sets the steps itself, so that comparing with it alone would tell nothing of them."""
    for job in plan(config, methods="base,marble"):
        finish(job)
    with pytest.raises(InputError, match=r"marble-seed0: trainer.steps was 8, now 9.*2 job"):
        left(plan(config, "trainer.steps=9", methods="base,marble", seeds=(3,)))
    kept = list(read_results(config.parent / "out").values())
    with pytest.raises(InputError, match=r"marble seed 0 and marble seed 3 are not of one comparison: trainer.steps"):
        compare_results([*kept, finish(plan(config, "trainer.steps=9", methods="marble", seeds=(3,))[0])])


def test_one_name_for_two_methods_of_ones_own_is_refused(config: Path) -> None:
    one, other = (finish(plan(config, methods=f"hot=optimizer.lr={i}", seeds=(i,))[0]) for i in (1, 2))
    with pytest.raises(InputError, match=r"optimizer.lr was 1.0, now 2.0"):
        compare_results([one, other])


def test_a_method_of_ones_own_may_differ_in_what_it_sets(config: Path) -> None:
    (own,) = plan(config, methods="hot=optimizer.lr=1", seeds=(0,))
    finish(own)
    assert len(left(plan(config))) == 4
    with pytest.raises(InputError, match=r"hot-seed0: optimizer.lr was 1.0, now 2.0"):
        left(plan(config, methods="hot=optimizer.lr=2"))


def test_fresh_throws_away_what_does_not_fit_and_nothing_else(config: Path) -> None:
    before = plan(config)
    finish(before[0])
    before[0].log.write_text("old")
    before[0].folder.mkdir()
    now = plan(config, "trainer.steps=9")
    finish(now[1])
    said: list[str] = []
    assert left(now, fresh=True, notice=said.append) == ["weighted_sum-seed0", "weighted_sum-seed1", "marble-seed1"]
    assert said == ["throwing away weighted_sum-seed0: trainer.steps was 8, now 9"]
    assert sorted(path.name for path in before[0].result.parent.iterdir()) == ["marble-seed0.json"]


def test_a_training_is_kept_where_only_its_evaluation_is_another(config: Path) -> None:
    finished_, begun, *_ = plan(config)
    (other,) = plan(config, methods="gdpo", seeds=(5,))
    for job in (finished_, other):
        job.run.mkdir(parents=True)
        job.evaluation.mkdir()
        finish(job)
    begin(begun)
    now = plan(config, "evaluation.steps=3")
    with pytest.raises(InputError, match=r"evaluation.steps was .*, now 3\..*evaluate 2 training.*--evaluate-again"):
        left(now)
    with pytest.raises(InputError, match=r"--evaluate-again: gdpo-seed5 in .* would lose their scores and not get"):
        left(now, evaluate_again=True)
    assert other.result.exists(), "no job of this plan would have judged it anew"
    now += plan(config, "evaluation.steps=3", methods="gdpo", seeds=(5,))
    said: list[str] = []
    assert len(left(now, evaluate_again=True, notice=said.append)) == 5
    assert [line.partition(":")[0] for line in said] == [
        f"keeping the training of {name}" for name in ("weighted_sum-seed0", "marble-seed0", "gdpo-seed5")
    ]
    for job in (finished_, other, begun):
        assert job.run.exists()
        assert not job.evaluation.exists()
        assert not job.result.exists()
    with pytest.raises(InputError, match=r"evaluation.steps was .*, now 3"):  # until each is evaluated
        left(now)


def test_a_result_without_its_run_cannot_be_evaluated_again(config: Path) -> None:
    finish(plan(config)[0])
    with pytest.raises(InputError, match=r"evaluation.steps was .*, now 3\. Restore that, give another --out, or"):
        left(plan(config, "evaluation.steps=3"), evaluate_again=True)


def test_another_training_is_not_kept(config: Path) -> None:
    (job, *_) = plan(config)
    job.run.mkdir(parents=True)
    finish(job)
    with pytest.raises(InputError, match=r"trainer.steps was 8, now 9"):
        left(plan(config, "trainer.steps=9", "evaluation.steps=3"), evaluate_again=True)
    assert job.result.exists()


def test_prompts_count_by_content_not_by_place(config: Path, tmp_path: Path) -> None:
    before = identity(plan(config)[0].config)
    shutil.copytree(tmp_path, tmp_path / "elsewhere")
    moved = identity(plan(tmp_path / "elsewhere" / "config.yaml")[0].config)
    assert config_hash(moved) == config_hash(before)
    (tmp_path / "prompts.txt").write_text("a marble\na drum\n")
    assert config_hash(identity(plan(config)[0].config)) != config_hash(before)


def test_one_comparison_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(InputError, match="a comparison is running"), locked(tmp_path):
        pass
    with locked(tmp_path) as descriptor:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) >= 0


# Results


def image(prompt: str, index: int, **scores: float | None) -> dict[str, Any]:
    return {"prompt": prompt, "source": "things", "index": index, "image": 0, "scores": scores}


def test_a_result_is_made_of_scores_and_metrics(config: Path) -> None:
    (job,) = plan(config, methods="marble", seeds=(0,))
    job.run.mkdir(parents=True)
    lines = [
        {"step": 0, "time/rollout": 2.0, "time/scoring": 9.0, "time/reward/a": 9.0, "alpha_bar/a": 0.5, "qp/norm": 0.3},
        {"step": 1, "time/rollout": 1.0, "time/update": 0.5, "alpha_bar/a": 0.25, "reward/a": 7.0},
    ]
    (job.run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    images = [image("x", 0, a=1.0, b=None), image("x", 0, a=2.0, b=None), image("y", 1, a=4.0, b=5.0)]
    images.append(image("y", 1, a=4.0, b=None))
    weights = {"ema": {"means": {"a": 2.75, "b": 5.0}, "images": images}}
    write_result(job.result, finished(job, {"weights": weights, "held_out_rewards": ["b"]}, 3.0))
    found = read_result(job.result)
    assert found.per_prompt == {"a": [1.5, 4.0], "b": [None, 5.0]}
    assert (found.prompts, found.images_per_prompt, found.held_out) == (2, 2, ["b"])
    assert (found.train_seconds, found.seconds_per_step, found.evaluate_seconds) == (3.5, 1.75, 3.0)
    assert found.training == {"alpha_bar/a": 0.375, "qp/norm": 0.3}
    assert found.config_hash == config_hash(identity(job.config))
    assert (found.steps, found.images_per_step) == (8, 2 * 24)
    assert {"marble", "torch", "python"} <= found.versions.keys()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"method": 1}', '{"failed": null, "colour": 1}'])
def test_a_damaged_result_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match=r"x.json is not the result of a job.*Delete it"):
        read_result(tmp_path / "x.json")


# The table


def result(method: str, seed: int, per_prompt: dict[str, list[float | None]], **more: Any) -> JobResult:
    known = {name: [v for v in column if v is not None] for name, column in per_prompt.items()}
    means = {name: sum(column) / len(column) for name, column in known.items()}
    count = len(next(iter(per_prompt.values()), []))
    figures = {"means": means, "prompts": count, "images_per_prompt": 1, "per_prompt": per_prompt, **more}
    return JobResult(method, "about it", seed, [], {"trainer": {"seed": seed}}, "hash", {"marble": "1"}, **figures)


def table(scores: dict[str, list[dict[str, float]]], **options: Any) -> Comparison:
    """{method: [scores of seed 0, of seed 1, ...]}"""
    results = [
        result(method, seed, {name: [value] for name, value in row.items()})
        for method, rows in scores.items()
        for seed, row in enumerate(rows)
    ]
    return compare_results(results, **options)


def composites(comparison: Comparison) -> dict[str, float]:
    return {row.method: row.figures["composite"].mean for row in comparison.rows}


def test_composite_by_hand() -> None:
    found = table({"base": [{"a": 1, "b": 10}], "gdpo": [{"a": 2, "b": 10}], "marble": [{"a": 3, "b": 40}]})
    # a: mean 2, std sqrt(2/3); b: mean 20, std sqrt(200)
    z = {"base": (-(1.5**0.5), -(0.5**0.5)), "gdpo": (0.0, -(0.5**0.5)), "marble": (1.5**0.5, 2**0.5)}
    assert composites(found) == pytest.approx({name: (a + b) / 2 for name, (a, b) in z.items()})
    assert [(row.z["a"], row.z["b"]) for row in found.rows] == [pytest.approx(pair) for pair in z.values()]


def test_interval_over_seeds_by_hand() -> None:
    found = over_seeds(np.array([1.0, 2.0, 3.0]))
    assert found == Interval(
        2.0, pytest.approx(2 - 4.302653 / 3**0.5), pytest.approx(2 + 4.302653 / 3**0.5), 3, "seeds"
    )
    (row,) = table({"marble": [{"a": 1.0}, {"a": 2.0}, {"a": 3.0}]}).rows
    assert row.figures["a"] == found
    assert row.seeds == [0, 1, 2]


def test_what_a_seed_does_to_all_methods_alike_does_not_blur_the_composite() -> None:
    effects = (0.0, 5.0, -3.0)
    rows = {name: [{"a": i + e, "b": -i + 2 * e} for e in effects] for i, name in enumerate(["base", "gdpo", "marble"])}
    for row in table(rows).rows:
        assert row.figures["a"].half_width > 1
        assert row.figures["composite"].half_width == pytest.approx(0, abs=1e-9)


def rolled(*methods: tuple[str, int]) -> dict[str, list[dict[str, float]]]:
    """Scores of each method's first seeds, all different."""
    dice = np.random.default_rng(1)
    return {
        name: [dict(zip("abc", dice.normal(size=3).tolist(), strict=True)) for _ in range(n)] for name, n in methods
    }


def test_the_composite_of_several_seeds_is_that_of_their_means() -> None:
    rows = rolled(("base", 5), ("gdpo", 5), ("marble", 5))
    means = {
        name: [{key: float(np.mean([row[key] for row in seeds])) for key in "abc"}] for name, seeds in rows.items()
    }
    assert composites(table(rows)) == pytest.approx(composites(table(means)))


def test_which_seeds_a_method_has_does_not_move_its_composite() -> None:
    effects = (3.0, 0.0, -1.0, -2.0)
    level = {"base": 0.0, "gdpo": 1.0, "marble": 4.0}
    whole = {name: [{"a": x + e, "b": x - e} for e in effects] for name, x in level.items()}
    some = whole | {"gdpo": whole["gdpo"][:1], "marble": whole["marble"][:2]}
    assert composites(table(some)) == pytest.approx(composites(table(whole)))


def test_seeds_are_taken_out_by_least_squares() -> None:
    """As a regression on methods and seeds does it, in another way."""
    rows = rolled(("base", 4), ("gdpo", 2), ("marble", 3))
    entries = [(m, s, scores["a"]) for m, seeds in rows.items() for s, scores in enumerate(seeds)]
    names = list(rows)
    design = np.array([[m == n for n in names] + [s == t for t in range(1, 4)] for m, s, _ in entries], dtype=float)
    fitted = np.linalg.lstsq(design, np.array([x for *_, x in entries]), rcond=None)[0][: len(names)]
    z = (fitted - fitted.mean()) / fitted.std()
    assert {row.method: row.z["a"] for row in table(rows).rows} == pytest.approx(dict(zip(names, z, strict=True)))


def test_differences_are_paired_by_seed() -> None:
    found = table(
        {
            "weighted_sum": [{"a": 1.0, "b": 0.0}, {"a": 5.0, "b": 0.0}, {"a": 9.0, "b": 0.0}],
            "marble": [{"a": 1.9, "b": 1.0}, {"a": 6.0, "b": -1.0}, {"a": 10.1, "b": 0.5}],
            "gdpo": [{"a": 0.5, "b": 0.0}],
        }
    )
    rows = {row.method: row for row in found.rows}
    assert found.against == "weighted_sum"
    assert rows["weighted_sum"].differences == {}
    a, b = rows["marble"].differences["a"], rows["marble"].differences["b"]
    assert (a.mean, a.n, a.significant) == (pytest.approx(1.0), 3, True)
    assert a.half_width == pytest.approx(4.302653 * 0.1 / 3**0.5)
    assert (b.mean, b.significant) == (pytest.approx(1 / 6), False)
    assert not rows["marble"].figures["a"].significant, "unpaired it would not show"
    assert (rows["gdpo"].differences["a"].n, rows["gdpo"].differences["a"].over) == (1, "nothing")


def test_another_method_can_be_compared_with() -> None:
    rows = {"base": [{"a": 1.0}], "marble": [{"a": 3.0}]}
    assert table(rows).against is None
    assert all(not row.differences for row in table(rows).rows)
    assert table(rows, against="base").rows[1].differences["a"].mean == 2.0
    with pytest.raises(InputError, match=r"--against: no results of 'bass'. Did you mean 'base'\?"):
        table(rows, against="bass")


def test_a_method_that_always_crashed_leaves_the_table_without_differences() -> None:
    good = [result(method, 0, {"a": [1.0]}) for method in ("weighted_sum", "marble")]
    crashed = result("gdpo", 0, {}, failed=Failure("train", 3, ["out of luck"]))
    found = compare_results([*good, crashed], "gdpo")
    assert (found.against, [hole.method for hole in found.holes]) == (None, ["gdpo"])


@pytest.mark.parametrize("methods", [2, 5])
def test_the_composites_interval_is_as_wide_as_chance_makes_it(methods: int) -> None:
    """Scores far apart, so that chance hardly moves the scale: then the composite's standard error is
    sigma / std / sqrt(n), whatever the number of methods, and whatever seeds do to all of them."""
    dice, seeds, n = np.random.default_rng(0), 3.0, 5
    level = 100.0 * np.arange(methods)
    squared = []
    for _ in range(200):
        scores = level[:, None] + seeds * dice.normal(size=n) + dice.normal(size=(methods, n))
        rows = {f"m{i}": [{"a": float(x)} for x in row] for i, row in enumerate(scores)}
        squared += [(row.figures["composite"].half_width / 2.776445 * level.std()) ** 2 for row in table(rows).rows]
    assert np.mean(squared) == pytest.approx(1 / n, rel=0.1)


def test_a_seed_that_no_other_method_has_does_not_narrow_the_composites_interval() -> None:
    rows = rolled(("base", 3), ("gdpo", 3), ("marble", 5))
    shared = {name: seeds[:3] for name, seeds in rows.items()}
    more, fewer = (
        next(row for row in table(of).rows if row.method == "marble").figures["composite"] for of in (rows, shared)
    )
    assert (more.n, fewer.n) == (3, 3)
    assert more.half_width == pytest.approx(fewer.half_width, rel=0.2)  # the scale differs, for a_m does


@pytest.mark.parametrize("design", [{"a": "01", "b": "0", "c": "1"}, {"a": "01234", "b": "01", "c": "23", "d": "4"}])
def test_holes_do_not_narrow_the_composites_interval(design: dict[str, str]) -> None:
    """Where few methods share a seed, fitting what the seed does to all takes most of what is left of each."""
    dice, level = np.random.default_rng(0), {name: 100.0 * i for i, name in enumerate(design)}
    inside = []
    for _ in range(300):
        effects = 3 * dice.normal(size=5)
        jobs = [
            result(name, int(seed), {"x": [level[name] + effects[int(seed)] + dice.normal()] * 2})
            for name, seeds in design.items()
            for seed in seeds
        ]
        row = next(row for row in compare_results(jobs).rows if row.method == "a")
        found, true = row.figures["composite"], -np.mean(list(level.values())) / np.std(list(level.values()))
        inside.append(found.low <= true <= found.high)
    assert np.mean(inside) > 0.93


def test_differences_go_by_the_prompts_that_both_have_a_score_of() -> None:
    """A reward that is silent on the hard half of a method's images does not make the method better."""
    easy, hard = [1.0, 0.9, 0.8], [0.1, 0.2, 0.3]
    silent: list[float | None] = [*(x - 0.05 for x in easy), None, None, None]
    for seeds in ((0,), (0, 1)):
        found = compare_results(
            [
                result(method, seed, {"a": scores})
                for seed in seeds
                for method, scores in (("weighted_sum", [*easy, *hard]), ("marble", silent))
            ]
        )
        difference = found.rows[1].differences["a"]
        assert difference.mean == pytest.approx(-0.05)
        assert difference.low <= difference.mean <= difference.high
        assert found.rows[1].figures["a"].mean == pytest.approx(0.85)


def test_one_prompt_of_one_seed_has_no_interval_and_one_seed_no_arrow() -> None:
    """Resampled, a single prompt is always itself, and would look certain. And two trainings differ anyway."""
    single = compare_results([result("weighted_sum", 0, {"a": [1.0]}), result("marble", 0, {"a": [2.0]})])
    several = compare_results([result("weighted_sum", 0, {"a": [1.0, 1.1]}), result("marble", 0, {"a": [2.0, 2.2]})])
    for found, over in ((single, "nothing"), (several, "prompts")):
        difference = found.rows[1].differences["a"]
        assert (difference.mean > 0.9, difference.over, difference.significant) == (True, over, False)
        assert not any(arrow in markdown(found) for arrow in ("▲", "▼"))
    assert "+1.000‡" in markdown(single)
    assert "‡ one prompt of one seed: no interval" in markdown(single)
    assert difference.low > 0, "though this interval is above 0"


def test_crashed_jobs_leave_marked_holes() -> None:
    """Also in the rows: a method without any result, and one with a part of its seeds."""
    failed = {"failed": Failure("train", 3, ["out of luck"])}
    good = [result("weighted_sum", s, {"a": [1.0, 2.0]}) for s in (0, 1)] + [result("marble", 0, {"a": [1.5, 2.5]})]
    found = compare_results([*good, result("marble", 1, {}, **failed), result("gdpo", 0, {}, **failed)])
    lines = markdown(found).splitlines()
    assert "| gdpo | 0 of 1 | HOLE | HOLE |  |  |" in lines
    assert any(line.startswith("| marble | 1 of 2 | ") for line in lines)
    assert any(line.startswith("| weighted_sum | 2 | ") for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_terminal_of_any_width_shows_names_and_numbers_whole(width: int) -> None:
    names = [f"reward_{i}" for i in range(8)]
    dice = np.random.default_rng(0)
    found = table({m: [{n: dice.random() for n in names} for _ in range(3)] for m in ("weighted_sum", "marble_gram")})
    file = io.StringIO()
    print_report(found, Console(file=file, force_terminal=True, width=width, color_system=None))
    shown = file.getvalue()
    assert "…" not in shown
    for text in (*names, "weighted_sum", "marble_gram", *(f"{row.figures['reward_3'].mean:.1f}" for row in found.rows)):
        assert text in shown
    assert ("going on" in shown) == (width < 200)


def test_one_seed_is_bootstrapped_over_its_prompts() -> None:
    dice = np.random.default_rng(2)
    before = dice.normal(size=80)
    after = before + 0.3 + 0.2 * dice.normal(size=80)
    some = [None if i % 4 else float(v) for i, v in enumerate(after)]
    found = compare_results(
        [
            result("weighted_sum", 0, {"a": before.tolist(), "b": before.tolist()}),
            result("marble", 0, {"a": after.tolist(), "b": some}),
        ]
    )
    row = found.rows[1]
    reference = paired_difference(torch.tensor(before), torch.tensor(after))
    difference = row.differences["a"]
    assert (difference.n, difference.over) == (1, "prompts")
    assert difference.mean == pytest.approx(reference.mean)
    assert (difference.low, difference.high) == pytest.approx((reference.low, reference.high), abs=0.005)
    assert difference.half_width < row.figures["a"].half_width / 2
    quarter = np.array(some[::4], dtype=np.float64)
    assert row.figures["b"].half_width == pytest.approx(1.96 * quarter.std() / 20**0.5, rel=0.1)
    assert row.figures["composite"].low < row.figures["composite"].mean < row.figures["composite"].high
    assert "†" in markdown(found)


def test_rows_stand_in_the_order_of_the_registry() -> None:
    names = ["own", "marble_n5", "marble", "weighted_sum", "only-a", "base"]
    assert [row.method for row in table({name: [{"a": 1.0}] for name in names}).rows] == names[::-1]


def test_a_reward_that_some_results_lack_is_left_out() -> None:
    found = table({"base": [{"a": 1.0, "b": 2.0}], "marble": [{"a": 3.0}]})
    assert (found.rewards, found.left_out) == (["a"], ["b"])
    assert "left out, because not every result has it: b" in markdown(found)


def test_results_of_other_budgets_or_prompts_do_not_stand_in_one_table() -> None:
    one, other = result("base", 0, {"a": [1.0]}), result("marble", 0, {"a": [1.0]})
    with pytest.raises(InputError, match=r"base seed 0 and marble seed 0 are not of one comparison: trainer.steps was"):
        compare_results([one, replace(other, config={"trainer": {"seed": 0, "steps": 5}})])
    with pytest.raises(InputError, match="held-out prompts were"):
        compare_results([one, replace(other, prompts_hash="another")])


# Its files


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Results of three methods and a hole, and nothing else."""
    crash = Failure("train", 3, ["step 4", "stopped: reward 'a' fell over", ""])
    results = [
        *(result("weighted_sum", s, {"a": [1.0 + s], "b": [2.0]}, held_out=["b"]) for s in (0, 1)),
        *(
            result("marble", s, {"a": [2.0 + s], "b": [3.0 + s / 10]}, held_out=["b"], training=t, train_seconds=90.0)
            for s, t in enumerate([{"heldout/min_cos": 0.25}, {"heldout/min_cos": 0.75}])
        ),
        replace(result("gdpo", 0, {}), failed=crash),
    ]
    for entry in results:
        write_result(tmp_path / "jobs" / f"{entry.method}-seed{entry.seed}.json", entry)
    return tmp_path


def test_the_table_is_made_from_the_results_alone(out: Path) -> None:
    outcome = marble("compare", out, "--table-only")
    assert outcome.code == 1
    assert "1 job(s) crashed: gdpo seed 0" in outcome.err
    text = (out / "table.md").read_text()
    assert "| method | n | a | b* | composite | minutes | s/step |" in text
    assert "| marble | 2 | **2.5** ±6.4 | **3.05** ±0.64 |" in text
    assert "| 1.5 |" in text
    assert "HOLE: gdpo seed 0 crashed (train, exit code 3): stopped: reward 'a' fell over" in text
    assert "| marble | 2 | ▲ +1.000 ±0.000 | ▲ +1.05 ±0.64 |" in text
    assert "| marble | 0.50 |" in text
    for word in ("marble", "weighted_sum", "2.5", "±6.4", "b*", "HOLE"):
        assert word in outcome.out

    found = json.loads((out / "compare.json").read_text())
    assert found == json.loads(marble("compare", out, "--table-only", "--json").out)
    assert [row["method"] for row in found["rows"]] == ["weighted_sum", "marble"]
    assert found["rows"][1]["figures"]["a"]["mean"] == 2.5
    lines = list(csv.DictReader(io.StringIO((out / "compare.csv").read_text())))
    assert [(line["method"], line["column"]) for line in lines] == [
        (method, column) for method in ("weighted_sum", "marble") for column in ("a", "b", "composite")
    ]
    assert (lines[3]["mean"], lines[3]["difference"], lines[3]["n"], lines[3]["held_out"]) == ("2.5", "1.0", "2", "0")
    assert lines[0]["difference"] == ""


def test_the_picture_shows_something(out: Path) -> None:
    marble("compare", out, "--table-only")
    with Image.open(out / "compare.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[0] > 200
    assert pixels.shape[1] > 500
    colours = {tuple(colour) for colour in np.unique(pixels.reshape(-1, 3), axis=0).tolist()}
    assert tuple(bytes.fromhex(LIGHT["ours"][1:])) in colours, "MARBLE's interval"
    assert tuple(bytes.fromhex(LIGHT["bad"][1:])) in colours, "that of what it is compared with"


def test_no_table_of_nothing(out: Path, tmp_path: Path) -> None:
    assert "no results of jobs" in marble("compare", tmp_path / "jobs", "--table-only").err
    for file in (out / "jobs").glob("*-seed?.json"):
        if not file.name.startswith("gdpo"):
            file.unlink()
    outcome = marble("compare", out, "--table-only")
    assert outcome.code == 1
    assert "every job crashed" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--methods", "marbel"], "Did you mean 'marble'?"),
        (["--seeds", "x"], "--seeds: 'x'"),
        (["--methods", "marble", "--against", "gdpo"], "--against: 'gdpo' is not compared. There are: marble"),
        (["--set", "trainer.stepz=3"], "unknown key 'stepz'"),
        (["--methods", "x=loss.betta=3"], "unknown key 'betta'"),
    ],
)
def test_bad_input_is_found_before_anything_runs(config: Path, arguments: list[str], says: str) -> None:
    outcome = marble("compare", config, "--out", config.parent / "out", *arguments)
    assert outcome.code == 2
    assert says in outcome.err
    assert not list((config.parent / "out").rglob("run"))


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    outcome = marble("compare", tmp_path)
    assert outcome.code == 2
    assert "--table-only" in outcome.err


def test_a_folder_that_is_not_there_is_not_another_one(tmp_path: Path) -> None:
    outcome = marble("compare", tmp_path / "comparee", "--table-only")
    assert outcome.code == 2
    assert "comparee: there is no such folder" in outcome.err


def test_nothing_is_thrown_away_for_a_command_that_is_refused(config: Path) -> None:
    done = finish(plan(config)[0])
    arguments = [
        "--methods",
        "weighted_sum",
        "--seeds",
        "0",
        "--set",
        "trainer.steps=9",
        "--fresh",
        "--against",
        "bass",
    ]
    outcome = marble("compare", config, "--out", config.parent / "out", *arguments)
    assert outcome.code == 2
    assert list(read_results(config.parent / "out").values()) == [done]


def test_a_full_disk_lets_the_other_jobs_save(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Begun:
        def __init__(self, job: Job, lock: int) -> None:
            if done:
                raise StorageFailed("cannot write")
            self.job = job
            done.append("began")

        def __getattr__(self, name: str) -> Any:
            return lambda: done.append(name)

    monkeypatch.setattr(runner, "JobProcess", Begun)
    display = Display(Console(file=io.StringIO()), total=4, done=0)
    with pytest.raises(StorageFailed), Interrupts(print) as interrupts:
        runner.run_jobs(plan(config), 2, display, interrupts, 0)
    assert done == ["began", "stop", "wait", "kill"]


def test_help_has_an_example() -> None:
    outcome = marble("compare", "--help")
    assert outcome.code == 0
    assert "Example: marble compare" in " ".join(outcome.out.split())


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_follows_the_jobs(config: Path, terminal: bool) -> None:
    output = io.StringIO()
    good, bad, stopped, _ = plan(config)
    crash = Failure("train", 3, ["stopped: it fell over", ""])
    with Display(Console(file=output, force_terminal=terminal, width=150), total=4, done=1) as display:
        for job in (good, bad, stopped):
            display.began(job)
            display.progress(job, "train", 5)
        display.progress(good, "evaluate", 8)
        display.ended(good, finish(good))
        display.ended(bad, replace(finish(bad), failed=crash))
        display.ended(stopped, None)
    shown = output.getvalue()
    assert "failed  marble-seed0 (train, exit code 3): stopped: it fell over" in shown
    assert "stopped weighted_sum-seed1" in shown
    assert ("all jobs" in shown) is terminal
    assert ("done    weighted_sum-seed0" in shown) is not terminal
