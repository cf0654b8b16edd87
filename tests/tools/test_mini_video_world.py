"""The mini video world: clips, their captions and metadata, flaws, prompt files."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from marble_rl.mini.shapes import SHAPES, SIZE
from marble_rl.prompts.meaning import asked_for
from marble_rl.rewards.builtin.motion_form import wanted_motion
from marble_rl.types import Prompt
from tools.mini.prompts import HELD_OUT, TRAIN, write_prompts
from tools.mini.scenes import COLOURS
from tools.mini_video import flaws, show
from tools.mini_video.corpus import make_corpus
from tools.mini_video.prompts import MINI_VIDEO
from tools.mini_video.render import render_clip
from tools.mini_video.scenes import CAMERA, DISTANCES, FRAMES, KINDS, SOURCES, VERBS, Clip, draw_clip

PROMPTS = Path(__file__).parents[2] / "configs" / "prompts"


def clips(source: str, count: int = 300) -> list[Clip]:
    dice = random.Random(5)
    return [draw_clip(source, dice) for _ in range(count)]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_seed_gives_the_same_clips(source: str) -> None:
    assert clips(source, 20) == clips(source, 20)
    clip = clips(source, 1)[0]
    once, again = (render_clip(clip, random.Random(3)) for _ in range(2))
    assert np.array_equal(once, again)
    assert once.shape == (FRAMES, SIZE, SIZE, 3)
    assert len({frame.tobytes() for frame in once}) > 3, "it moves"


@pytest.mark.parametrize("source", SOURCES)
def test_captions_are_short_and_things_stay_in_the_picture(source: str) -> None:
    for clip in clips(source):
        assert len(clip.caption.split()) <= 14
        for scene in clip.scenes:
            for item in scene.items:
                assert item.radius <= min(item.x, item.y, 1 - item.x, 1 - item.y) + 1e-9, clip.caption
            if scene.sign is not None:
                assert 0.45 * scene.sign.scale <= min(scene.sign.x, 1 - scene.sign.x)
                assert 0.26 * scene.sign.scale <= min(scene.sign.y, 1 - scene.sign.y)


def test_motion_clips_move_as_their_metadata_says() -> None:
    seen: Counter[str] = Counter()
    for clip in clips("motion", 600):
        motion = wanted_motion(Prompt(0, clip.caption, "motion", clip.metadata))
        assert motion is not None
        seen[motion.kind] += 1
        first, last = clip.scenes[0].items[0], clip.scenes[-1].items[0]
        for thing in motion.objects:
            assert f"a {thing.color} {thing.name}" in clip.caption
        if motion.kind in ("move", "stop"):
            way = {
                "left": first.x - last.x,
                "right": last.x - first.x,
                "up": first.y - last.y,
                "down": last.y - first.y,
            }
            low, high = DISTANCES[motion.speed or ""]
            share = 0.5 if motion.kind == "stop" else 1
            assert low * share - 1e-9 <= way[motion.direction or ""] <= high * share + 1e-9
        if motion.kind in ("meet", "part"):
            apart = [abs(a.x - b.x) + abs(a.y - b.y) for a, b in (scene.items for scene in clip.scenes)]
            assert (apart[0] > apart[-1]) == (motion.kind == "meet")
    assert set(seen) == set(KINDS)


def test_the_caption_names_every_choice() -> None:
    texts, general = (" / ".join(clip.caption for clip in clips(source)) for source in ("text", "general"))
    assert all(f"the camera {words}" in texts for words in CAMERA)
    assert all(f" {verb}" in general for verb in VERBS)
    assert all(f'"{clip.metadata["target"]}"' in clip.caption for clip in clips("text"))
    assert all(clip.metadata == {} for clip in clips("general"))


@pytest.mark.parametrize("flaw", [*flaws.OF_PIXELS, flaws.grainy])
def test_a_severer_flaw_changes_more(flaw: Any) -> None:
    frames = render_clip(clips("motion", 1)[0], random.Random(0)).astype(int)
    mild, severe = (np.abs(flaw(frames.astype(np.uint8), s, random.Random(1)) - frames).mean() for s in (0.0, 1.0))
    assert 0 < mild < severe


def test_flaws_of_scenes() -> None:
    clip = clips("motion", 1)[0]
    shaken = flaws.jittery(clip, 0.5, random.Random(0))
    moved = [abs(a.items[0].x - b.items[0].x) for a, b in zip(shaken.scenes, clip.scenes, strict=True)]
    assert 0 < max(moved) <= 0.04
    painted = flaws.recoloured(clip, 1.0, random.Random(0))
    colours = [scene.items[0].colour for scene in painted.scenes]
    assert colours[0] == clip.scenes[0].items[0].colour
    assert len(set(colours[-8:])) == 1
    assert flaws.stuttering(np.arange(FRAMES, dtype=np.uint8), 0.0, random.Random(0)).tolist() == [
        *(0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12)
    ]


def test_a_corpus_is_spoilt_and_miscaptioned_on_request() -> None:
    clean = make_corpus(6, 0)
    assert clean.captions == tuple(clip.caption for clip in clean.clips)
    assert [clip.source for clip in clean.clips] == [*SOURCES, *SOURCES]
    spoilt = make_corpus(6, 0, spoilt=1.0, miscaptioned=1.0)
    assert all(a != clip.caption for a, clip in zip(spoilt.captions, spoilt.clips, strict=True))
    assert spoilt.videos.shape == (6, FRAMES, SIZE, SIZE, 3)
    assert not np.array_equal(spoilt.videos[0], clean.videos[0])


def test_show_draws_a_sheet_and_a_moving_grid(tmp_path: Path) -> None:
    show.main(tmp_path / "sheet.png", count=2, source="motion")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > FRAMES * SIZE
    show.main(tmp_path / "new" / "grid.webp", count=2, source="text")
    with Image.open(tmp_path / "new" / "grid.webp") as grid:
        assert getattr(grid, "n_frames", 0) == FRAMES


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    write_prompts(folder, MINI_VIDEO)
    return folder


@pytest.mark.full
def test_the_prompt_files_are_what_the_tool_writes(written: Path) -> None:
    names = sorted(file.name for file in written.iterdir())
    assert names == sorted(f"mini-video-{source}{end}.jsonl" for source in SOURCES for end in ("", "-heldout"))
    for name in names:
        assert (PROMPTS / name).read_bytes() == (written / name).read_bytes(), name


def test_held_out_prompts_ask_for_something_else() -> None:
    def asked(end: str) -> set[str]:
        files = [lines(PROMPTS / f"mini-video-{source}{end}.jsonl") for source in SOURCES]
        return {words for file in files for line in file for words in asked_for(line["prompt"], line)}

    assert not asked("") & asked("-heldout")
    for source in SOURCES:
        for end, count in (("", TRAIN), ("-heldout", HELD_OUT)):
            captions = [line["prompt"] for line in lines(PROMPTS / f"mini-video-{source}{end}.jsonl")]
            assert len(set(captions)) == len(captions) == count


@pytest.mark.parametrize("end", ["", "-heldout"])
def test_every_kind_direction_speed_shape_and_colour_is_asked_for(end: str) -> None:
    motions = [line["motion"] for line in lines(PROMPTS / f"mini-video-motion{end}.jsonl")]
    assert {motion["kind"] for motion in motions} == set(KINDS)
    assert {motion.get("direction") for motion in motions} == {None, "left", "right", "up", "down"}
    assert {motion.get("speed") for motion in motions} == {None, "slow", "fast"}
    things = [thing for motion in motions for thing in motion["objects"]]
    assert {thing["class"] for thing in things} == set(SHAPES)
    assert {thing["color"] for thing in things} == set(COLOURS)


def test_who_is_named_first_does_not_matter() -> None:
    things = [{"class": "cone", "color": "red"}, {"class": "star", "color": "blue"}]
    one, other = ({"motion": {"kind": "meet", "objects": order}} for order in (things, things[::-1]))
    parting = {"motion": {"kind": "part", "objects": things}}
    assert asked_for("a red cone and a blue star meet", one) & asked_for("a blue star and a red cone meet", other)
    assert not asked_for("a red cone and a blue star meet", one) & asked_for("a red cone and a blue star part", parting)
    assert asked_for("it moves", {"motion": "much"}) == {"it moves", "prompt it moves"}, "metadata of somebody else"
