"""`marble compare A B` and `marble report A B`: runs that exist, with what can and cannot be said of them."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from built_once import built_once
from marble_rl.runs.scores import Scores
from runs import marble

ONE_EACH = "one run each: the intervals are over prompts and say nothing about another seed"


@pytest.fixture(scope="module")
def pair(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two evaluated runs, `one` and `two`: the second has another learning rate, and is the checkpoint of step 6."""

    def build(folder: Path) -> None:
        for name, given in (("one", []), ("two", ["--step", 6])):
            run = Path(shutil.copytree(finished_run, folder / name))
            outcome = marble("evaluate", run, "--images", 2, *given)
            assert outcome.code == 0, outcome.err
        edit(folder / "two" / "config.json", lambda config: config["optimizer"].update(lr=0.5))

    return built_once(tmp_path_factory, "evaluated-pair", build)


@pytest.fixture
def copy(pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair, tmp_path / "pair", ignore=shutil.ignore_patterns("checkpoints", "lora")))


def edit(file: Path, change: Callable[[Any], object]) -> None:
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def compared(*folders: Path) -> dict[str, Any]:
    outcome = marble("compare", *folders, "--json")
    assert outcome.code == 0, outcome.err
    tree: dict[str, Any] = json.loads(outcome.out)
    return tree


def per_prompt(run: Path, reward: str) -> dict[str, float]:
    scores = Scores.read(run / "evaluation" / "scores.json")
    by_prompt: dict[str, list[float]] = {}
    for image in scores.weights["ema"].images:
        if (score := image.scores[reward]) is not None:
            by_prompt.setdefault(image.prompt, []).append(score)
    return {prompt: statistics.fmean(values) for prompt, values in by_prompt.items()}


def test_differences_are_those_of_the_same_prompts(pair: Path) -> None:
    tree = compared(pair / "one", pair / "two")
    (difference,) = tree["differences"]
    assert (difference["run"], difference["prompts"], difference["same_noise"]) == ("two", 7, True)
    for reward, found in difference["by_reward"].items():
        one, two = per_prompt(pair / "one", reward), per_prompt(pair / "two", reward)
        assert one.keys() == two.keys()
        changes = [two[prompt] - one[prompt] for prompt in one]
        assert found["mean"] == pytest.approx(statistics.fmean(changes), abs=1e-9)
        assert min(changes) - 1e-9 <= found["low"] <= found["mean"] <= found["high"] <= max(changes) + 1e-9
        assert found["over"] == "prompts"
    assert set(difference["by_reward"]) == {"small", "bright", "colour"}
    assert [run["step"] for run in tree["runs"]] == [8, 6]


def test_only_settings_that_differ_are_shown(pair: Path) -> None:
    tree = compared(pair / "one", pair / "two")
    assert tree["settings"] == [{"key": "optimizer.lr", "one": "0.01", "two": "0.5"}]


def test_rewards_and_sources_are_compared_by_name(copy: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["rewards"].pop(0)
        config["prompts"]["train"][1]["share"] = 3.0

    edit(copy / "two" / "config.json", change)
    keys = [row["key"] for row in compared(copy / "one", copy / "two")["settings"]]
    assert keys == ["prompts.train.colours.share", "rewards.small", "optimizer.lr"]


def test_the_table_says_what_it_rests_on(pair: Path) -> None:
    outcome = marble("compare", pair / "one", pair / "two")
    assert outcome.code == 0, outcome.err
    for words in (
        ONE_EACH,
        "two against one: paired by prompt, 7 prompts that both have; the same noise",
        "ema, step 8",
        "ema, step 6",
        "minus one",
        "optimizer.lr",
        f"marble report {pair / 'one'} {pair / 'two'}",
    ):
        assert words in " ".join(outcome.out.split()), words
    assert "▲" not in outcome.out


def with_seed(scores: dict[str, Any]) -> None:
    scores["made_with"]["seed"] = 5


def without_settings(scores: dict[str, Any]) -> None:
    del scores["made_with"]


def other_prompts(scores: dict[str, Any]) -> None:
    for of in scores["weights"].values():
        for image in of["images"]:
            image["prompt"] += " at night"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_seed, "other noise or sampling settings, which adds to the differences"),
        (without_settings, "it is not known whether the noise was the same"),
        (other_prompts, "evaluated on other prompts, so there is no difference to show"),
    ],
)
def test_evaluations_that_differ_say_so(copy: Path, change: Callable[[Any], object], says: str) -> None:
    edit(copy / "two" / "evaluation" / "scores.json", change)
    (_, note) = compared(copy / "one", copy / "two")["notes"]
    assert note.startswith("two against one: ")
    assert says in note


def test_one_prompt_in_common_has_no_interval_and_no_word(copy: Path) -> None:
    def change(scores: dict[str, Any]) -> None:
        for of in scores["weights"].values():
            for image in of["images"][2:]:
                image["prompt"] += " at night"

    edit(copy / "two" / "evaluation" / "scores.json", change)
    (difference,) = compared(copy / "one", copy / "two")["differences"]
    assert difference["prompts"] == 1
    assert {found["over"] for found in difference["by_reward"].values()} == {"nothing"}
    text = marble("compare", copy / "one", copy / "two").out
    assert "higher" not in text
    assert "lower" not in text
    assert "no interval: one prompt alone has scores" in text


def test_a_reward_that_is_scored_otherwise_has_no_difference(copy: Path) -> None:
    edit(copy / "two" / "config.json", lambda config: config["rewards"][1].update(type="colour"))
    tree = compared(copy / "one", copy / "two")
    assert set(tree["differences"][0]["by_reward"]) == {"small", "colour"}
    assert "two against one: no difference in bright, which the two score differently" in tree["notes"]


def test_a_run_without_scores_is_named_with_the_command(copy: Path) -> None:
    shutil.rmtree(copy / "two" / "evaluation")
    tree = compared(copy / "one", copy / "two")
    assert tree["differences"] == []
    assert f"two has no scores yet: marble evaluate {copy / 'two'}" in tree["notes"]
    assert tree["settings"]


def test_wrong_mixtures_are_refused(pair: Path, tmp_path: Path) -> None:
    one, two, config = pair / "one", pair / "two", pair.parent / "finished-run" / "config.yaml"
    (tmp_path / "study" / "jobs").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for given, says in [
        ((one,), "is a folder; give a config to train from, or a second run to compare it with"),
        ((tmp_path / "study",), "is a comparison; --table-only makes its table again"),
        ((one, config), f"{config} is a file; give one CONFIG to train from, or the folders of two or more runs"),
        ((one, tmp_path / "nowhere"), f"{tmp_path / 'nowhere'} is not there"),
        ((config, config), f"{config} is a file"),
        ((one, two, "--table-only"), "--table-only: makes the table of one comparison"),
        ((one, two, "--seeds", "0-4"), "--seeds: 2 folders of runs are compared as they are; leave it out"),
        ((one, two, "--set", "trainer.steps=3"), "--set: 2 folders of runs"),
        ((one, two, "--out", tmp_path / "out"), "--out: 2 folders of runs"),
        ((one, one), f"{one} is given twice"),
        ((one, tmp_path / "study"), "is a comparison, not a run; give some of its runs"),
        ((one, tmp_path / "other"), "is not a run folder: it has no config.json"),
    ]:
        outcome = marble("compare", *given)
        assert outcome.code == 2, given
        assert says in outcome.err, given
    watched = marble("report", one, two, "--watch")
    assert watched.code == 2
    assert "--watch: follows one run" in watched.err


def test_the_page_has_scores_curves_pictures_and_settings(pair: Path, tmp_path: Path) -> None:
    outcome = marble("report", pair / "one", pair / "two", "--out", tmp_path / "page.html")
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "page.html").read_text()
    for words in (
        "Two runs side by side",
        f"{ONE_EACH[0].upper()}{ONE_EACH[1:]}",
        "Is two better than one?",
        "One training of each: another seed may differ.",
        "? open",
        "The same by the time spent in steps",
        "<code>optimizer.lr</code>",
        "8 of 8 steps",
    ):
        assert words in page, words
    assert page.count('class="card"') == 7
    assert page.count("<figcaption>base</figcaption>") == 7
    assert page.count('role="img"') == 9  # of three rewards: scores, by step, by time
    assert "rollout.groups" not in page.split('id="settings"')[1]


def test_without_a_name_the_page_is_in_this_folder(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):  # nothing to draw: quick
        shutil.rmtree(copy / name / "evaluation")
        (copy / name / "metrics.jsonl").unlink()
    monkeypatch.chdir(tmp_path)
    outcome = marble("report", copy / "one", copy / "two")
    assert outcome.code == 0, outcome.err
    assert "wrote compared.html" in outcome.out
    assert "two has no scores yet" in (tmp_path / "compared.html").read_text()
