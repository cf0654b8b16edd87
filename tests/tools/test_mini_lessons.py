"""What the mini world's reward models learn from: near misses, flaws and lessons; its prompt files; a few steps."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from marble_rl.mini.shapes import SHAPES, SIZE
from marble_rl.prompts.meaning import asked_for
from tools.mini.flaws import FLAWS, with_flaws
from tools.mini.near_misses import near_miss
from tools.mini.prompts import HELD_OUT, TRAIN, splits, write_prompts
from tools.mini.render import render
from tools.mini.scenes import COLOURS, GLYPHS, LIGHTS, NUMBERS, PLACES, SOURCES, Scene, draw_scene
from tools.mini.scorers import (
    WRONG_CAPTIONS,
    Lessons,
    Samples,
    Scorer,
    make_lessons,
    new_scorer,
    train_aesthetic,
    train_caption_match,
    train_preference,
    with_further_flaws,
)

pytestmark = pytest.mark.full  # maintainers' tools, which rarely change

PROMPTS = Path(__file__).parents[2] / "configs" / "prompts"
TASKS = {"single_object", "two_object", "counting", "colors", "position", "color_attr"}


def pairs(count: int = 600) -> list[tuple[Scene, Scene]]:
    """Scenes of all sources in turn, each with a near miss."""
    dice = random.Random(8)
    drawn = [draw_scene(SOURCES[i % 3], dice) for i in range(count)]
    return [(scene, near_miss(scene, dice)) for scene in drawn]


def differences(scene: Scene, other: Scene) -> set[str]:
    """Which things two scenes differ in; the kind of an object counts, not how often it stands there."""
    found = {name for name in ("place", "light") if getattr(scene, name) != getattr(other, name)}
    text, colour = ([getattr(s.sign, name, "") for s in (scene, other)] for name in ("text", "colour"))
    found |= {"letter"} if text[0] != text[1] else set()
    found |= {"colour"} if colour[0] != colour[1] else set()
    for name, attribute in (("colour", "colour"), ("shape", "shape")):
        kinds = [list(dict.fromkeys(getattr(item, attribute) for item in s.items)) for s in (scene, other)]
        found |= {name} if kinds[0] != kinds[1] else set()
    if len(scene.items) != len(other.items):
        return found | {"number"}
    where = [[(item.x, item.y) for item in s.items] for s in (scene, other)]
    return found | ({"relation"} if where[0] != where[1] else set())


def test_a_near_miss_differs_in_one_thing() -> None:
    seen = set()
    for scene, miss in pairs():
        assert miss.caption != scene.caption
        assert miss.source == scene.source
        (kind,) = differences(scene, miss)
        seen.add(kind)
    assert seen == {"letter", "colour", "shape", "number", "relation", "place", "light"}


def test_one_of_a_kind_is_changed() -> None:
    """One letter of a sign, one colour or shape of two; and a relation turns round."""
    for scene, miss in pairs():
        if scene.sign is not None and miss.sign is not None:
            assert set(miss.sign.text) <= set(GLYPHS)
            assert sum(a != b for a, b in zip(scene.sign.text, miss.sign.text, strict=True)) <= 1
        elif len(scene.items) == len(miss.items):
            changed = [
                sum(getattr(a, name) != getattr(b, name) for a, b in zip(scene.items, miss.items, strict=True))
                for name in ("colour", "shape")
            ]
            assert sum(changed) in ({0, 1} if len({i.shape for i in scene.items}) > 1 else {0, len(scene.items)})
            assert sorted((i.x, i.y) for i in scene.items) == sorted((i.x, i.y) for i in miss.items)
        else:
            assert len({(i.shape, i.colour, i.y, i.x) for i in miss.items}) == len(miss.items) <= 4


def test_the_caption_of_a_near_miss_says_what_it_shows() -> None:
    for _, miss in pairs():
        said = re.findall(r"\w+", miss.caption)
        if miss.sign is not None:
            assert miss.caption == f'a {miss.sign.colour} sign that says "{miss.sign.text}"'
            continue
        shapes = list(dict.fromkeys(item.shape for item in miss.items))
        assert [w.removesuffix("s") for w in said if w.removesuffix("s") in SHAPES] == shapes
        if colours := [w for w in said if w in COLOURS]:
            assert colours == list(dict.fromkeys(item.colour for item in miss.items))
        if len(shapes) == 1:
            count = len(miss.items)
            assert said[0] == ("a" if count == 1 else NUMBERS[count])
            assert (f"{shapes[0]}s" in said) == (count > 1)
        assert [PLACES[phrase] for phrase in PLACES if phrase and phrase in miss.caption] in ([miss.place], [])
        assert [LIGHTS[phrase] for phrase in LIGHTS if phrase and phrase in miss.caption] in ([miss.light], [])
        where = {"left of": ("x", 1), "right of": ("x", -1), "above": ("y", 1), "below": ("y", -1)}
        for relation, (axis, sign) in where.items():
            if relation in miss.caption:
                first, second = (sign * getattr(item, axis) for item in miss.items)
                assert first < second


def test_near_misses_are_seeded() -> None:
    assert pairs(60) == pairs(60)


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    dice = random.Random(4)
    return [render(draw_scene(SOURCES[i % 3], dice), dice) for i in range(20)]


def change(flaw: Callable[..., Image.Image], pictures: list[Image.Image], severity: float) -> float:
    """Mean absolute difference of pixels to the pictures without the flaw."""
    dice = random.Random(6)
    flawed = [np.asarray(flaw(picture, severity, dice), dtype=float) for picture in pictures]
    return float(np.mean([np.abs(after - np.asarray(before)) for after, before in zip(flawed, pictures, strict=True)]))


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_worse_flaw_changes_more(flaw: Callable[..., Image.Image], pictures: list[Image.Image]) -> None:
    assert 0 < change(flaw, pictures, 0.1) < change(flaw, pictures, 1.0)


def test_flaws_together_grow_with_severity(pictures: list[Image.Image]) -> None:
    changes = [change(with_flaws, pictures * 3, severity) for severity in (0.0, 0.5, 1.0)]
    assert 0 < changes[0] < changes[1] < changes[2]


@pytest.mark.parametrize("flaw", [*FLAWS, with_flaws])
def test_a_flaw_keeps_the_format_and_is_seeded(flaw: Callable[..., Image.Image], pictures: list[Image.Image]) -> None:
    for i, picture in enumerate(pictures[:6]):
        before = np.array(picture)
        for severity in (0.0, 0.4, 1.0):
            one, same = (flaw(picture, severity, random.Random(i)) for _ in range(2))
            assert (one.size, one.mode) == ((SIZE, SIZE), "RGB")
            assert np.asarray(one).dtype == np.uint8
            assert np.array_equal(one, same)
        assert np.array_equal(before, picture)


def test_one_or_two_of_all_flaws_are_drawn(monkeypatch: pytest.MonkeyPatch, pictures: list[Image.Image]) -> None:
    drawn: list[list[str]] = []

    def noted(flaw: Callable[..., Image.Image]) -> Callable[..., Image.Image]:
        def apply(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
            assert severity == 0.5
            drawn[-1].append(flaw.__name__)
            return picture

        return apply

    monkeypatch.setattr("tools.mini.flaws.FLAWS", tuple(noted(flaw) for flaw in FLAWS))
    dice = random.Random(0)
    for _ in range(200):
        drawn.append([])
        with_flaws(pictures[0], 0.5, dice)
    assert {len(names) for names in drawn} == {1, 2}
    assert all(len(set(names)) == len(names) for names in drawn)
    assert {name for names in drawn for name in names} == {flaw.__name__ for flaw in FLAWS}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts") / "new"
    write_prompts(folder)
    return folder


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_prompt_files_are_what_the_package_writes(written: Path) -> None:
    names = sorted(file.name for file in written.iterdir())
    assert names == sorted(f.name for f in PROMPTS.glob("mini-*.jsonl") if not f.name.startswith("mini-video-"))
    assert names == sorted(f"mini-{source}{end}.jsonl" for source in SOURCES for end in ("", "-heldout"))
    for name in names:
        assert (PROMPTS / name).read_bytes() == (written / name).read_bytes(), name


@pytest.mark.parametrize("source", SOURCES)
def test_captions_of_a_source_differ(source: str, written: Path) -> None:
    for end, count in (("", TRAIN), ("-heldout", HELD_OUT)):
        captions = [line["prompt"] for line in lines(written / f"mini-{source}{end}.jsonl")]
        assert len(set(captions)) == len(captions) == count


def test_nothing_is_asked_for_in_training_and_held_out(written: Path) -> None:
    """Neither in the same words nor in others, nor by another source."""

    def asked(end: str) -> set[str]:
        files = [lines(written / f"mini-{source}{end}.jsonl") for source in SOURCES]
        return {words for file in files for line in file for words in asked_for(line["prompt"], line)}

    assert "a marble and a cone" in asked("")
    assert not asked("") & asked("-heldout")


def test_prompts_carry_what_rewards_need(written: Path) -> None:
    for end in ("", "-heldout"):
        assert all("include" in line for line in lines(written / f"mini-composition{end}.jsonl"))
        assert all(f'"{line["target"]}"' in line["prompt"] for line in lines(written / f"mini-text{end}.jsonl"))
        assert all(set(line) == {"prompt"} for line in lines(written / f"mini-general{end}.jsonl"))


def test_training_and_held_out_prompts_have_every_task(written: Path) -> None:
    """But for the six pairs of shapes: training asks for them all."""
    train, heldout = (
        Counter(line["tag"] for line in lines(written / f"mini-composition{end}.jsonl")) for end in ("", "-heldout")
    )
    assert set(train) == TASKS
    assert set(heldout) == TASKS - {"two_object"}
    for task, count in heldout.items():
        assert count > 0.6 * (train[task] + count) * HELD_OUT / (TRAIN + HELD_OUT), task


def test_another_seed_gives_other_prompts(written: Path) -> None:
    text = splits(seed=1)["text"]
    assert (len(text.train), len(text.held_out)) == (TRAIN, HELD_OUT)
    assert {scene.caption for scene in text.train} != {line["prompt"] for line in lines(written / "mini-text.jsonl")}


@pytest.fixture(scope="module")
def lessons() -> Lessons:
    return make_lessons(9, 0)


@pytest.fixture(scope="module")
def samples(lessons: Lessons) -> Samples:
    return with_further_flaws(lessons.mild[:5], 0)


def test_lessons_are_seeded(lessons: Lessons) -> None:
    again, other = make_lessons(9, 0), make_lessons(9, 1)
    for name in ("right", "wrong", "mild", "bad"):
        assert np.array_equal(getattr(lessons, name), getattr(again, name))
        assert not np.array_equal(getattr(lessons, name), getattr(other, name))
    assert (lessons.captions, lessons.wrong_captions) == (again.captions, again.wrong_captions)
    assert torch.equal(lessons.severity, again.severity)


def test_lessons_hold_right_wrong_and_flawed_pictures(lessons: Lessons) -> None:
    assert len(lessons) == len(lessons.captions) == 9
    parts = [lessons.right, lessons.wrong, lessons.mild, lessons.bad]
    for part in parts:
        assert part.shape == (9, SIZE, SIZE, 3)
        assert part.dtype == np.uint8
    for i, (caption, wrong) in enumerate(zip(lessons.captions, lessons.wrong_captions, strict=True)):
        assert len(wrong) == WRONG_CAPTIONS
        assert caption not in wrong
        assert len({part[i].tobytes() for part in parts}) == 4
    assert ["says" in caption for caption in lessons.captions] == [True, False, False] * 3


def test_bad_pictures_are_worse_than_mild_ones() -> None:
    lessons = make_lessons(60, 2)
    mild, bad = lessons.severity.T
    assert bool((bad - mild > 0.19).all())
    assert float(mild.min()) >= 0
    assert float(bad.max()) <= 1
    clean = lessons.right.astype(int)
    assert np.abs(lessons.mild - clean).mean() < np.abs(lessons.bad - clean).mean()


def test_further_flaws_keep_what_was_drawn(lessons: Lessons, samples: Samples) -> None:
    assert np.array_equal(samples.drawn, lessons.mild[:5])
    assert samples.flawed.shape == samples.drawn.shape
    assert samples.flawed.dtype == np.uint8
    assert all((a != b).any() for a, b in zip(samples.drawn, samples.flawed, strict=True))
    assert np.array_equal(samples.flawed, with_further_flaws(lessons.mild[:5], 0).flawed)


def test_every_lesson_fits_the_text_encoder() -> None:
    scorer = Scorer(new_scorer(0))
    captions = sorted({scene.caption for pair in pairs(300) for scene in pair})
    tokens = scorer.tokens(captions)
    assert len({tuple(row) for row in tokens.tolist()}) == len(captions)
    assert bool((tokens[:, -1] == scorer.tokenizer.eos_token_id).all())


def test_embeddings_are_unit_vectors(lessons: Lessons) -> None:
    scorer = Scorer(new_scorer(0)).eval()
    with torch.no_grad():
        embedded = [scorer.images(lessons.right), scorer.texts(scorer.tokens(lessons.captions))]
    for vectors in embedded:
        assert vectors.shape == (9, 64)
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(9))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def trained(kind: str, lessons: Lessons, samples: Samples, seed: int, steps: int = 3) -> dict[str, Tensor]:
    """Weights after a few steps, all of which were reported with a finite loss."""
    losses: list[tuple[int, float]] = []
    settings: dict[str, Any] = {"steps": steps, "batch": 4, "seed": seed, "on_step": lambda *step: losses.append(step)}
    clip = new_scorer(7)
    before = weights(clip)
    model = {
        "match": lambda: train_caption_match(lessons, **settings),
        "preference": lambda: train_preference(clip, lessons, samples, content=True, **settings),
        "quality": lambda: train_preference(clip, lessons, samples, content=False, **settings),
        "aesthetic": lambda: train_aesthetic(clip, lessons, samples, **settings),
    }[kind]()
    assert same(before, weights(clip))
    assert [step for step, _ in losses] == list(range(steps))
    assert np.isfinite([loss for _, loss in losses]).all()
    assert not model.training
    return weights(model)


KINDS = ["match", "preference", "quality", "aesthetic"]


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_seeded_and_changes_weights(kind: str, lessons: Lessons, samples: Samples) -> None:
    """Whatever the state of torch's own dice."""
    torch.manual_seed(1)
    one = trained(kind, lessons, samples, seed=0)
    torch.manual_seed(2)
    assert same(one, trained(kind, lessons, samples, seed=0))
    assert not same(one, trained(kind, lessons, samples, seed=1))
    start = weights(new_scorer(0 if kind == "match" else 7))
    after = {name.removeprefix("scorer.clip."): tensor for name, tensor in one.items()}
    learnt = [name for name in start if "visual_projection" in name or "text_projection" in name]
    # Aesthetic looks at pictures only.
    moved = [name for name in learnt if not torch.equal(start[name], after[name])]
    assert moved == ([name for name in learnt if "visual" in name] if kind == "aesthetic" else learnt)


def test_any_number_of_steps_will_do(lessons: Lessons, samples: Samples) -> None:
    """Also such that the rising part of the schedule is empty, or ends on a step."""
    for steps in (1, 10):
        trained("aesthetic", lessons, samples, seed=0, steps=steps)


def test_caption_match_learns() -> None:
    losses: list[float] = []
    lessons = make_lessons(6, 0)
    train_caption_match(lessons, steps=14, batch=6, seed=0, on_step=lambda step, loss: losses.append(loss))
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
