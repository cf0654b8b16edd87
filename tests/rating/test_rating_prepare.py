"""`marble rate prepare`: pictures that can be made again, kept when it is called twice, and mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ratings import NAMES
from runs import marble


def bytes_of(study: Path) -> dict[str, bytes]:
    return {str(file.relative_to(study)): file.read_bytes() for file in (study / "pictures").rglob("*.*")}


def again(prepared: Path, study: Path, *options: object, run: Path, model: Path) -> tuple[int, str]:
    targets = [f"tuned={run}", f"base={model}", f"inverted={prepared / 'drawn'}"]
    done = marble("rate", "prepare", *targets, "--prompts", prepared / "prompts.txt", "--out", study, *options)
    return done.code, done.err


def test_pictures_are_those_of_marble_sample(study: Path, finished_run: Path, tmp_path: Path) -> None:
    """Prompt 3 starts from seed 0 + 3; a run is sampled with its EMA weights."""
    done = marble(*("sample", finished_run, "--prompt", "a cup, number 4", "--seed", 3, "--out", tmp_path / "samples"))
    assert done.code == 0, done.err
    picture = (study / "pictures" / "tuned" / "0003-0.png").read_bytes()
    assert picture == (tmp_path / "samples" / "seed-3.png").read_bytes()


def test_the_base_model_is_sampled_as_the_run_samples_it(study: Path, finished_run: Path, tmp_path: Path) -> None:
    """The run's prompts have 16 tokens; the pipeline alone would take more."""
    done = marble(
        *("sample", finished_run, "--weights", "base", "--prompt", "a cup, number 1", "--out", tmp_path / "samples")
    )
    assert done.code == 0, done.err
    picture = (study / "pictures" / "base" / "0000-0.png").read_bytes()
    assert picture == (tmp_path / "samples" / "seed-0.png").read_bytes()


def test_a_second_call_makes_what_is_missing(prepared: Path, study: Path, finished_run: Path, tiny_sd3: Path) -> None:
    before = bytes_of(study)
    assert len(before) == 12
    (study / "pictures" / "tuned" / "0002-0.png").unlink()
    kept = (study / "pictures" / "tuned" / "0001-0.png").stat().st_mtime_ns
    assert "1 of 12 pictures are missing" in marble("rate", "serve", study).err
    assert again(prepared, study, run=finished_run, model=tiny_sd3)[0] == 0
    assert bytes_of(study) == before
    assert (study / "pictures" / "tuned" / "0001-0.png").stat().st_mtime_ns == kept


@pytest.mark.parametrize(
    ("option", "key"), [(("--ask", "pairs"), "ask"), (("--seed", 1), "sampling"), (("--images", 2), "images")]
)
def test_another_study_does_not_go_into_the_folder(
    prepared: Path, study: Path, finished_run: Path, tiny_sd3: Path, option: tuple[object, ...], key: str
) -> None:
    before = bytes_of(study)
    code, err = again(prepared, study, *option, run=finished_run, model=tiny_sd3)
    assert code == 2
    assert f"holds a study with other {key}" in err
    assert bytes_of(study) == before


def test_a_run_that_went_on_is_sampled_where_the_study_began(
    prepared: Path, study: Path, finished_run: Path, tiny_sd3: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    plan = json.loads((study / "study.json").read_text())
    plan["models"][0] |= {"target": str(run), "step": 6}
    (study / "study.json").write_text(json.dumps(plan))
    missing = study / "pictures" / "tuned" / "0000-0.png"
    newest = missing.read_bytes()
    missing.unlink()
    assert again(prepared, study, run=run, model=tiny_sd3)[0] == 0
    assert missing.read_bytes() != newest
    assert json.loads((study / "study.json").read_text())["models"][0]["step"] == 6
    missing.unlink()
    shutil.rmtree(run / "checkpoints" / "step-6")
    code, err = again(prepared, study, run=run, model=tiny_sd3)
    assert code == 2
    assert "its checkpoint of step 6, which is gone" in err


def test_pictures_of_a_folder_are_taken_by_number_and_lose_their_metadata(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(11)))
    for name, tone in (("a", 0), ("b", 100)):
        (tmp_path / name).mkdir()
        for i in range(11):
            chunk = PngInfo()
            chunk.add_text("parameters", f"made by {name}")
            Image.new("RGB", (8, 8), (tone, i, 0)).save(tmp_path / name / f"img_{i}.png", pnginfo=chunk)
    done = marble(
        *("rate", "prepare", tmp_path / "a", tmp_path / "b", "--prompts", tmp_path / "prompts.txt"),
        *("--out", tmp_path / "study"),
    )
    assert done.code == 0, done.err
    for name, tone in (("a", 0), ("b", 100)):
        for i in range(11):
            file = tmp_path / "study" / "pictures" / name / f"{i:04}-0.png"
            assert b"made by" not in file.read_bytes()
            with Image.open(file) as picture:
                assert picture.getpixel((0, 0)) == (tone, i, 0)


def test_a_video_stays_one_and_is_not_mixed_with_pictures(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a kite\n")
    frames = [Image.new("RGB", (8, 8), (40 * i, 0, 0)) for i in range(3)]
    for name in ("a", "b", "still"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        frames[0].save(tmp_path / name / "0.webp", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "still" / "0.webp")
    options = ("--prompts", tmp_path / "prompts.txt", "--out")
    assert marble("rate", "prepare", tmp_path / "a", tmp_path / "b", *options, tmp_path / "videos").code == 0
    with Image.open(tmp_path / "videos" / "pictures" / "a" / "0000-0.webp") as video:
        assert video.n_frames == 3
    mixed = marble("rate", "prepare", tmp_path / "a", tmp_path / "still", *options, tmp_path / "mixed")
    assert mixed.code == 2
    assert "some models have pictures and others videos" in mixed.err


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["{run}"], "1 given; a rating compares two or more"),
        (["{run}", "{run}"], "have the same name"),
        (["a/b=mini", "mini"], "the name 'a/b' may have letters, digits"),
        (["mini", "no/such/folder"], "no such folder: no/such/folder"),
        (["mini", "{drawn}", "{empty}"], "is not a diffusers pipeline"),
        (["base=mini", "{three}"], "3 pictures, but 4 prompts with 1 each need 4"),
        (["base=mini", "{text}"], "is not a picture that can be read"),
        (["mini", "{run}/lora"], "does not name its base model; give --model"),
        (["mini", "{run}", "--model", "mini"], "--model: 'mini' given, but no target is a LoRA"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(
    prepared: Path, finished_run: Path, tmp_path: Path, targets: list[str], said: str
) -> None:
    for name, pictures in {"empty": 0, "three": 3, "text": 4}.items():
        (tmp_path / name).mkdir()
        for i in range(pictures):
            shutil.copy(prepared / "drawn" / f"{i}.png", tmp_path / name / f"{i}.png")
    (tmp_path / "text" / "2.png").write_text("not a picture")
    places = {name: tmp_path / name for name in ("empty", "three", "text")}
    given = [target.format(run=finished_run, drawn=prepared / "drawn", **places) for target in targets]
    done = marble("rate", "prepare", *given, "--prompts", prepared / "prompts.txt", "--out", tmp_path / "out")
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_not_taken(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    given = [f"{name}={prepared / 'drawn'}" for name in NAMES[:2]]
    done = marble("rate", "prepare", *given, "--prompts", prepared / "prompts.txt", "--out", tmp_path)
    assert done.code == 2
    assert "is not empty and not a rating study" in done.err
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
