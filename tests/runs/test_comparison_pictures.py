"""Pictures side by side, with their scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from marble_rl.runs import images
from marble_rl.runs.images import Card, Picture

TILE = 40


def comparison(columns: list[list[Card]], tile: int) -> Image.Image:
    """The only frame of a comparison of images."""
    (frame,) = images.comparison(columns, tile).frames
    return frame


def plain(number: int, height: int = 8, width: int = 8) -> torch.Tensor:
    """A picture of one colour that nothing else has."""
    return torch.tensor([10 + number, 200, 90 + 7 * number], dtype=torch.uint8).expand(height, width, 3).contiguous()


def place(sheet: Image.Image, number: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a plain picture; all of it can be seen."""
    pixels = np.asarray(sheet)
    own = (pixels == plain(number)[0, 0].numpy()).all(-1)
    y, x = np.nonzero(own)
    box = (int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1)
    assert own.sum() == (box[2] - box[0]) * (box[3] - box[1])
    return box


def card(*numbers: int) -> Card:
    return Card(f"prompt {numbers}", tuple(Picture(f"w{n}", plain(n), {"r": n / 10, "s": 0.5}) for n in numbers))


def test_every_picture_is_drawn_in_its_place() -> None:
    """Columns of cards, the pictures of a card from left to right."""
    sheet = comparison([[card(0, 1), card(2, 3)], [card(4, 5)]], tile=TILE)
    boxes = [place(sheet, n) for n in range(6)]
    for left, top, right, bottom in boxes:
        assert (right - left, bottom - top) == (TILE, TILE)
        assert left >= 0
        assert right <= sheet.width
        assert bottom <= sheet.height
    for first, second in ((0, 1), (2, 3), (1, 4), (4, 5)):
        assert boxes[first][2] < boxes[second][0]
    for upper, lower in ((0, 2), (1, 3)):
        assert boxes[upper][3] + 20 < boxes[lower][1]
    assert [box[1] for box in boxes] == [boxes[0][1]] * 2 + [boxes[2][1]] * 2 + [boxes[0][1]] * 2
    assert [box[0] for box in boxes[:2]] == [box[0] for box in boxes[2:4]]


def test_pictures_keep_their_proportions() -> None:
    pictures = (Picture("wide", plain(0, 4, 8), {"r": 1.0}), Picture("large", plain(1, 90, 90), {"r": 1.0}))
    sheet = comparison([[Card("x", pictures)]], tile=TILE)
    left, top, right, bottom = place(sheet, 0)
    assert (right - left, bottom - top) == (TILE, TILE // 2)
    left, top, right, bottom = place(sheet, 1)
    assert (right - left, bottom - top) == (TILE, TILE)


def colours_below(sheet: Image.Image, number: int) -> set[str]:
    """Of the text under a picture."""
    left, _, right, bottom = place(sheet, number)
    red, green, blue = np.asarray(sheet).astype(int)[bottom:, left:right].transpose(2, 0, 1)
    tests = {
        "green": green > np.maximum(red, blue) + 40,
        "red": red > np.maximum(green, blue) + 40,
        "grey": (red < 180) & (abs(red - green) < 8) & (abs(green - blue) < 8),
    }
    return {name for name, pixels in tests.items() if pixels.any()}


@pytest.mark.parametrize(("score", "colour"), [(0.6, "green"), (0.4, "red"), (0.502, "grey"), (0.498, "grey")])
def test_scores_show_whether_they_are_better_than_the_first(score: float, colour: str) -> None:
    pictures = tuple(Picture("w", plain(i), {"r": value}) for i, value in enumerate((0.5, score)))
    sheet = comparison([[Card("x", pictures)]], tile=100)
    assert colours_below(sheet, 0) == {"grey"}
    assert colours_below(sheet, 1) == {colour}


@pytest.mark.parametrize(
    ("first", "second"),
    [({"r": 0.5, "s": 0.5}, {"r": 0.9}), ({"r": 0.5}, {"r": 0.9, "s": 0.1}), ({}, {"r": 0.9}), ({}, {})],
)
def test_a_picture_may_lack_a_score(first: dict[str, float], second: dict[str, float]) -> None:
    sheet = comparison([[Card("x", (Picture("a", plain(0), first), Picture("b", plain(1), second)))]], tile=TILE)
    assert place(sheet, 0)[2] < place(sheet, 1)[0]


def test_cards_may_have_other_rewards_and_fewer_pictures() -> None:
    cards = [card(0, 1), Card("y", (Picture("w", plain(2), {"other": 1.0}),))]
    sheet = comparison([cards], tile=TILE)
    assert place(sheet, 2)[0] == place(sheet, 0)[0]


def test_a_long_prompt_stays_above_its_card() -> None:
    short, long = (Card(prompt, card(0).pictures) for prompt in ("x", "word " * 200))
    other = card(1)
    sheets = [comparison([[first], [other]], tile=TILE) for first in (short, long)]
    assert sheets[0].size == sheets[1].size
    middle = sheets[0].width // 2
    assert np.array_equal(np.asarray(sheets[0])[:, middle:], np.asarray(sheets[1])[:, middle:])
