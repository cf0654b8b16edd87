"""The best checkpoint: chosen on validation prompts, kept, part of the run's state, and used on request only."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from built_once import built_once
from runs import base_config, lora_bytes, marble, metrics, train, write_config

VALIDATION = ["a red car", "a blue hen", "a star", "a green moon"]
HELDOUT = ["a house", "a purple tree", "a boat"]


def prompts(model: Path, **changes: Any) -> dict[str, Any]:
    splits = {
        "heldout": [{"name": "other", "texts": HELDOUT}],
        "validation": [{"name": "prompts", "texts": VALIDATION}],
    }
    return {**base_config(model)["prompts"], **splits, **changes}


@pytest.fixture(scope="module")
def validated(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps, evaluated after every second one, with what `marble train` said in `said`."""

    def build(folder: Path) -> None:
        trainer = {"steps": 8, "save_every": 8, "micro_batch": 16, "eval_every": 2}
        optimizer = {"lr": 0.05}  # large: the score falls after its best
        config = write_config(
            folder / "config.yaml", tiny_sd3, prompts=prompts(tiny_sd3), trainer=trainer, optimizer=optimizer
        )
        (folder / "said").write_text(train(config, folder / "run").err)

    return built_once(tmp_path_factory, "validated-run", build)


def best_of(run: Path, step: int = 8) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((run / "checkpoints" / f"step-{step}" / "state.json").read_text())
    best: dict[str, Any] = state["best"]
    return best


def kept(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_the_best_of_the_evaluations_is_kept_beside_the_newest(validated: Path) -> None:
    run = validated / "run"
    scores = {int(line["step"]) + 1: line["evaluation/score"] for line in metrics(run) if "evaluation/score" in line}
    assert list(scores) == [2, 4, 6, 8]
    best = best_of(run)
    assert (best["step"], best["score"]) == (max(scores, key=lambda step: scores[step]), max(scores.values()))
    assert best["step"] < 6, "an earlier one, or this test shows nothing"
    assert f"step-{best['step']}" in kept(run)
    assert len(kept(run)) <= 3
    said = (validated / "said").read_text()
    assert f"validation after step {best['step']}: score {best['score']:+.3f} (the base model: 0), the best" in said
    assert f"the best is still that of step {best['step']}" in said


def test_the_score_is_the_mean_gain_in_spreads_of_the_base_model(validated: Path, tmp_path: Path) -> None:
    """From the scores that `marble evaluate` gives on the same prompts and noise."""
    run, best = validated / "run", best_of(validated / "run")
    (tmp_path / "validation.txt").write_text("\n".join(VALIDATION))
    asked = ("--prompts", tmp_path / "validation.txt", "--out", tmp_path / "out")
    outcome = marble("evaluate", run, "--checkpoint", "best", *asked)
    assert outcome.code == 0, outcome.err
    assert f"best checkpoint: step {best['step']}, validation score {best['score']:+.3f}" in outcome.err
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert scores["step"] == best["step"]
    gains = []
    for reward in ("small", "bright", "colour"):
        base, ema = (
            [image["scores"][reward] for image in scores["weights"][name]["images"]] for name in ("base", "ema")
        )
        pairs = [(before, after) for before, after in zip(base, ema, strict=True) if before is not None]
        spread = statistics.stdev(before for before, _ in pairs)
        gains.append(statistics.fmean(after - before for before, after in pairs) / spread)
        assert best["gains"][reward] == pytest.approx(gains[-1], abs=1e-6)
    assert best["score"] == pytest.approx(statistics.fmean(gains), abs=1e-6)


@pytest.mark.full
def test_a_resumed_run_chooses_the_same_checkpoint(validated: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(validated / "config.yaml", run, "--set", "trainer.steps=5")
    train(validated / "config.yaml", run, "--resume")
    assert lora_bytes(run) == lora_bytes(validated / "run")
    assert metrics(run) == metrics(validated / "run")
    assert best_of(run) == best_of(validated / "run")
    assert f"step-{best_of(run)['step']}" in kept(run)


@pytest.mark.full
def test_without_evaluations_the_weights_are_the_same(validated: Path, tmp_path: Path) -> None:
    outcome = train(validated / "config.yaml", tmp_path / "run", "--set", "trainer.eval_every=null")
    assert "trainer.eval_every is null: no best checkpoint is chosen" in outcome.err
    assert lora_bytes(tmp_path / "run") == lora_bytes(validated / "run")


def test_another_validation_chooses_anew(validated: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(validated / "run", tmp_path / "run"))
    other = "prompts.validation=[{name: prompts, texts: [a red pot, a cave, a pink cat]}]"
    longer = "trainer={steps: 10, save_every: 10, micro_batch: 16, eval_every: 2}"
    outcome = train(validated / "config.yaml", run, "--resume", "--set", other, "--set", longer)
    assert "the best checkpoint is chosen anew" in outcome.err
    assert best_of(run, 10)["step"] == 10
    assert len(best_of(run, 10)["base"]["bright"]) == 3


def test_the_newest_is_used_unless_the_best_is_asked_for(validated: Path, tmp_path: Path) -> None:
    run, best = validated / "run", best_of(validated / "run")
    used = {}
    for name, given in {"newest": [], "best": ["--checkpoint", "best"], "step": ["--step", best["step"]]}.items():
        outcome = marble("export", run, "--out", tmp_path / name, *given)
        assert outcome.code == 0, outcome.err
        used[name] = json.loads((tmp_path / name / "marble.json").read_text())["step"]
    assert used == {"newest": 8, "best": best["step"], "step": best["step"]}
    sampled = marble("sample", run, "--prompt", "a cup", "--checkpoint", "best", "--out", tmp_path / "samples")
    assert sampled.code == 0, sampled.err


def test_the_run_says_what_it_trains_and_what_evaluations_cost(validated: Path) -> None:
    said = (validated / "said").read_text()
    before, _, after = said.partition("step 1/8")
    for words in (
        "on cpu: trains 1,920 LoRA parameters, 77,712 are frozen",
        "objectives: small, bright, colour; rule: marble",
        f"folder {validated / 'run'}",
        "evaluations during training: 4, one every 2 steps, 4 images of validation prompts each",
        "the first also scores the base model",
    ):
        assert words in before
    assert after.count("s for 4 images: about ") == 1


@pytest.mark.full
def test_the_report_says_what_evaluations_cost_and_which_checkpoint_is_best(validated: Path, tmp_path: Path) -> None:
    outcome = marble("report", validated / "run", "--out", tmp_path / "report.html")
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "report.html").read_text()
    assert "4 of 4 images" in page
    assert "<b>validation score</b>" in page
    assert f"step {best_of(validated / 'run')['step']}, validation score" in page


def test_a_checkpoint_below_a_floor_is_never_the_best(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = [
        {"name": "bright", "type": "brightness"},
        {"name": "small", "type": "jpeg_compressibility", "guard": {"floor": 1000.0}},
    ]
    trainer = {"steps": 2, "save_every": 2, "micro_batch": 16, "eval_every": 1}
    rollout = {"groups": 4, "group_size": 2, "steps": 2}
    config = write_config(
        tmp_path / "config.yaml",
        tiny_sd3,
        prompts=prompts(tiny_sd3),
        rewards=rewards,
        balance={"type": "fair"},
        trainer=trainer,
        rollout=rollout,
    )
    outcome = train(config, tmp_path / "run")
    assert outcome.err.count("not kept: small below the floor") == 2
    assert best_of(tmp_path / "run", 2)["step"] is None
    refused = marble("sample", tmp_path / "run", "--prompt", "x", "--checkpoint", "best", "--out", tmp_path / "out")
    assert refused.code == 2
    assert "has no best one: no evaluation so far counts" in refused.err


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("best", "has no best one: its training had no validation. It needs prompts.validation and trainer.eval_every"),
        ("latest", "'latest' is no checkpoint; give best, newest or the number of a step"),
        ("-3", "'-3' is no checkpoint"),
        ("5", "has no checkpoint of step 5; it has [6, 8]"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused(finished_run: Path, tmp_path: Path, value: str, says: str) -> None:
    outcome = marble("export", finished_run, f"--checkpoint={value}", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "--checkpoint" in outcome.err
    assert says in outcome.err
    assert not (tmp_path / "out").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a held-out prompt": (
        {"validation": [{"name": "v", "texts": ["a red car", "A  HOUSE"]}]},
        "prompts.validation (v): 'A  HOUSE' asks for what a held-out prompt asks for",
    ),
    "a training prompt that is reported on": (
        {"heldout": None, "validation": [{"name": "v", "texts": ["a red cup"]}]},
        "prompts.validation (v): 'a red cup' asks for what a training prompt asks for",
    ),
    "no prompt of a reward": (
        {"validation": [{"name": "v", "texts": ["a house boat"]}]},
        "rewards: 'colour' applies to no validation prompt, so the best checkpoint would be chosen without it",
    ),
    "an unknown reward": (
        {"validation": [{"name": "v", "texts": ["a red car"], "rewards": ["brihgt"]}]},
        "prompts.validation.0.rewards: unknown name 'brihgt'. Did you mean 'bright'?",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_validation_prompts_that_cannot_judge_are_refused(tiny_sd3: Path, tmp_path: Path, case: str) -> None:
    changes, says = REFUSED[case]
    config = write_config(tmp_path / "config.yaml", tiny_sd3, prompts=prompts(tiny_sd3, **changes))
    outcome = marble("config", "check", config)
    assert outcome.code == 2
    assert says in outcome.err


def test_generated_validation_prompts_leave_out_the_held_out_ones(tiny_sd3: Path, tmp_path: Path) -> None:
    """Both are of the held-out fifth, and from one seed: without a word they would be the same."""
    made = {"type": "ocr", "count": 12}
    rewards = [{"name": "bright", "type": "brightness"}]
    splits = {split: [{"name": "texts", "generate": made}] for split in ("heldout", "validation")}
    config = write_config(tmp_path / "config.yaml", tiny_sd3, prompts=prompts(tiny_sd3, **splits), rewards=rewards)
    outcome = marble("config", "check", config)
    assert outcome.code == 0, outcome.err
