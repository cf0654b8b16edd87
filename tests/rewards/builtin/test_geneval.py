"""GenEval's rules on objects placed by hand, and the mini world's detector on pictures."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from marble_rl.errors import InputError
from marble_rl.mini.shapes import PAINT, SHAPES, SIZE
from marble_rl.prompts import read_prompt_file
from marble_rl.rewards.builtin.detection import Detection
from marble_rl.rewards.builtin.geneval import GenEval, dense_credit, relations, share_met
from marble_rl.rewards.builtin.mini_detector import MiniDetector
from marble_rl.rewards.core.base import Images, RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt
from tools.mini.flaws import blurred, crooked, erased
from tools.mini.near_misses import OPPOSITE, near_miss
from tools.mini.render import render
from tools.mini.scenes import COLOURS, Item, Scene, draw_scene


def thing(colour: str, name: str, x: float = 30, y: float = 30, confidence: float = 0.9) -> Detection:
    return Detection(name, colour, (x - 5, y - 5, x + 5, y + 5), confidence)


def one(name: str, colour: str | None = None, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **({"color": colour} if colour else {}), **more}


def exactly(*include: dict[str, Any]) -> dict[str, Any]:
    return {"include": list(include), "exclude": [one(w["class"], count=w["count"] + 1) for w in include]}


STAR, BLOCK = thing("red", "star", 15, 30), thing("blue", "block", 45, 30)
MARBLES = [thing("red", "marble", x, 30) for x in (10, 30, 50)]
WANTED = {
    "single_object": exactly(one("star")),
    "two_object": exactly(one("star"), one("block")),
    "counting": exactly(one("marble", "red", count=2)),
    "colors": exactly(one("star", "red")),
    "position": exactly(one("block", "blue"), one("star", "red", position=["left of", 0])),
    "color_attr": exactly(one("star", "red"), one("block", "blue")),
}
RIGHT = {
    "single_object": [STAR],
    "two_object": [STAR, BLOCK],
    "counting": MARBLES[:2],
    "colors": [STAR],
    "position": [STAR, BLOCK],
    "color_attr": [STAR, BLOCK],
}


def moved(item: Detection, x: float, y: float) -> Detection:
    return thing(item.colour, item.name, x, y, item.confidence)


def painted(item: Detection, colour: str) -> Detection:
    return replace(item, colour=colour)


EXTRA_STAR, EXTRA_BLOCK = thing("red", "star", 15, 50, 0.5), thing("blue", "block", 45, 50, 0.5)
WRONG: list[tuple[str, list[Detection], float]] = [
    ("single_object", [], 0),
    ("single_object", [BLOCK], 0),
    ("single_object", [STAR, EXTRA_STAR], 1 / 2),
    ("two_object", [], 0),
    ("two_object", [BLOCK], 0),
    ("two_object", [STAR], 1 / 4),
    ("two_object", [STAR, EXTRA_STAR], 1 / 4),
    ("two_object", [STAR, BLOCK, EXTRA_STAR], 2 / 4),
    ("two_object", [STAR, BLOCK, EXTRA_BLOCK], 3 / 4),
    ("counting", MARBLES[:1], 0),
    ("counting", [MARBLES[0], painted(MARBLES[1], "blue")], 1 / 3),
    ("counting", MARBLES, 2 / 3),
    ("colors", [BLOCK], 0),
    ("colors", [painted(STAR, "green")], 1 / 3),
    ("colors", [STAR, EXTRA_STAR], 2 / 3),
    ("position", [STAR], 0),
    ("position", [STAR, painted(BLOCK, "red")], 1 / 7),
    ("position", [BLOCK], 2 / 7),
    ("position", [painted(STAR, "blue"), BLOCK], 3 / 7),
    ("position", [moved(STAR, 55, 30), moved(BLOCK, 15, 30)], 4 / 7),
    ("position", [moved(STAR, 30, 15), moved(BLOCK, 30, 45)], 4 / 7),
    ("position", [moved(STAR, 30, 45), moved(BLOCK, 30, 15)], 4 / 7),
    ("position", [moved(STAR, 30, 30), moved(BLOCK, 30, 30)], 4 / 7),
    ("position", [STAR, BLOCK, EXTRA_BLOCK], 5 / 7),
    ("position", [STAR, BLOCK, EXTRA_STAR], 6 / 7),
    ("color_attr", [BLOCK], 0),
    ("color_attr", [painted(STAR, "blue"), painted(BLOCK, "red")], 1 / 6),
    ("color_attr", [painted(STAR, "yellow"), BLOCK], 1 / 6),
    ("color_attr", [STAR], 2 / 6),
    ("color_attr", [STAR, painted(BLOCK, "red")], 3 / 6),
    ("color_attr", [STAR, BLOCK, EXTRA_STAR], 4 / 6),
    ("color_attr", [STAR, BLOCK, EXTRA_BLOCK], 5 / 6),
]


class Found:
    """A detector that finds what it was given."""

    def __init__(self, objects: Sequence[list[Detection]]) -> None:
        self.objects = list(objects)

    def load(self, device: torch.device) -> None:
        return None

    def detect(self, images: Images) -> list[list[Detection]]:
        return self.objects


def scores(credit: str, objects: Sequence[list[Detection]], wanted: Sequence[dict[str, Any]]) -> list[float]:
    reward = GenEval(credit=credit)
    reward.detector = Found(objects)
    prompts = [Prompt(i, "x", "s", metadata) for i, metadata in enumerate(wanted)]
    return list(reward.score(RewardBatch(np.zeros((len(prompts), 8, 8, 3), dtype=np.uint8), prompts)))


@pytest.mark.parametrize("credit", ["strict", "partial", "dense"])
def test_what_was_asked_for_gets_1(credit: str) -> None:
    assert scores(credit, list(RIGHT.values()), [WANTED[task] for task in RIGHT]) == [1] * 6
    bystander = thing("green", "cone", 50, 50)
    assert scores(credit, [[bystander, *objects[::-1]] for objects in RIGHT.values()], list(WANTED.values())) == [1] * 6


@pytest.mark.parametrize(("task", "objects", "share"), WRONG)
def test_one_thing_wrong_gets_0_or_the_share_before_it(task: str, objects: list[Detection], share: float) -> None:
    assert scores("strict", [objects], [WANTED[task]]) == [0]
    assert scores("partial", [objects], [WANTED[task]]) == pytest.approx([share])
    assert share_met(objects[::-1], WANTED[task]) == pytest.approx(share)


def stars(count: int) -> list[Detection]:
    return [thing("red", "star", 15, 5 + 8 * i) for i in range(count)]


DENSE: list[tuple[str, list[Detection], list[float]]] = [
    ("single_object", [], [0]),
    ("single_object", [BLOCK], [0]),
    ("single_object", stars(2), [0]),
    ("single_object", stars(4), [-2]),
    ("two_object", [], [0, 0]),
    ("two_object", [STAR], [1, 0]),
    ("two_object", [*stars(3), BLOCK], [-1, 1]),
    # two red marbles: their number, then how many of them are red
    ("counting", [], [0, 0]),
    ("counting", MARBLES[:1], [1 / 2, 0]),
    ("counting", MARBLES, [1 / 2, 0]),
    ("counting", [*MARBLES, *MARBLES], [-1, 0]),
    ("counting", [MARBLES[0], painted(MARBLES[1], "blue")], [1, 1 / 2]),
    ("counting", [painted(marble, "blue") for marble in MARBLES[:2]], [1, 0]),
    ("colors", [BLOCK], [0, 0]),
    ("colors", [painted(STAR, "green")], [1, 0]),
    ("colors", [STAR, EXTRA_STAR], [0, 0]),
    # a blue block, then a red star left of it
    ("position", [], [0, 0, 0, 0]),
    ("position", [BLOCK], [1, 1, 0, 0]),
    ("position", [STAR], [0, 0, 1, 1, 0]),
    ("position", [STAR, painted(BLOCK, "red")], [1, 0, 1, 1, 0]),
    ("position", [painted(STAR, "blue"), BLOCK], [1, 1, 1, 0]),
    ("position", [moved(STAR, 55, 30), moved(BLOCK, 15, 30)], [1, 1, 1, 1, 0, 1]),
    ("position", [STAR, EXTRA_STAR, BLOCK], [1, 1, 0, 0]),
    ("position", [STAR, BLOCK, EXTRA_BLOCK], [0, 0, 1, 1, 0]),
    ("color_attr", [BLOCK], [0, 0, 1, 1]),
    ("color_attr", [painted(STAR, "blue"), painted(BLOCK, "red")], [1, 0, 1, 0]),
    ("color_attr", [STAR, painted(BLOCK, "red")], [1, 1, 1, 0]),
    ("color_attr", [*stars(3), BLOCK], [-1, 0, 1, 1]),
]
"""By hand: what each requirement of the task earns."""


@pytest.mark.parametrize(("task", "objects", "earned"), DENSE)
def test_dense_credit_is_the_mean_of_what_each_requirement_earns(
    task: str, objects: list[Detection], earned: list[float]
) -> None:
    assert scores("dense", [objects], [WANTED[task]]) == [sum(earned) / len(earned)]
    assert scores("strict", [objects], [WANTED[task]]) == [0]


def test_all_six_tasks_have_a_dense_credit_by_hand() -> None:
    assert {task for task, _, _ in DENSE} == set(WANTED)


def dense_by_cases(objects: Sequence[Detection], include: Sequence[dict[str, Any]], last: int) -> tuple[Any, bool]:
    """What the entry ``last`` earns, as a Counter of Fractions, and whether it is met: every case written out."""
    wanted = include[last]
    found = [o for o in objects if o.name == wanted["class"]]
    many = Fraction(len(found), wanted["count"])
    number = 2 - many if many > 1 else many
    right = sum(o.colour == wanted.get("color", o.colour) for o in found)
    match (many == 1, "color" in wanted, "position" in wanted):
        case (False, False, False):
            return Counter({number: 1}), False
        case (False, _, _):
            return Counter([number, Fraction(0)]), False
        case (True, False, False):
            return Counter({Fraction(1): 1}), True
        case (True, True, False):
            return Counter([Fraction(1), Fraction(right, len(found))]), right == len(found)
        case (True, True, True) if right < len(found):
            return Counter([Fraction(1), Fraction(right, len(found))]), False
    earned = Counter({Fraction(1): 1 + ("color" in wanted)})
    relation, other = wanted["position"]
    if not dense_by_cases(objects, include, other)[1]:
        return earned + Counter({Fraction(0): 1}), False
    targets = [o for o in objects if o.name == include[other]["class"]]
    if all(relation in relations(o, target) for o in found for target in targets):
        return earned + Counter({Fraction(1): 1}), True
    return earned + Counter([Fraction(0), Fraction(1)]), False


def test_dense_credit_is_that_of_the_cases_written_out() -> None:
    dice = random.Random(0)

    def drawn(name: str) -> Detection:
        return thing(dice.choice(("red", "red", "blue")), name, dice.randrange(60), dice.randrange(60))

    for _ in range(3000):
        objects = [drawn(name) for name in ("star", "block") for _ in range(dice.randrange(4))]
        include = [one(name, dice.choice((None, "red")), dice.randint(1, 2)) for name in ("star", "block", "star")]
        for entry in include[1:]:
            if dice.random() < 0.7:
                entry["position"] = [dice.choice(sorted(OPPOSITE)), 0]
        earned = [share for i in range(len(include)) for share in dense_by_cases(objects, include, i)[0].elements()]
        assert dense_credit(objects, {"include": include}) == pytest.approx(float(sum(earned) / len(earned)))


def test_dense_credit_may_be_negative() -> None:
    assert GenEval().traits.range == (0, 1)
    assert GenEval(credit="dense").traits.range == (-math.inf, 1)
    config = RewardConfig(type="geneval", name="objects", params={"credit": "dense"})
    rewards = build_rewards([config])
    reward = rewards["objects"]
    assert isinstance(reward, GenEval)
    reward.detector = Found([stars(4)])
    images = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    prompt = Prompt(0, "x", "s", WANTED["single_object"])
    assert Scorer([config], rewards).score(["objects"], images, [prompt], 1).values.tolist() == [[-2]]


@pytest.mark.parametrize(
    ("relation", "x", "y"), [("left of", 15, 30), ("right of", 45, 30), ("above", 30, 15), ("below", 30, 45)]
)
def test_each_relation_holds_where_it_should(relation: str, x: float, y: float) -> None:
    block = thing("blue", "block", 30, 30)
    for asked in OPPOSITE:
        wanted = {"include": [one("block"), one("star", position=[asked, 0])]}
        assert share_met([moved(STAR, x, y), block], wanted) == (1 if asked == relation else pytest.approx(2 / 3))


def test_a_position_holds_for_every_pair() -> None:
    wanted = {"include": [one("block", count=2), one("star", count=2, position=["above", 0])]}
    blocks = [thing("blue", "block", x, 45) for x in (20, 40)]
    left, right = (thing("red", "star", x, 10) for x in (20, 40))
    assert share_met([*blocks, left, right], wanted) == dense_credit([*blocks, left, right], wanted) == 1
    for objects in ([*blocks, left, moved(right, 40, 60)], [blocks[0], moved(blocks[1], 40, 5), left, right]):
        assert share_met(objects, wanted) == pytest.approx(2 / 3)
        assert dense_credit(objects, wanted) == pytest.approx((1 + 1 + 0 + 1) / 4)


def test_a_position_can_refer_to_any_earlier_object() -> None:
    cone = thing("green", "cone", 30, 10)
    include = [one("cone"), one("block"), one("star", position=["left of", 1])]
    assert share_met([cone, STAR, BLOCK], {"include": include}) == 1
    include[2] = one("star", position=["left of", 0])
    assert share_met([moved(cone, 2, 30), STAR, BLOCK], {"include": include}) == pytest.approx(3 / 4)


def test_the_most_certain_objects_are_looked_at() -> None:
    wanted = {"include": [one("star", "red")]}
    sure, unsure = 0.95, 0.6
    red, blue = thing("red", "star"), thing("blue", "star")
    assert share_met([replace(blue, confidence=unsure), replace(red, confidence=sure)], wanted) == 1
    assert share_met([replace(red, confidence=unsure), replace(blue, confidence=sure)], wanted) == 1 / 2


def test_what_is_excluded_may_not_be_there() -> None:
    wanted = {"include": [one("star")], "exclude": [one("marble"), one("block", count=2)]}
    assert share_met([STAR, BLOCK], wanted) == 1
    assert share_met([STAR, BLOCK, EXTRA_BLOCK], wanted) == pytest.approx(2 / 3)
    assert share_met([STAR, MARBLES[0]], wanted) == pytest.approx(1 / 3)
    assert share_met([MARBLES[0]], wanted) == 0


def test_prompts_without_objects_are_left_to_others() -> None:
    reward = GenEval()
    assert reward.applies_to(Prompt(0, "x", "s", WANTED["colors"]))
    assert not reward.applies_to(Prompt(0, "a red star", "s"))
    assert not reward.applies_to(Prompt(0, 'says "K7"', "s", {"target": "K7"}))
    assert not reward.applies_to(Prompt(0, "x", "s", {"include": []}))


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"include": [one("dog")]}, "asks for 'dog'"),
        ({"include": [one("star"), one("star sign")]}, "asks for 'star sign'"),
        ({"include": [one("Star", "red")]}, "asks for 'Star'"),
        ({"include": [one("star")], "exclude": [one("dog")]}, "asks for 'dog'"),
        ({"include": [one("star", "pink")]}, "asks for the color 'pink'"),
        ({"include": [{**one("star"), "color": None}]}, "asks for the color None"),
    ],
)
def test_what_the_mini_detector_cannot_see_is_refused_and_not_scored(metadata: dict[str, Any], says: str) -> None:
    """Otherwise every picture would score 0, in silence."""
    for path in ("mini", "marble_rl.rewards.builtin.mini_detector:MiniDetector"):
        with pytest.raises(InputError, match=rf"the prompt 'a \?' \(source 's'\) {says}") as refused:
            GenEval(detector=path).applies_to(Prompt(0, "a ?", "s", metadata))
        assert "params: {detector: photo}" in str(refused.value)
        assert "marble, block, cone, star" in str(refused.value)


def test_a_detector_of_ones_own_need_not_say_what_it_knows() -> None:
    assert GenEval(detector=f"{__name__}:SeesNothing").applies_to(Prompt(0, "x", "s", {"include": [one("unicorn")]}))


class SeesNothing:
    def load(self, device: torch.device) -> None:
        return None

    def detect(self, images: Images) -> list[list[Detection]]:
        return [[] for _ in images]


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[3] / "configs" / "prompts").glob("mini-*.jsonl")))
def test_the_mini_worlds_own_prompts_can_be_answered(file: Path) -> None:
    prompts = read_prompt_file(file).prompts
    assert any(GenEval().applies_to(prompt) for prompt in prompts) == ("composition" in file.name)


spans = st.tuples(st.integers(0, 60), st.integers(1, 40)).map(lambda span: (span[0], span[0] + span[1]))
boxes = st.builds(lambda x, y: Detection("star", "red", (x[0], y[0], x[1], y[1]), 0.9), spans, spans)


@given(boxes, boxes)
def test_seen_from_the_other_side_relations_are_opposite(first: Detection, second: Detection) -> None:
    there, back = relations(first, second), relations(second, first)
    assert {OPPOSITE[relation] for relation in there} == back
    assert not there & back
    assert len(there) <= 2
    assert relations(first, first) == set()


@given(boxes, boxes)
def test_relations_are_those_of_geneval(first: Detection, second: Detection) -> None:
    """Its `relative_position`: the offset less a tenth of both sizes, as a share of the whole offset's length."""
    corners = np.array([first.box, second.box], dtype=float).reshape(2, 2, 2)
    offset = corners[0].mean(0) - corners[1].mean(0)
    sizes = np.diff(corners, axis=1).sum((0, 1))
    assume(offset.any())
    across, down = np.maximum(np.abs(offset) - 0.1 * sizes, 0) * np.sign(offset) / np.linalg.norm(offset)
    assume(min(abs(abs(across) - 0.5), abs(abs(down) - 0.5)) > 1e-6)
    named = {"left of": across < -0.5, "right of": across > 0.5, "above": down < -0.5, "below": down > 0.5}
    assert relations(first, second) == {relation for relation, holds in named.items() if holds}


def test_objects_side_by_side_are_not_above_each_other() -> None:
    assert relations(STAR, BLOCK) == {"left of"}
    assert relations(thing("red", "star", 10, 10), thing("red", "star", 50, 50)) == {"left of", "above"}
    assert relations(thing("red", "star", 30, 30), thing("red", "star", 31, 31)) == set()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"detector": "yolo"}, r"detector: .*yolo"),
        ({"detector": "no_such_package:Detector"}, r"detector: .*no_such_package"),
        ({"detector": "marble_rl.rewards.builtin.mini_detector:NoSuch"}, r"detector: .*NoSuch"),
        ({"credit": "lenient"}, r"credit: .*strict.*lenient"),
    ],
)
def test_an_unknown_detector_or_credit_is_refused_by_name(params: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=r"\(objects\)\.params\." + message):
        build_rewards([RewardConfig(type="geneval", name="objects", params=params)])


def test_a_detector_can_be_named_by_its_path() -> None:
    assert isinstance(GenEval(detector="marble_rl.rewards.builtin.mini_detector:MiniDetector").detector, MiniDetector)


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    dice = random.Random(21)
    return [draw_scene("composition", dice) for _ in range(150)]


@pytest.fixture(scope="module")
def pictures(scenes: list[Scene]) -> list[Image.Image]:
    dice = random.Random(22)
    return [render(scene, dice) for scene in scenes]


def passed(scenes: list[Scene], pictures: list[Image.Image]) -> float:
    """Share of the pictures that show what their scene asks for."""
    prompts = [Prompt(i, scene.caption, "composition", scene.metadata) for i, scene in enumerate(scenes)]
    images = np.stack([np.asarray(picture) for picture in pictures])
    return float(np.mean(GenEval().score(RewardBatch(images, prompts))))


def test_rendered_scenes_pass(scenes: list[Scene], pictures: list[Image.Image]) -> None:
    assert {scene.metadata["tag"] for scene in scenes} == set(WANTED)
    assert passed(scenes, pictures) >= 0.97


def test_near_misses_fail(scenes: list[Scene]) -> None:
    dice = random.Random(23)
    assert passed(scenes, [render(near_miss(scene, dice), dice) for scene in scenes]) <= 0.03


@pytest.mark.parametrize("flaw", [blurred, crooked, erased])
def test_heavy_flaws_fail(flaw: Any, scenes: list[Scene], pictures: list[Image.Image]) -> None:
    dice = random.Random(24)
    assert passed(scenes, [flaw(picture, 0.8, dice) for picture in pictures]) < 0.5


def test_objects_are_found_where_they_are(scenes: list[Scene], pictures: list[Image.Image]) -> None:
    found = MiniDetector().detect(np.stack([np.asarray(picture) for picture in pictures]))
    complete = 0
    for scene, objects in zip(scenes, found, strict=True):
        shown = Counter((item.shape, item.colour) for item in scene.items)
        assert not Counter((o.name, o.colour) for o in objects) - shown
        complete += len(objects) == len(scene.items)
        for o in objects:
            centre = ((o.box[0] + o.box[2]) / 2, (o.box[1] + o.box[3]) / 2)
            assert min(np.hypot(centre[0] - i.x * SIZE, centre[1] - i.y * SIZE) for i in scene.items) < 4
            assert 0 < o.confidence <= 1
    assert complete >= 0.97 * len(scenes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_every_shape_is_known_in_every_colour(shape: str, colour: str) -> None:
    for radius in (0.2, 0.25, 0.3):
        picture = render(Scene("", "general", (Item(shape, colour, 0.5, 0.5, radius),)), random.Random(0))
        (found,) = MiniDetector().detect(np.asarray(picture)[None])[0]
        assert (found.name, found.colour) == (shape, colour)
        low, high = (0.5 - radius) * SIZE, (0.5 + radius) * SIZE
        assert found.box == pytest.approx((low, low, high, high), abs=5)


@pytest.mark.parametrize(
    "outline",
    [
        [(14, 26), (26, 26), (26, 14), (38, 14), (38, 26), (50, 26), (50, 38), (38, 38), (38, 50), (26, 50), (26, 38)],
        [(14, 14), (24, 14), (24, 40), (50, 40), (50, 50), (14, 50)],
        [(14, 14), (50, 14), (32, 50)],
        [(14, 14), (50, 50), (50, 14), (14, 50)],
        [(4, 28), (60, 28), (60, 36), (4, 36)],
    ],
    ids=["a cross", "an L", "a cone on its head", "a bow", "a bar"],
)
def test_what_has_no_outline_of_the_world_is_not_found(outline: list[tuple[int, int]]) -> None:
    picture = render(Scene("", "general"), random.Random(0))
    ImageDraw.Draw(picture).polygon(outline, fill=PAINT["red"])
    assert MiniDetector().detect(np.asarray(picture)[None]) == [[]]


def test_what_is_found_does_not_depend_on_the_batch(pictures: list[Image.Image]) -> None:
    images = np.stack([np.asarray(picture) for picture in pictures[:12]])
    together = MiniDetector().detect(images)
    assert together == [MiniDetector().detect(image[None])[0] for image in images]
    assert together[::-1] == MiniDetector().detect(images[::-1])


def test_noise_and_empty_pictures_show_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (8, SIZE, SIZE, 3), dtype=np.uint8)
    blank = np.stack([np.full((SIZE, SIZE, 3), grey, dtype=np.uint8) for grey in (0, 90, 128, 255)])
    ground = np.stack([np.asarray(render(Scene("", "general"), random.Random(i))) for i in range(4)])
    for images in (noise, blank, ground):
        assert MiniDetector().detect(images) == [[]] * len(images)


def test_a_picture_that_is_paint_all_over_shows_nothing() -> None:
    """Otherwise the cheapest `red block` is a red picture."""
    images = np.stack([np.full((SIZE, SIZE, 3), paint, dtype=np.uint8) for paint in PAINT.values()])
    assert MiniDetector().detect(images) == [[]] * len(PAINT)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"include": [{"class": "star"}]}, "include.0.count"),
        ({"include": [{"class": "star", "count": 0}]}, "include.0.count: got 0"),
        ({"include": [{"class": "", "count": 1}]}, "include.0.class"),
        ({"include": "star"}, 'include: got "star"'),
        ({"include": [one("star", position=["beside", 0])]}, 'include.0.position.0: got "beside"'),
        ({"include": [one("star", position=["above", 0])]}, "include.0.position: 0 is no earlier entry"),
        ({"include": [one("star")], "exclude": [3]}, "exclude.0: got 3"),
    ],
)
def test_metadata_in_another_form_is_refused(metadata: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)) as error:
        GenEval().applies_to(Prompt(0, "a star", "s", metadata))
    assert "'a star'" in str(error.value)
