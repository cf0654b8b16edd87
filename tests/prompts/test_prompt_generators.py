"""Generated prompts: over many seeds, the text says what the metadata says, and nothing repeats or overlaps."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from marble_rl import load_config
from marble_rl.config import dump_config
from marble_rl.errors import InputError
from marble_rl.prompts import load_prompts
from marble_rl.prompts.files import Split
from marble_rl.prompts.geneval import COLOURABLE, OBJECTS, TASKS, TRAINING_MIX, kinds
from marble_rl.prompts.kinds import deal, different, digits, shuffled
from marble_rl.prompts.meaning import meaning
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.prompts.wanted import wanted_text
from marble_rl.rewards.builtin.colour import Colour
from marble_rl.rewards.builtin.detection import Detection
from marble_rl.rewards.builtin.geneval import GenEval, share_met
from marble_rl.rewards.builtin.ocr import Ocr
from marble_rl.runs.inputs import check_inputs
from marble_rl.types import Prompt

EVERY_TASK = dict.fromkeys(TASKS, 1.0)
SEEDS = range(12)
KINDS = ("geneval", "ocr")
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny.yaml"


def source(**settings: Any) -> PromptSourceConfig:
    return PromptSourceConfig.model_validate({"name": "made", "generate": settings})


def made(split: Split = "train", **settings: Any) -> list[Prompt]:
    return load_prompts([source(**settings)], f"prompts.{split}", split).prompts


def asked_for(prompts: list[Prompt]) -> set[str]:
    return {meaning(p.text, p.metadata) for p in prompts}


THING = re.compile(
    r"(a|an|two|three|four) (?:(?:pair|head)s? of )?"
    r"(?:(red|orange|yellow|green|blue|purple|pink|brown|black|white) )?(.+)"
)
NUMBERS = {"a": 1, "an": 1, "two": 2, "three": 3, "four": 4}
IRREGULAR = {
    "people": "person",
    "buses": "bus",
    "benches": "bench",
    "sheep": "sheep",
    "skis": "skis",
    "wine glasses": "wine glass",
    "knives": "knife",
    "sandwiches": "sandwich",
    "broccoli": "broccoli",
    "couches": "couch",
    "computer mice": "computer mouse",
    "scissors": "scissors",
    "toothbrushes": "toothbrush",
}
"""Everything else ends in a plain s."""


def parse(text: str) -> list[dict[str, Any]]:
    """GenEval's `include`, read off the words of a prompt alone."""
    parts = re.fullmatch(r"a photo of (.+?)(?: (and|left of|right of|above|below) (an? .+))?", text)
    assert parts is not None, text
    first, link, second = parts.groups()
    if link is None:
        return [parse_thing(first)]
    if link == "and":
        return [parse_thing(first), parse_thing(second)]
    return [parse_thing(second), {**parse_thing(first), "position": [link, 0]}]


def parse_thing(text: str) -> dict[str, Any]:
    parts = THING.fullmatch(text)
    assert parts is not None, text
    number, colour, noun = parts.groups()
    if number in ("a", "an"):
        assert (number == "an") == (text.split()[1][0] in "aeiou"), text
    else:
        assert noun in IRREGULAR or (noun.endswith("s") and noun[:-1] not in IRREGULAR.values()), text
        noun = IRREGULAR.get(noun, noun[:-1])
    assert noun in OBJECTS, text
    return {"class": noun, "count": NUMBERS[number], **({"color": colour} if colour else {})}


@pytest.mark.parametrize("seed", SEEDS)
def test_geneval_text_and_metadata_agree(seed: int) -> None:
    prompts = made(type="geneval", count=300, seed=seed, tasks=EVERY_TASK)
    assert Counter(p.metadata["tag"] for p in prompts) == dict.fromkeys(TASKS, 50)
    assert len({p.text for p in prompts}) == 300
    for prompt in prompts:
        include = prompt.metadata["include"]
        assert parse(prompt.text) == include
        assert json.loads(json.dumps(prompt.metadata)) == prompt.metadata
        counted = [{**entry, "count": entry["count"] + 1} for entry in include]
        assert prompt.metadata.get("exclude") == (counted if prompt.metadata["tag"] == "counting" else None)


def test_every_prompt_of_the_small_tasks_reads_back() -> None:
    for task, kind in kinds(EVERY_TASK, "generate").items():
        numbers = range(kind.size) if kind.size < 1000 else random.Random(0).sample(range(kind.size), 1000)
        rows = [kind.write(number) for number in numbers]
        assert len({row.text for row in rows}) == len(numbers)
        assert all(parse(row.text) == row.metadata["include"] for row in rows), task


def test_geneval_sets_its_tasks_as_geneval_does() -> None:
    """What each task may ask for, over more prompts than any rule could pass by luck."""
    for prompt in made(type="geneval", count=400, part="all", tasks={"color_attr": 1, "position": 1, "two_object": 1}):
        first, second = prompt.metadata["include"]
        assert first["class"] != second["class"]
        assert first.get("color") != second.get("color") or "color" not in first
        assert ("color" in first, "color" in second) == (prompt.metadata["tag"] == "color_attr",) * 2
        assert ("position" in second) == (prompt.metadata["tag"] == "position")
    coloured = made(type="geneval", count=790, part="all", tasks={"colors": 1})
    assert {entry["class"] for p in coloured for entry in p.metadata["include"]} == set(COLOURABLE)
    assert "person" not in COLOURABLE
    counted = made(type="geneval", count=240, part="all", tasks={"counting": 1})
    assert Counter(p.metadata["include"][0]["count"] for p in counted) == {2: 80, 3: 80, 4: 80}


def test_the_geneval_reward_checks_generated_prompts() -> None:
    """A picture with what is asked for scores 1; one with nothing in it 0; one too many of the counted, less than 1."""
    boxes = {
        "left of": (0, 50, 10, 60),
        "right of": (90, 50, 99, 60),
        "above": (50, 0, 60, 10),
        "below": (50, 90, 60, 99),
    }
    for prompt in made(type="geneval", count=300, tasks=EVERY_TASK):
        assert GenEval(detector="photo").applies_to(prompt)
        assert wanted_text(prompt) is None
        shown = []
        for entry in prompt.metadata["include"]:
            box = boxes[entry["position"][0]] if "position" in entry else (50, 50, 60, 60)
            shown += [Detection(entry["class"], entry.get("color", ""), box, 1.0)] * entry["count"]
        assert share_met(shown, prompt.metadata) == 1
        assert share_met([], prompt.metadata) == 0
        if prompt.metadata["tag"] == "counting":
            assert share_met([*shown, shown[0]], prompt.metadata) < 1


def test_default_mix_is_that_of_flow_grpo_from_the_start() -> None:
    prompts = made(type="geneval", count=170)
    assert Counter(p.metadata["tag"] for p in prompts) == {task: 10 * weight for task, weight in TRAINING_MIX.items()}
    for n in range(1, 171):
        dealt = Counter(p.metadata["tag"] for p in prompts[:n])
        assert all(abs(dealt[task] - n * weight / 17) < 1 for task, weight in TRAINING_MIX.items())


@pytest.mark.parametrize("seed", SEEDS)
def test_ocr_prompts_ask_for_their_target(seed: int) -> None:
    prompts = made(type="ocr", count=300, seed=seed)
    assert len({p.text for p in prompts}) == 300
    lengths: Counter[tuple[int, bool]] = Counter()
    for prompt in prompts:
        target = prompt.metadata["target"]
        assert Ocr().applies_to(prompt)
        assert not GenEval().applies_to(prompt)
        assert not Colour().applies_to(prompt)
        assert wanted_text(prompt) == target
        assert wanted_text(Prompt(0, prompt.text, "")) == target == prompt.text.split('"')[1]
        assert re.fullmatch(r"[A-Za-z]+( [A-Za-z]+)*( [1-9][0-9]{0,2})?", target)
        words = target.split()
        lengths[len(words) - words[-1].isdigit(), words[-1].isdigit()] += 1
    assert lengths == {(n, number): 15 if number else 60 for n in range(1, 5) for number in (False, True)}


@pytest.mark.parametrize(("words", "numbers"), [((1, 1), 0.0), ((2, 3), 1.0), ((16, 16), 0.5)])
def test_ocr_lengths(words: tuple[int, int], numbers: float) -> None:
    prompts = made(type="ocr", count=40, words=words, numbers=numbers)
    texts = [p.metadata["target"].split() for p in prompts]
    assert sum(text[-1].isdigit() for text in texts) == 40 * numbers
    assert {len(text) - text[-1].isdigit() for text in texts} == set(range(words[0], words[1] + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_prompts_do_not_depend_on_the_count(kind: str) -> None:
    longer = made(type=kind, count=150, seed=3)
    assert made(type=kind, count=40, seed=3) == longer[:40]
    assert made(type=kind, count=40, seed=4) != longer[:40]


def test_prompts_stay_what_they_are() -> None:
    """A run's config names a seed, not prompts: a change here would change old runs."""
    assert [p.text for p in made(type="geneval", count=4)] == [
        "a photo of a sheep above an apple",
        "a photo of two forks",
        "a photo of a white cell phone and a purple sandwich",
        "a photo of a suitcase above a computer keyboard",
    ]
    assert [p.text for p in made(type="ocr", count=2)] == [
        'a photo of a chalkboard with the text "Spring", in the rain',
        'an oil painting of a cinema ticket that reads "PAPER WILD", at night',
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "geneval", "count": 60, "tasks": EVERY_TASK},
        {"type": "ocr", "count": 150, "words": [1, 1], "numbers": 0},
    ],
    ids=lambda s: s["type"],
)
def test_training_and_held_out_prompts_ask_for_different_things(settings: dict[str, Any]) -> None:
    trained = set().union(*(asked_for(made("train", **settings, seed=seed)) for seed in SEEDS))
    held_out = set().union(*(asked_for(made("heldout", **settings, seed=seed)) for seed in SEEDS))
    assert not trained & held_out
    everything = asked_for(made("heldout", **{**settings, "part": "all"}))
    assert everything & trained
    assert everything & held_out


def test_part_overrules_the_list_in_which_a_source_stands() -> None:
    assert made("train", type="ocr", count=9, part="heldout") == made("heldout", type="ocr", count=9)


def test_a_run_evaluates_on_the_held_out_part() -> None:
    generate = "{name: made, generate: {type: geneval, count: 90}}"
    overrides = [
        "model.path=mini",
        f"prompts={{train: [{generate}], heldout: [{generate}]}}",
        "rewards=[{name: geneval, type: geneval, params: {detector: photo}}]",
    ]
    inputs = check_inputs(load_config(CONFIG, overrides))
    assert [len(inputs.train.prompts), len(inputs.heldout.prompts)] == [90, 90]
    assert not asked_for(inputs.train.prompts) & asked_for(inputs.heldout.prompts)


def test_objects_that_the_detector_cannot_see_are_refused_before_a_model_is_loaded() -> None:
    overrides = [
        "model.path=mini",
        "prompts={train: [{name: made, generate: {type: geneval, count: 90}}]}",
        "rewards=[{name: objects, type: geneval}]",
    ]
    first = made(type="geneval", count=1)[0]
    with pytest.raises(InputError) as refused:
        check_inputs(load_config(CONFIG, overrides))
    for part in ("rewards (objects)", repr(first.text), repr(first.metadata["include"][0]["class"]), "detector: photo"):
        assert part in str(refused.value)


def test_a_fifth_is_held_out() -> None:
    # 6320 ordered pairs are 3160 things to ask for; three standard deviations around a fifth of them.
    with pytest.raises(InputError, match=r"after \d+ in this mix") as refused:
        made("heldout", type="geneval", count=10_000, tasks={"two_object": 1})
    (held_out,) = re.findall(r"after (\d+)", str(refused.value))
    assert abs(int(held_out) / 2 - 3160 / 5) < 3 * (3160 * 0.2 * 0.8) ** 0.5


def test_order_and_mirroring_do_not_change_what_is_asked_for() -> None:
    def of(*include: dict[str, Any]) -> str:
        return meaning("a prompt", {"include": [{"count": 1, **entry} for entry in include]})

    dog, cat = {"class": "dog"}, {"class": "cat"}
    assert of(dog, cat) == of(cat, dog)
    for relation, mirrored in (("left of", "right of"), ("above", "below")):
        beside = of(cat, {**dog, "position": [relation, 0]})
        assert beside == of(dog, {**cat, "position": [mirrored, 0]})
        assert beside != of(cat, {**dog, "position": [mirrored, 0]})
        assert beside != of(cat, dog)
    red, blue = {"color": "red"}, {"color": "blue"}
    assert of({**dog, **red}, {**cat, **blue}) == of({**cat, **blue}, {**dog, **red})
    assert of({**dog, **red}, {**cat, **blue}) != of({**dog, **blue}, {**cat, **red})
    assert of({**dog, "count": 2}) != of(dog)
    assert meaning('a sign "Open  LATE"', {}) == meaning("a cup", {"target": "open late"}) != meaning("open late", {})


def test_excluded_prompts_are_asked_for_in_no_words(tmp_path: Path) -> None:
    benchmark = made(type="geneval", count=100, part="all", seed=9)
    # As GenEval's file: other words for some of them, and the objects of a pair the other way round.
    lines = [{**p.metadata, "prompt": "as GenEval words it"} for p in benchmark]
    lines += [{**line, "include": line["include"][::-1]} for line in lines if line["tag"] == "two_object"]
    (tmp_path / "test_metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings: dict[str, Any] = {"type": "geneval", "count": 500, "part": "all"}
    assert asked_for(made(**settings)) & asked_for(benchmark)
    for exclude in (tmp_path, tmp_path / "test_metadata.jsonl"):
        assert not asked_for(made(**settings, exclude=exclude)) & asked_for(benchmark)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "geneval", "tasks": {"countin": 1}}, r"\.tasks: unknown name 'countin'\. Did you mean 'counting'\?"),
        ({"type": "geneval", "tasks": {"counting": 0}}, r"\.tasks: no task has a weight above 0"),
        ({"type": "geneval", "tasks": {}}, r"\.tasks: no task has a weight above 0"),
        (
            {"type": "geneval", "count": 241, "part": "all", "tasks": {"counting": 1}},
            r"\.count: 241.*ask for 240 at most",
        ),
        ({"type": "geneval", "count": 9000}, r"\.count: 9000.*no more prompts of 'counting' after \d+.*part train"),
        ({"type": "ocr", "words": [3, 2]}, r"\.words: 3 words at least and 2 at most; swap them"),
        ({"type": "ocr", "exclude": "absent.jsonl"}, r"\.exclude: prompt file not found: absent\.jsonl"),
    ],
)
def test_what_cannot_be_generated(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"^prompts\.train\.0 \(made\)\.generate{message}"):
        made(**{"count": 10, **settings})


def test_an_excluded_file_with_broken_metadata_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a dog", "include": ["dog"]}')
    with pytest.raises(InputError, match=r"generate\.exclude: .*bad\.jsonl: the prompt 'a dog': its `include` is not"):
        made(type="geneval", count=5, exclude=tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (
            "{type: geneval, count: 0}",
            r"prompts\.train\.0\.generate\.count: expected a number greater than or equal to 1, got 0",
        ),
        ("{type: geneval}", r"prompts\.train\.0\.generate\.count: is missing; add it"),
        ("{type: geneva, count: 5}", r"generate: unknown type 'geneva'\. Did you mean 'geneval'\?"),
        ("{type: ocr, count: 5, word: 2}", r"generate\.word: unknown key 'word'\. Did you mean 'words'\?"),
        ("{type: ocr, count: 5, tasks: {}}", r"generate\.tasks: unknown key 'tasks'"),
        (
            "{type: geneval, count: 5, tasks: {counting: -1}}",
            r"generate\.tasks\.counting: expected a number greater than or equal to 0, got -1",
        ),
        (
            "{type: geneval, count: 5, tasks: {counting: .inf}}",
            r"generate\.tasks\.counting: expected a finite number, got Infinity",
        ),
        ("{type: ocr, count: 5, numbers: 2}", r"generate\.numbers: expected a number less than or equal to 1, got 2"),
        (
            "{type: ocr, count: 5, words: [0, 3]}",
            r"generate\.words\.0: expected a number greater than or equal to 1, got 0",
        ),
        (
            "{type: ocr, count: 5, part: test}",
            r"generate\.part: expected 'train', 'heldout' or 'all', got \"test\"",
        ),
    ],
)
def test_bad_settings_name_their_key(generate: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(CONFIG, [f"prompts.train.0={{name: made, generate: {generate}}}"])


def test_one_way_to_give_prompts() -> None:
    for given in ({}, {"texts": ["a"], "generate": {"type": "ocr", "count": 2}}, {"texts": ["a"], "file": "a.txt"}):
        both = PromptSourceConfig.model_validate({"name": "a", **given})
        with pytest.raises(InputError, match="give exactly one of `file`, `texts` and `generate`, not"):
            load_prompts([both], "prompts.train")


def test_a_config_that_generates_is_saved_with_absolute_files(tmp_path: Path) -> None:
    made, written = (f"{{name: {kind}, generate: {{type: {kind}, count: 5, exclude: b.jsonl}}}}" for kind in KINDS)
    config = load_config(CONFIG, [f"prompts.train=[{made}, {written}]"])
    for source in config.prompts.train:
        assert source.generate is not None
        assert source.generate.exclude == CONFIG.parent / "b.jsonl"
    (tmp_path / "config.json").write_text(dump_config(config))
    assert load_config(tmp_path / "config.json") == config


@pytest.mark.parametrize("size", [0, 1, 2, 7, 100])
def test_shuffled_is_a_permutation(size: int) -> None:
    assert sorted(shuffled(size, random.Random(1))) == list(range(size))


def test_shuffled_is_fair() -> None:
    orders = Counter(tuple(shuffled(3, random.Random(seed))) for seed in range(6000))
    assert len(orders) == 6
    assert all(abs(count - 1000) < 5 * (6000 * 5 / 36) ** 0.5 for count in orders.values())


def test_digits_and_different_reach_every_choice_once() -> None:
    pairs = {tuple(different(digits(number, 5, 4, 3))) for number in range(60)}
    assert len(pairs) == 60
    assert all(sorted(set(chosen)) == sorted(chosen) and max(chosen) < 5 for chosen in pairs)


def test_deal_leaves_out_what_has_no_weight() -> None:
    assert list(deal({"a": 1, "b": 0, "c": 3}, 8)).count("c") == 6
    assert "b" not in set(deal({"a": 1, "b": 0, "c": 3}, 100))
