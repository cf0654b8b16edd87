"""Videos in the grids, and sheets and samples as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from marble_rl.runs.images import (
    CAPTION,
    MARGIN,
    VIDEO_TILE,
    Card,
    Picture,
    _fit,
    comparison,
    grid_rows,
    image_grid,
    save_sample,
    save_sheet,
)

COLOURS = torch.tensor([[250, 0, 0], [9, 9, 9], [0, 250, 0], [9, 9, 9], [0, 0, 250]], dtype=torch.uint8)


def video() -> torch.Tensor:
    """[5, 8, 16, 3]: red, grey, green, grey, blue."""
    return COLOURS[:, None, None].expand(5, 8, 16, 3).contiguous()


def colours_of(picture: Image.Image) -> set[tuple[int, ...]]:
    pixels = np.asarray(picture).reshape(-1, 3)
    return {tuple(int(v) for v in colour) for colour in COLOURS.tolist() if (pixels == colour).all(1).any()}


def colours_by_frame(frames: list[Image.Image]) -> list[set[tuple[int, ...]]]:
    return [colours_of(frame) for frame in frames]


PLAYED = [{tuple(colour)} for colour in COLOURS.tolist()]


def test_videos_play_in_a_grid() -> None:
    sheet = image_grid([("two videos", torch.stack([video(), video()])), ("one", video()[None])], tile=20)
    assert sheet.canvas.width == 2 * (20 + MARGIN) + MARGIN
    assert colours_by_frame(sheet.frames) == PLAYED
    assert len(image_grid([("an image", video()[:1])], tile=20).frames) == 1


def test_videos_play_in_a_comparison() -> None:
    """A shorter one stops at its last frame."""
    card = Card("a ball", (Picture("base", video(), {"a": 0.1}), Picture("ema", video()[:3], {"a": 0.2})))
    frames = comparison([[card]], tile=20).frames
    assert colours_by_frame(frames) == [*PLAYED[:3], PLAYED[3] | PLAYED[2], PLAYED[4] | PLAYED[2]]


def test_large_videos_are_shrunk_in_a_grid_and_large_images_are_not() -> None:
    large = torch.zeros(1, 2, 480, 832, 3, dtype=torch.uint8)
    assert image_grid([("a video", large)]).canvas.width == VIDEO_TILE + 2 * MARGIN
    assert image_grid([("an image", large[:, 0])]).canvas.width == 480 + 2 * MARGIN


def test_a_sheet_is_one_file_still_or_moving(tmp_path: Path) -> None:
    for media, name in ((video()[None], "sheet.webp"), (video()[:1], "sheet.png"), (video()[None], "sheet.webp")):
        assert save_sheet(image_grid([("a ball", media)], tile=20), tmp_path / "sheet") == tmp_path / name
        assert [file.name for file in tmp_path.iterdir()] == [name]


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
            assert animation.info["duration"] == 125


def test_a_sample_does_not_take_the_place_of_another(tmp_path: Path) -> None:
    files = [save_sample(video()[i], tmp_path / "seed-0") for i in range(3)]
    assert [file.name for file in files] == ["seed-0.png", "seed-0-2.png", "seed-0-3.png"]
    for i, file in enumerate(files):
        assert np.array_equal(np.asarray(Image.open(file)), video()[i].numpy())


def test_a_grid_can_be_taken_apart_again(tmp_path: Path) -> None:
    prompts = ['a "ball" <b>', "very long " * 2000]
    file = save_sheet(image_grid([(prompt, video()[:2]) for prompt in prompts], tile=20), tmp_path / "grid")
    with Image.open(file) as grid:
        rows = grid_rows(grid)
    assert [row.prompt for row in rows] == prompts
    for row in rows:
        (picture,) = row.frames
        assert picture.size == (2 * 20 + MARGIN, 20)
        assert picture.getpixel((5, 5)) == (250, 0, 0)
        assert picture.getpixel((30, 5)) == (9, 9, 9)
    assert grid_rows(Image.new("RGB", (40, 40))) == []


def test_a_grid_of_videos_can_be_taken_apart_again(tmp_path: Path) -> None:
    file = save_sheet(
        image_grid([("a ball", video()[None]), ("ä 🪀", video()[None])], tile=20), tmp_path / "grid", fps=5
    )
    with Image.open(file) as grid:
        rows = grid_rows(grid)
    assert [(row.prompt, row.fps, len(row.frames)) for row in rows] == [("a ball", 5, 5), ("ä 🪀", 5, 5)]
    for row in rows:
        for frame, colour in zip(row.frames, COLOURS.tolist(), strict=True):
            assert frame.size == (20, 20)
            assert np.abs(np.array(frame.getpixel((10, 5))) - colour).max() < 25


def test_a_long_caption_is_cut_to_its_width() -> None:
    draw, font = ImageDraw.Draw(Image.new("RGB", (9, 9))), ImageFont.load_default(CAPTION)
    for text in ("word " * 3000, "x" * 500, "short"):
        line = _fit(text, 120, draw, font)
        assert draw.textlength(line, font=font) <= 120
        assert line == text or (line[-1] == "…" and draw.textlength(line, font=font) > 100)
    assert _fit("word", 3, draw, font) == ""
