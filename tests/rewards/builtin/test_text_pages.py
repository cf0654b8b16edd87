"""Pages: text anywhere in a large picture, in any number of lines."""

from __future__ import annotations

import math
import random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from marble_rl.rewards.builtin.ocr import Ocr
from marble_rl.rewards.builtin.tesseract import Tesseract
from marble_rl.rewards.builtin.text_lines import reading_order
from marble_rl.rewards.builtin.text_rendering import Match, TextRenderingReward
from marble_rl.rewards.core.base import Images, RewardBatch
from marble_rl.types import Prompt
from tools.ocr_accuracy import drawn, main, measure, others, phrases

pytestmark = pytest.mark.full

CPU = torch.device("cpu")
Boxes = npt.NDArray[np.float64]


@pytest.fixture(scope="module", params=[Ocr, Tesseract])
def reader(request: pytest.FixtureRequest) -> TextRenderingReward:
    reward: TextRenderingReward = request.param()
    reward.load(CPU)
    return reward


@pytest.fixture(scope="module")
def ocr() -> Ocr:
    reward = Ocr()
    reward.load(CPU)
    return reward


def page(*texts: tuple[str, int, int], size: int = 40, side: tuple[int, int] = (512, 512)) -> Images:
    """One white picture with texts at their (x, y)."""
    canvas = Image.new("RGB", side, "white")
    draw = ImageDraw.Draw(canvas)
    for text, x, y in texts:
        draw.text((x, y), text, font=ImageFont.load_default(size), fill=(20, 20, 90))
    return np.asarray(canvas)[None]


def score(reward: TextRenderingReward, images: Images, wanted: str) -> float:
    (found,) = reward.score(RewardBatch(images, [Prompt(0, "a poster", "s", {"target": wanted})]))
    return found


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.full)])
def test_phrases_are_read_and_taken_for_no_other(reader: TextRenderingReward, count: int) -> None:
    found = measure(reader, count)
    assert found.right >= 0.9
    assert found.wrong < 0.2


def test_the_phrases_are_different_and_the_wrong_ones_are_wrong() -> None:
    texts = phrases(100)
    assert len({text.casefold() for text in texts}) == 100
    assert {len(text.split()) for text in texts} == {1, 2, 3, 4}
    assert any(any(c.isdigit() for c in text) for text in texts)
    assert not any(
        set(a.casefold().split()) & set(b.casefold().split()) for a, b in zip(texts, others(texts), strict=True)
    )
    assert texts == phrases(100) != phrases(100, seed=1)


def test_a_page_does_not_depend_on_the_batch(reader: TextRenderingReward) -> None:
    """Nor on its place there, and not where pictures without any text stand between."""
    images = drawn(phrases(6, seed=3), seed=3)
    images[[0, 3]] = 200
    together = reader.read(images)
    assert [bool(text) for text in together] == [False, True, True, False, True, True]
    assert together == [reader.read(image[None])[0] for image in images]
    assert together == reader.read(images[::-1])[::-1]


def test_lines_are_read_from_top_to_bottom_and_rows_from_left_to_right(ocr: Ocr) -> None:
    images = page(("north", 20, 60), ("ocean", 340, 64), ("quick", 330, 300), ("river", 30, 296), ("zebra", 190, 440))
    assert ocr.read(images) == ["north ocean river quick zebra"]


@pytest.mark.full
@pytest.mark.parametrize("side", [(1024, 1024), (1024, 512), (2304, 640), (640, 300), (128, 128)])
def test_pages_of_any_shape(ocr: Ocr, side: tuple[int, int]) -> None:
    images = page(("GARDEN 42", side[0] // 10, side[1] // 2), size=max(side[1] // 16, 18), side=side)
    assert ocr.read(images) == ["GARDEN 42"]


def test_small_letters_in_a_large_page_are_found(ocr: Ocr) -> None:
    assert ocr.read(page(("silver window", 700, 850), size=22, side=(1024, 1024))) == ["silver window"]


@pytest.mark.parametrize(("match", "low", "high"), [("auto", 1, 1), ("contained", 1, 1), ("whole", 0, 0.6)])
def test_other_text_in_the_picture(match: Match, low: float, high: float) -> None:
    reward = Ocr(match=match)
    reward.load(CPU)
    images = page(("GRAND OPENING", 60, 200), ("est 1987", 200, 420))
    assert low <= score(reward, images, "Grand Opening") <= high


def test_a_wrong_letter_costs_a_letter_also_beside_other_text(reader: TextRenderingReward) -> None:
    images = page(("GRAMD OPENING", 60, 200), ("est 1987", 200, 420))
    assert score(reader, images, "Grand Opening") == pytest.approx(11 / 12)


def test_beside_its_region_a_reader_sees_nothing() -> None:
    images = page(("GARDEN", 100, 80), ("TUNNEL", 100, 380))
    for region, text in (((0, 0, 1, 0.5), "GARDEN"), ((0, 0.5, 1, 1), "TUNNEL")):
        reward = Ocr(region=region)
        reward.load(CPU)
        assert reward.read(reward._cropped(images)) == [text]


def test_pages_without_text_score_0_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    reward = Ocr()
    reward.load(CPU)
    noise = np.random.default_rng(0).integers(0, 256, (1, 256, 256, 3), dtype=np.uint8)
    for images in (np.zeros_like(noise), np.full_like(noise, 255), noise):
        assert score(reward, images, "HOUSE") == 0
    assert capfd.readouterr() == ("", "")


def test_detection_runs_on_as_many_threads_as_torch(ocr: Ocr) -> None:
    options = ocr._lines._detector.text_det.session.session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (torch.get_num_threads(), 1)


def boxes(rows: list[list[tuple[float, float]]], height: float, tilt: float) -> Boxes:
    """Of rows given by each box's (left, width), 1.3 heights apart, turned by an angle."""
    upright = [
        [
            (x, 1.3 * height * y),
            (x + w, 1.3 * height * y),
            (x + w, 1.3 * height * y + height),
            (x, 1.3 * height * y + height),
        ]
        for y, row in enumerate(rows)
        for x, w in row
    ]
    turn = np.array([[math.cos(tilt), math.sin(tilt)], [-math.sin(tilt), math.cos(tilt)]])
    return np.array(upright) @ turn + 500


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(60, 300), min_size=1, max_size=4), min_size=1, max_size=5),
    st.floats(20, 60),
    st.floats(-0.4, 0.4),
    st.randoms(use_true_random=False),
)
def test_rows_are_kept_apart_in_tilted_text(
    widths: list[list[float]], height: float, tilt: float, dice: random.Random
) -> None:
    rows = [[(sum(row[:i]) + 10 * i, w) for i, w in enumerate(row)] for row in widths]
    ordered = boxes(rows, height, tilt)
    shuffled = list(range(len(ordered)))
    dice.shuffle(shuffled)
    assert [shuffled[i] for i in reading_order(ordered[shuffled])] == list(range(len(ordered)))


def test_the_command_prints_every_reader(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--count", "10", "--side", "256"])
    printed = capsys.readouterr().out
    assert "10 phrases at 256x256" in printed
    for name in ("ocr", "tesseract"):
        (row,) = (line for line in printed.splitlines() if name in line)
        right, wrong, speed = (float(cell) for cell in row.strip("│ ").split("│")[1:])
        assert right > 0.7 > 0.3 > wrong
        assert speed > 0
    with pytest.raises(SystemExit):
        main(["--count", "1"])
