"""Videos through the command line, by a tiny Wan: everything that shows or saves pictures plays them."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from built_once import built_once
from clips import ball
from events import Shown
from marble_rl.runs.media import encoded, opened_frames
from marble_rl.runs.scores import ImageScores, KeptPicture, Scores, WeightsScores
from runs import marble, train
from tools.tiny import BUILDERS

FRAMES, FPS = 5, 10
REWARDS = [
    {"name": "prompt", "type": "frames", "params": {"reward": {"type": "brightness"}, "frames": 2}},
    {"name": "moves", "type": "motion", "params": {"target": 0.01}},
]


def settings(model: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "text_length": 8},
        "lora": {"rank": 2, "alpha": 4},
        "prompts": {"train": [{"name": "moving", "texts": ["a dog runs", "waves roll"]}]},
        "rewards": REWARDS,
        "rollout": {"groups": 2, "group_size": 2, "steps": 2, "height": 16, "width": 16, "frames": FRAMES},
        "loss": {"timesteps_per_sample": 1},
        "balance": {"type": "marble", "refresh_every": 2},
        "trainer": {"steps": 2, "micro_batch": 4},
        "evaluation": {"steps": 2},
        "logging": {"fps": FPS, "trackers": ["tensorboard"]},
    }


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan, and a run of it that was evaluated."""

    def build(folder: Path) -> None:
        BUILDERS["wan"](folder / "model")
        (folder / "config.yaml").write_text(yaml.safe_dump(settings(folder / "model")))
        train(folder / "config.yaml", folder / "run")
        evaluated = marble("evaluate", folder / "run")
        assert evaluated.code == 0, evaluated.err

    return built_once(tmp_path_factory, "tiny-wan-run", build)


def played(file: Path | bytes) -> tuple[int, int, tuple[int, int]]:
    """Number of frames, frames per second, size."""
    with Image.open(file if isinstance(file, Path) else io.BytesIO(file)) as image:
        frames, fps = opened_frames(image)
        return len(frames), fps, image.size


def gallery(html: str) -> list[dict[str, Any]]:
    found = re.search(r'id="gallery-data">(.*?)</script>', html, re.DOTALL)
    assert found
    cards: list[dict[str, Any]] = json.loads(found[1])["cards"]
    return cards


@pytest.mark.full
def test_samples_evaluation_and_tracker_play(built: Path) -> None:
    run = built / "run"
    assert sorted(file.name for file in (run / "samples").iterdir()) == ["step-0.webp", "step-1.webp"]
    for file in (run / "samples" / "step-0.webp", run / "evaluation" / "grid.webp"):
        assert played(file)[:2] == (FRAMES, FPS)
    scores = Scores.read(run / "evaluation" / "scores.json")
    files = [file for picture in scores.pictures for file in picture.files.values()]
    assert [played(run / "evaluation" / file) for file in files] == [(FRAMES, FPS, (16, 16))] * 4
    assert [played(data)[:2] for _, data in Shown(run / "tensorboard").files()] == [(FRAMES, FPS)] * 2


@pytest.mark.full
def test_a_report_and_an_export_play(built: Path, tmp_path: Path) -> None:
    assert marble("report", built / "run", "--out", tmp_path / "report.html").code == 0
    html = (tmp_path / "report.html").read_text()
    shots = [shot["image"] for card in gallery(html) for shot in card["pictures"]]
    assert len(shots) == 4
    assert all(shot["video"].startswith("data:image/webp;base64,") for shot in shots)
    assert html.count(" data-video=") == 2 * 2, "two steps, a row for each prompt"
    assert "the first video of each prompt" in html

    exported = marble("export", built / "run", "--out", tmp_path / "lora")
    assert exported.code == 0, exported.err
    assert "](grid.webp)" in (tmp_path / "lora" / "README.md").read_text()
    assert played(tmp_path / "lora" / "grid.webp")[:2] == (FRAMES, FPS)


@pytest.mark.full
def test_a_sample_is_written_as_the_file_that_is_asked_for(built: Path, tmp_path: Path) -> None:
    import av

    def sample(out: Path, *arguments: object) -> list[str]:
        outcome = marble("sample", built / "run", "--prompt", "a dog runs", "--out", out, *arguments)
        assert outcome.code == 0, outcome.err
        return outcome.out.split()

    for name in ("clip.webp", "clip.gif"):
        assert sample(tmp_path / name) == [str(tmp_path / name)]
        assert played(tmp_path / name) == (FRAMES, FPS, (16, 16))
    assert sample(tmp_path / "clip.gif", "--fps", 4) == [str(tmp_path / "clip-2.gif")]
    assert played(tmp_path / "clip-2.gif")[1] == 4
    assert sample(tmp_path / "new" / "clip.MP4") == [str(tmp_path / "new" / "clip.MP4")]
    with av.open(str(tmp_path / "new" / "clip.MP4")) as file:
        assert (len(list(file.decode(video=0))), file.streams[0].average_rate) == (FRAMES, FPS)
    names = sample(tmp_path / "folder.v2", "--weights", "base", "--weights", "ema", "--grid")
    assert names == [
        str(tmp_path / "folder.v2" / name) for name in ("base-seed-0.webp", "ema-seed-0.webp", "grid.webp")
    ]
    assert played(tmp_path / "folder.v2" / "grid.webp")[:2] == (FRAMES, FPS)


@pytest.mark.full
def test_people_rate_videos_of_one_format_and_rate(built: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a dog runs\nwaves roll\n")
    (tmp_path / "drawn").mkdir()
    for i in range(2):
        (tmp_path / "drawn" / f"{i}.gif").write_bytes(encoded(ball(), ".gif", 20))
    models = [f"tuned={built / 'run'}", f"drawn={tmp_path / 'drawn'}"]
    study = tmp_path / "study"
    outcome = marble("rate", "prepare", *models, "--prompts", tmp_path / "prompts.txt", "--out", study)
    assert outcome.code == 0, outcome.err
    assert [played(file)[:2] for file in sorted((study / "pictures" / "tuned").iterdir())] == [(FRAMES, FPS)] * 2
    assert [played(file)[:2] for file in sorted((study / "pictures" / "drawn").iterdir())] == [(13, FPS)] * 2


@pytest.mark.full
def test_compare_and_diagnose(built: Path, tmp_path: Path) -> None:
    methods = ("--methods", "base,weighted_sum", "--seeds", "0")
    compared = marble("compare", built / "config.yaml", *methods, "--out", tmp_path / "both")
    assert compared.code == 0, compared.err
    assert marble("report", tmp_path / "both").code == 0
    page = (tmp_path / "both" / "report.html").read_text()
    assert page.count(" data-video=") == 2 * 2
    assert "Videos play under the pointer or the focus." in page

    run = Path(shutil.copytree(built / "run", tmp_path / "run"))
    diagnosed = marble("diagnose", run, "--batches", 3, "--json")
    assert diagnosed.code == 0, diagnosed.err
    assert json.loads(diagnosed.out)["names"] == ["prompt", "moves"]


@pytest.mark.parametrize(
    ("out", "arguments", "says"),
    [
        ("clip.mp4", (), "ends in .mp4, but {model} makes images; give a name that ends in .jpeg or .jpg or .png or"),
        ("picture.bmp", (), "ends in .bmp, but {model} makes images; give a name that ends in"),
        ("picture.png", ("--images", 2), "is one file, but 2 are asked for; give a folder"),
        ("picture.png", ("--grid",), "is one file, but 2 are asked for; give a folder"),
    ],
)
def test_a_file_that_does_not_suit_is_refused_before_a_model_is_loaded(
    out: str, arguments: tuple[object, ...], says: str, tiny_sd3: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_sd3, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    outcome = marble("sample", model, "--prompt", "a cup", "--out", tmp_path / out, *arguments)
    assert outcome.code == 2
    assert f"--out: {str(tmp_path / out)!r} {says.format(model=model)}" in outcome.err


def test_a_picture_is_no_file_for_a_video(tmp_path: Path) -> None:
    (tmp_path / "wan").mkdir()
    (tmp_path / "wan" / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    outcome = marble("sample", tmp_path / "wan", "--prompt", "a dog runs", "--out", tmp_path / "clip.jpg")
    assert outcome.code == 2
    assert f"but {tmp_path / 'wan'} makes videos; give a name that ends in .gif or .mp4 or .webp" in outcome.err


def test_images_as_the_file_that_is_asked_for(tiny_sd3: Path, tmp_path: Path) -> None:
    for name, kind in (("a.png", "PNG"), ("a.jpg", "JPEG"), ("a.webp", "WEBP")):
        outcome = marble("sample", tiny_sd3, "--prompt", "a cup", "--steps", 1, "--out", tmp_path / name)
        assert outcome.code == 0, outcome.err
        with Image.open(tmp_path / name) as image:
            assert image.format == kind


def clips_run(finished: Path, folder: Path, prompts: int = 12) -> Path:
    """A run whose evaluation kept pairs of 64x64x13 videos."""
    run = Path(shutil.copytree(finished, folder / "run"))
    images = run / "evaluation" / "images"
    images.mkdir(parents=True)
    pictures, scores = [], []
    for row in range(prompts):
        files = {name: f"images/{row}-{name}-0.webp" for name in ("base", "ema")}
        for i, file in enumerate(files.values()):
            (run / "evaluation" / file).write_bytes(encoded(ball(seed=2 * row + i), ".webp"))
        pictures.append(KeptPicture(row, files))
        scores.append(ImageScores(f"ball {row}", "balls", row, 0, {"small": 0.1 * row, "bright": 0.5, "colour": None}))
    weights = WeightsScores({"small": 0.5, "bright": 0.5}, scores)
    Scores(
        step=8,
        held_out_rewards=[],
        differences={},
        pictures=pictures,
        weights={"base": weights, "ema": weights},
        made_with={},
    ).write(run / "evaluation" / "scores.json")
    return run


def test_a_report_of_twelve_pairs_of_clips_stays_small(finished_run: Path, tmp_path: Path) -> None:
    run = clips_run(finished_run, tmp_path)
    assert marble("report", run).code == 0
    html = (run / "report.html").read_text()
    shots = [shot["image"] for card in gallery(html) for shot in card["pictures"]]
    assert len(shots) == 24
    assert all(shot["address"] and shot["video"] for shot in shots)
    assert len(html.encode()) < 3_000_000


@pytest.mark.full
def test_videos_play_under_the_pointer_or_the_focus(finished_run: Path, tmp_path: Path) -> None:
    """Screenshots: build/report-screenshots/."""
    from browser import Browser

    run = clips_run(finished_run, tmp_path)
    assert marble("report", run).code == 0
    screenshots = Path(__file__).parents[2] / "build" / "report-screenshots"
    with Browser(tmp_path / "profile") as page:
        page.show(run / "report.html", width=1280)
        plays = "card.querySelector('[data-playing]') ? [i] : []"
        playing = f"[...document.querySelectorAll('#cards .card')].flatMap((card, i) => {plays})"
        assert page.run(playing) == []
        page.mouse("mouseMoved", page.centre("#cards .card", 1))
        assert page.run(playing) == [1]
        page.screenshot(screenshots / "videos.png")
        page.mouse("mouseMoved", page.centre("#cards .card", 2))
        assert page.run(playing) == [2]
        page.mouse("mouseMoved", (1, 1))
        assert page.run(playing) == []
        page.run("document.querySelectorAll('#cards .card')[3].focus()")
        assert page.run(playing) == [3]
        page.press("Enter")
        shown = "document.querySelectorAll('#zoom [data-playing]').length"
        assert page.run(shown) == 2
        page.click("#zoom [data-player]")
        assert page.run(shown) == 0
        page.press("Escape")

        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
        page.run("document.activeElement.blur()")
        page.mouse("mouseMoved", page.centre("#cards .card", 1))
        assert page.run(playing) == []
        page.click("#cards .card", 1)
        assert page.run(shown) == 0
        page.click("#zoom [data-player]")
        assert page.run(shown) == 2
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
