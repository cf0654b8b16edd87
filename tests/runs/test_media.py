"""Images and videos as files: what other programs read from them is what was written."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clips import ball
from marble_rl.errors import InputError
from marble_rl.runs.media import check_writable, decoded, encoded, frame_rate, gif_of, note_of, opened_frames, webp


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).abs().mean())


@pytest.mark.parametrize(("suffix", "most"), [(".png", 0), (".jpg", 4), (".jpeg", 4), (".webp", 4)])
def test_an_image_comes_back(suffix: str, most: float) -> None:
    picture = ball()[0]
    data = encoded(picture, suffix)
    assert error(decoded(data), picture) <= most
    assert Image.open(io.BytesIO(data)).format == {".png": "PNG", ".webp": "WEBP"}.get(suffix, "JPEG")


@pytest.mark.parametrize(("suffix", "most"), [(".webp", 4), (".gif", 8)])
@pytest.mark.parametrize(("fps", "rate"), [(None, 8), (16, 16), (4, 4)])
def test_a_video_comes_back_at_its_rate(suffix: str, most: float, fps: int | None, rate: int) -> None:
    video = ball(height=24, width=32)
    data = encoded(video, suffix, fps)
    assert decoded(data).shape == video.shape
    assert error(decoded(data), video) <= most
    with Image.open(io.BytesIO(data)) as image:
        assert image.info["loop"] == 0
        assert opened_frames(image)[1] in (rate, rate + 1)  # a GIF counts hundredths of a second


def test_a_short_video_plays_slower_and_the_config_decides() -> None:
    assert [frame_rate(frames) for frames in (5, 13, 17, 32, 33, 81)] == [8, 8, 8, 8, 16, 16]
    assert frame_rate(5, 24) == frame_rate(81, 24) == 24


def test_webp_is_smaller_than_gif() -> None:
    """Of a scene whose grain changes from frame to frame, as that of a model does."""
    video = torch.stack([ball(seed=1)[t] + 4 * torch.rand(64, 64, 3) for t in range(13)]).to(torch.uint8)
    assert 2 * len(encoded(video, ".webp")) < len(encoded(video, ".gif"))


def test_a_note_is_kept_beside_the_pixels() -> None:
    frames = [Image.fromarray(frame) for frame in ball(frames=2).numpy()]
    note = '{"prompts": ["' + "a \\u00fc " * 20_000 + '"]}'
    with Image.open(io.BytesIO(webp(frames, note=note))) as image:
        assert note_of(image) == note
    with Image.open(io.BytesIO(webp(frames))) as image:
        assert note_of(image) == ""


def test_a_gif_of_an_animation_has_its_frames_and_its_rate(tmp_path: Path) -> None:
    (tmp_path / "video.webp").write_bytes(encoded(ball(), ".webp", 10))
    with Image.open(io.BytesIO(gif_of(tmp_path / "video.webp"))) as image:
        assert (image.format, image.n_frames, image.info["duration"]) == ("GIF", 13, 100)


def test_without_its_package_mp4_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "av", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    says = r"--out: \.mp4 needs the package av.*pip install 'marble-rl\[video\]', or give a name that ends in \.webp or"
    with pytest.raises(InputError, match=says):
        check_writable(".mp4", "--out")
    check_writable(".webp", "--out")
    (tmp_path / "av.py").touch()
    check_writable(".mp4", "--out")


@pytest.mark.full
def test_an_mp4_has_the_frames_the_rate_and_the_colours() -> None:
    import av

    video = ball(frames=17, height=48, width=32)
    with av.open(io.BytesIO(encoded(video, ".mp4", 12))) as file:
        (stream,) = file.streams
        assert (stream.codec_context.name, stream.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 12)
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
    assert error(torch.from_numpy(np.stack(frames)), video) < 6
