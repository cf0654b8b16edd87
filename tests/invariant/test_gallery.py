"""The pictures of an evaluation, what the report makes of them, and samples of prompt files."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from marble_rl.rewards.core.base import FunctionReward, NotedScore, RewardBatch, Traits
from marble_rl.rewards.core.calls import CalledReward
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.runs.scores import ImageScores, KeptPicture, Scores, WeightsScores
from marble_rl.types import Prompt
from runs import marble, start, train, write_config

PROMPTS = [f"a {colour} {thing}" for colour in ("red", "blue", "green") for thing in ("cup", "hat", "kite")]
TEXT = ['a sign that says "K7"', 'a card with the word "OPEN"']


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return file


def evaluate(run: Path, *arguments: object) -> dict[str, Any]:
    outcome = marble("evaluate", run, *arguments)
    assert outcome.code == 0, outcome.err
    scores: dict[str, Any] = json.loads((run / "evaluation" / "scores.json").read_text())
    return scores


def report(run: Path) -> str:
    outcome = marble("report", run)
    assert outcome.code == 0, outcome.err
    return (run / "report.html").read_text()


def cards(html: str) -> list[dict[str, Any]]:
    found = re.search(r'id="gallery-data">(.*?)</script>', html, re.DOTALL)
    assert found
    shown: list[dict[str, Any]] = json.loads(found[1])["cards"]
    return shown


def picture_files(scores: dict[str, Any]) -> set[str]:
    return {file for picture in scores["pictures"] for file in picture["files"].values()}


def test_a_gallery_shows_every_prompt_that_was_evaluated(run: Path, prompts: Path) -> None:
    few = evaluate(run, "--prompts", prompts)
    assert len(few["pictures"]) == 4
    html = report(run)
    assert len(cards(html)) == 4
    assert f"4 of 9 prompts are shown. <code>marble evaluate {run} --save-images</code>" in html

    scores = evaluate(run, "--prompts", prompts, "--images", 2, "--save-images")
    assert [picture["row"] for picture in scores["pictures"]] == list(range(0, 18, 2))
    html = report(run)
    assert "--save-images" not in html
    shown = cards(html)
    assert [card["prompt"] for card in shown] == PROMPTS
    for card, picture in zip(shown, scores["pictures"], strict=True):
        assert [shot["label"] for shot in card["pictures"]] == ["base", "ema"]
        for shot in card["pictures"]:
            known = scores["weights"][shot["label"]]["images"][picture["row"]]["scores"]
            assert shot["scores"] == pytest.approx({k: v for k, v in known.items() if v is not None}, rel=1e-4)
            assert f"images/{shot['image']['file']}" == picture["files"][shot["label"]]


def test_pictures_belong_to_the_scores_that_list_them(run: Path) -> None:
    """An evaluation that ends before its scores are written leaves those of the one before, with their pictures."""
    first = evaluate(run, "--save-images")
    folder = run / "evaluation"
    before = {file: (folder / file).read_bytes() for file in picture_files(first)}
    (folder / ".scores.json.partial").mkdir()
    outcome = marble("evaluate", run, "--save-images", "--seed", 5)
    assert outcome.code == 3
    assert outcome.err.strip().endswith("evaluate again")
    assert len(list((folder / "images").iterdir())) == 2 * len(before)
    assert json.loads((folder / "scores.json").read_text()) == first
    assert {file: (folder / file).read_bytes() for file in before} == before

    (folder / ".scores.json.partial").rmdir()
    last = evaluate(run, "--save-images", "--seed", 6)
    assert {f"images/{file.name}" for file in (folder / "images").iterdir()} == picture_files(last)
    assert not picture_files(last) & picture_files(first)
    assert {shot["image"]["file"] for card in cards(report(run)) for shot in card["pictures"]} == {
        Path(file).name for file in picture_files(last)
    }


@pytest.mark.full
def test_what_was_read_in_a_picture_is_shown_beside_it(tiny_sd3: Path, tmp_path: Path) -> None:
    sources = [{"name": "signs", "texts": TEXT}, {"name": "plain", "texts": ["a cup", "a hat"]}]
    rewards = [{"name": "bright", "type": "brightness"}, {"name": "reader", "type": "ocr", "held_out": True}]
    config = write_config(tmp_path / "c.yaml", tiny_sd3, rewards=rewards, prompts={"train": sources})
    train(config, tmp_path / "run", "--set", "trainer.steps=1")
    evaluate(tmp_path / "run", "--save-images")
    for card in cards(report(tmp_path / "run")):
        for shot in card["pictures"]:
            if card["source"] == "signs":
                assert re.fullmatch(r'read ("(.|\n)+"|no text)', shot["notes"]["reader"])
            else:
                assert shot["notes"] == {}


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_reward_may_note_what_its_score_rests_on(higher_is_better: bool) -> None:
    def noted(images: list[np.ndarray], prompts: list[str]) -> list[float | None]:
        return [NotedScore(0.5, "half of it"), 2.0, None]

    noted.traits = Traits(higher_is_better=higher_is_better)  # type: ignore[attr-defined]
    reward = CalledReward(RewardConfig(type="brightness", name="n"), FunctionReward(noted))
    batch = RewardBatch(np.zeros((3, 8, 8, 3), np.uint8), [Prompt(i, "x", "s") for i in range(3)])
    half, two, none = reward.score(batch)
    sign = 1 if higher_is_better else -1
    assert (half, two, none) == (sign * 0.5, sign * 2.0, None)
    assert isinstance(half, NotedScore)
    assert half.note == "half of it"
    assert not isinstance(two, NotedScore)


def test_a_headline_says_which_step_its_scores_are_of(run: Path) -> None:
    def headline() -> str:
        return report(run).split("<header>")[1].split("</header>")[0]

    evaluate(run, "--step", 6, "--save-images")
    stale = headline()
    assert "Scores of step 6: ema against base. The run went on to step 8. Evaluate again:" in stale
    assert f"<code>marble evaluate {run} --save-images</code>" in stale
    shutil.rmtree(run / "checkpoints" / "step-8")
    assert "There is no later checkpoint yet." in headline()


def test_a_headline_of_the_last_step_says_no_more_than_that(run: Path) -> None:
    evaluate(run)
    html = report(run).split("<header>")[1].split("</header>")[0]
    assert "Scores of step 8: ema against base." in html
    assert "went on" not in html


def test_one_image_of_one_prompt_is_counted_as_one(run: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a cup")
    outcome = marble("evaluate", run, "--prompts", tmp_path / "one.txt")
    assert "1 prompt x 1 image\n" in re.sub(" +\n", "\n", outcome.out)
    assert "evaluating ema: 100 % of 1 image\n" in outcome.err
    assert "1 prompt, 1 image for each of the weights" in report(run)


def thumbnails(folder: Path, prompts: int) -> Scores:
    """Pictures with more detail than photos have, before and after, and their scores."""
    (folder / "images").mkdir(parents=True)
    dice = np.random.default_rng(0)
    drawn = []
    for _ in range(16):
        coarse = Image.fromarray(dice.integers(0, 256, (48, 48, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(buffer, "WEBP", quality=90)
        drawn.append(buffer.getvalue())
    pictures, images = [], []
    for row in range(prompts):
        files = {name: f"images/{row}-{name}-0.webp" for name in ("base", "ema")}
        for file in files.values():
            (folder / file).write_bytes(drawn[row % len(drawn)])
        pictures.append(KeptPicture(row, files))
        images.append(ImageScores("word " * 12 + str(row), "s", row, 0, dict.fromkeys("abcdefg", 0.1)))
    weights = WeightsScores(dict.fromkeys("abcdefg", 0.1), images)
    return Scores(
        step=8,
        held_out_rewards=[],
        differences={},
        pictures=pictures,
        weights={"base": weights, "ema": weights},
    )


@pytest.mark.full
def test_a_page_with_a_thousand_prompts_stays_below_ten_megabytes(run: Path) -> None:
    thumbnails(run / "evaluation", 1000).write(run / "evaluation" / "scores.json")
    html = report(run)
    assert len(html.encode()) < 10_000_000
    shown = cards(html)
    assert len(shown) == 1000
    assert all(len(card["pictures"]) == 2 for card in shown)
    assert min(shot["image"]["width"] for card in shown for shot in card["pictures"]) >= 48


def test_pictures_that_are_gone_are_counted_and_not_listed_one_by_one(run: Path) -> None:
    evaluate(run, "--save-images")
    shutil.rmtree(run / "evaluation" / "images")
    html = report(run)
    assert html.count("could not be shown: ") == 3
    assert "11 more pictures could not be shown." in html
    assert "No picture of this evaluation could be shown." in html


def pixels(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def test_prompts_of_a_file_under_several_weights_and_their_grid(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a kite\na drum\n")
    both = ("--prompts", tmp_path / "prompts.txt", "--weights", "base", "--weights", "ema", "--steps", 2, "--seed", 4)
    outcome = marble("sample", run, *both, "--grid", "--out", tmp_path / "both")
    assert outcome.code == 0, outcome.err
    names = [f"{number}-{weights}-seed-4.png" for weights in ("base", "ema") for number in ("001", "002")]
    assert outcome.out.split() == [str(tmp_path / "both" / name) for name in (*names, "grid.png")]
    single = ("--prompt", "a drum", "--weights", "ema", "--steps", 2, "--seed", 4)
    assert marble("sample", run, *single, "--out", tmp_path / "single").code == 0
    alone, of_file, base = (
        pixels(tmp_path / file) for file in ("single/seed-4.png", "both/002-ema-seed-4.png", "both/002-base-seed-4.png")
    )
    assert np.array_equal(alone, of_file)
    assert not np.array_equal(of_file, base)
    # Rows are prompts and columns weights: the last picture is that of the last prompt under the last weights.
    grid = pixels(tmp_path / "both" / "grid.png")
    enlarged = np.asarray(Image.fromarray(of_file).resize((128, 128), Image.Resampling.BICUBIC))
    places = [
        (top, left)
        for top in range(grid.shape[0] - 128)
        for left in range(grid.shape[1] - 128)
        if (grid[top, left : left + 128] == enlarged[0]).all()
    ]
    ((top, left),) = places
    assert top > grid.shape[0] / 2
    assert left > grid.shape[1] / 2


def test_several_images_of_a_prompt_are_rows_of_the_grid(run: Path, tmp_path: Path) -> None:
    given = ("sample", run, "--prompt", "a kite", "--steps", 2, "--grid")
    sizes = []
    for images in (1, 3):
        outcome = marble(*given, "--images", images, "--out", tmp_path / str(images))
        assert outcome.code == 0, outcome.err
        files = [f"seed-{i}.png" for i in range(images)]
        assert outcome.out.split() == [str(tmp_path / str(images) / file) for file in (*files, "grid.png")]
        sizes.append(pixels(tmp_path / str(images) / "grid.png").shape)
    assert sizes[1] == (3 * sizes[0][0], *sizes[0][1:])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "neither given; give one of them, --prompt TEXT or --prompts FILE"),
        (("--prompt", "x", "--prompts", "p.txt"), "both given; give one of them, --prompt TEXT or --prompts FILE"),
        (("--prompts", "nowhere.txt"), "prompt file not found"),
        (("--prompt", "x", "--weights", "ema", "--weights", "best"), "'best' is not among the weights"),
    ],
)
def test_what_is_wrong_with_the_prompts_is_said_before_a_model_is_loaded(
    finished_run: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    outcome = marble("sample", finished_run, *arguments, "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "--prompt" in outcome.err or "--weights" in outcome.err
    assert says in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_watching_waits_for_a_run_that_is_not_there_yet(run: Path, tmp_path: Path) -> None:
    for comes in (True, False):
        folder = tmp_path / f"later-{comes}"
        process = start("report", folder, "--watch")
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said == f"waiting for {folder}: nothing to report on there yet; Ctrl-C ends\n"
            if comes:
                folder.mkdir()
                time.sleep(3)  # a run that is about to start: its folder is empty
                shutil.copytree(run, folder, dirs_exist_ok=True)
                assert process.stdout.readline() == f"wrote {folder / 'report.html'}; Ctrl-C ends\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
            assert (folder / "report.html").exists() is comes
        finally:
            process.kill()
            process.communicate()
