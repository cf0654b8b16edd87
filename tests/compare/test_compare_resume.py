"""The plan of a comparison, and what is left to do in a folder that has parts of it or of another one."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs import finish, plan
from marble_rl.balancing.marble import MarbleSettings
from marble_rl.compare.job_result import Failure, read_results
from marble_rl.compare.jobs import Job, config_hash, identity
from marble_rl.compare.resume import locked, remaining_jobs
from marble_rl.compare.table import compare_results
from marble_rl.errors import InputError
from marble_rl.storage import write_json


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
    first, second = (job.config.model_copy(update={"balance": MarbleSettings()}) for job in jobs[:2])
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


def test_a_run_without_its_identity_does_not_go_on(config: Path) -> None:
    (job, *_) = plan(config)
    begin(job)
    job.identity_file.unlink()
    with pytest.raises(InputError, match=r"identity.json, which says what it was begun with, is missing"):
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
