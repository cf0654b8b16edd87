"""Videos in the grids, and samples as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from marble_rl.runs.images import (
    CAPTION,
    MARGIN,
    Card,
    Picture,
    _fit,
    comparison,
    grid_rows,
    image_grid,
    save_image,
    save_sample,
)

COLOURS = torch.tensor([[250, 0, 0], [9, 9, 9], [0, 250, 0], [9, 9, 9], [0, 0, 250]], dtype=torch.uint8)


def video() -> torch.Tensor:
    """[5, 8, 16, 3]: red, grey, green, grey, blue."""
    return COLOURS[:, None, None].expand(5, 8, 16, 3).contiguous()


def colours_of(picture: Image.Image) -> set[tuple[int, ...]]:
    pixels = np.asarray(picture).reshape(-1, 3)
    return {tuple(int(v) for v in colour) for colour in COLOURS.tolist() if (pixels == colour).all(1).any()}


def test_a_grid_shows_the_first_the_middle_and_the_last_frame() -> None:
    grid = image_grid([("two videos", torch.stack([video(), video()])), ("one", video()[None])], tile=20)
    assert grid.width == 2 * (3 * 20 + MARGIN) + MARGIN
    assert colours_of(grid) == {(250, 0, 0), (0, 250, 0), (0, 0, 250)}
    assert image_grid([("an image", video()[:1])], tile=20).width == 20 + 2 * MARGIN


def test_a_comparison_of_videos() -> None:
    card = Card("a ball", (Picture("base", video(), {"a": 0.1}), Picture("ema", video(), {"a": 0.2})))
    sheet = comparison([[card]], tile=20)
    assert sheet.width >= 2 * 3 * 20
    assert colours_of(sheet) == {(250, 0, 0), (0, 250, 0), (0, 0, 250)}


def test_a_video_of_one_frame_fills_its_strip() -> None:
    assert colours_of(image_grid([("still", video()[None, :1])], tile=20)) == {(250, 0, 0)}


def test_an_image_is_written_as_png_and_a_video_as_animation(tmp_path: Path) -> None:
    still = save_sample(video()[0], tmp_path / "new" / "seed-1")
    assert still == tmp_path / "new" / "seed-1.png"
    assert np.array_equal(np.asarray(Image.open(still)), video()[0].numpy())

    film = save_sample(video(), tmp_path / "seed-1.5")
    assert film == tmp_path / "seed-1.5.webp"
    with Image.open(film) as animation:
        assert (animation.n_frames, animation.size) == (5, (16, 8))
        for i, colour in enumerate(COLOURS):
            animation.seek(i)
            found = np.asarray(animation.convert("RGB")).reshape(-1, 3).mean(0)
            assert np.abs(found - colour.numpy()).max() < 10
            assert animation.info["duration"] in (62, 63)


def test_a_sample_does_not_take_the_place_of_another(tmp_path: Path) -> None:
    files = [save_sample(video()[i], tmp_path / "seed-0") for i in range(3)]
    assert [file.name for file in files] == ["seed-0.png", "seed-0-2.png", "seed-0-3.png"]
    for i, file in enumerate(files):
        assert np.array_equal(np.asarray(Image.open(file)), video()[i].numpy())


def test_a_grid_can_be_taken_apart_again(tmp_path: Path) -> None:
    prompts = ['a "ball" <b>', "very long " * 2000]
    save_image(image_grid([(prompt, video()[:2]) for prompt in prompts], tile=20), tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as grid:
        rows = grid_rows(grid)
    assert [prompt for prompt, _ in rows] == prompts
    for _, row in rows:
        assert row.size == (2 * 20 + MARGIN, 20)
        assert row.getpixel((5, 5)) == (250, 0, 0)
        assert row.getpixel((30, 5)) == (9, 9, 9)
    assert grid_rows(Image.new("RGB", (40, 40))) == []


def test_a_long_caption_is_cut_to_its_width() -> None:
    draw, font = ImageDraw.Draw(Image.new("RGB", (9, 9))), ImageFont.load_default(CAPTION)
    for text in ("word " * 3000, "x" * 500, "short"):
        line = _fit(text, 120, draw, font)
        assert draw.textlength(line, font=font) <= 120
        assert line == text or (line[-1] == "…" and draw.textlength(line, font=font) > 100)
    assert _fit("word", 3, draw, font) == ""
