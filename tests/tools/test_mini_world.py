"""The mini world: scenes, their captions and metadata, and pictures of them."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from marble_rl.mini.shapes import PAINT, SHAPES, SIZE
from tools.mini.render import render
from tools.mini.scenes import COLOURS, LIGHTS, PLACES, RELATIONS, SOURCES, Item, Scene, Sign, draw_scene


def scenes(source: str, count: int = 400) -> list[Scene]:
    dice = random.Random(5)
    return [draw_scene(source, dice) for _ in range(count)]


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_seed_gives_the_same_scenes_and_pictures(source: str) -> None:
    assert scenes(source, 20) == scenes(source, 20)
    scene = scenes(source, 1)[0]
    once, again = (np.asarray(render(scene, random.Random(3))) for _ in range(2))
    assert np.array_equal(once, again)
    assert once.shape == (SIZE, SIZE, 3)
    assert once.std() > 10


def test_text_scenes_name_their_target() -> None:
    for scene in scenes("text"):
        assert f'says "{scene.metadata["target"]}"' in scene.caption
        assert scene.sign is not None
        assert scene.sign.text == scene.metadata["target"]
        assert scene.sign.colour in scene.caption


def test_compositions_cover_every_task_and_show_what_they_ask_for() -> None:
    seen = set()
    for scene in scenes("composition"):
        seen.add(scene.metadata["tag"])
        wanted = scene.metadata["include"]
        assert sum(w["count"] for w in wanted) == len(scene.items)
        for w in wanted:
            matching = [i for i in scene.items if i.shape == w["class"] and w.get("color", i.colour) == i.colour]
            assert len(matching) == w["count"]
        if scene.metadata["tag"] == "position":
            relation, other = wanted[1]["position"]
            first, second = scene.items
            assert (wanted[other]["class"], wanted[1]["class"]) == (second.shape, first.shape)
            assert {
                "left of": first.x < second.x,
                "right of": first.x > second.x,
                "above": first.y < second.y,
                "below": first.y > second.y,
            }[relation]
            assert relation in scene.caption
    assert seen == {"single_object", "two_object", "counting", "colors", "position", "color_attr"}


def test_general_scenes_vary_place_and_light() -> None:
    drawn = scenes("general")
    assert {s.place for s in drawn} == set(PLACES.values())
    assert {s.light for s in drawn} == set(LIGHTS.values())
    assert all(not s.metadata for s in drawn)


@pytest.mark.parametrize("source", ["composition", "general"])
def test_objects_stay_in_the_picture_and_do_not_touch(source: str) -> None:
    for scene in scenes(source):
        for item in scene.items:
            assert item.shape in SHAPES
            assert item.colour in COLOURS
            assert item.radius <= min(item.x, item.y, 1 - item.x, 1 - item.y)
        for a, b in itertools.combinations(scene.items, 2):
            assert math.hypot(a.x - b.x, a.y - b.y) > 0.95 * (a.radius + b.radius)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_object_has_its_colour(shape: str, colour: str) -> None:
    picture = np.asarray(
        render(Scene("", "general", (Item(shape, colour, 0.5, 0.5, 0.3),)), random.Random(0)), dtype=int
    )
    middle = picture[34:40, 29:35].mean((0, 1))
    nearest = min(PAINT, key=lambda name: float(np.abs(middle - np.array(PAINT[name])).sum()))
    assert nearest == colour


def test_letters_stand_out_from_their_sign() -> None:
    for colour in COLOURS:
        picture = render(Scene("", "text", sign=Sign("HH", colour)), random.Random(0)).convert("L")
        board = np.asarray(picture, dtype=int)[18:42, 10:54]
        assert np.percentile(board, 98) - np.percentile(board, 2) > 80


def test_every_relation_is_drawn() -> None:
    captions = " ".join(s.caption for s in scenes("composition"))
    assert all(relation in captions for relation in RELATIONS)
