"""The report of a run: built from a real one with hostile prompts, and from what is left when parts are missing."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from comparisons import write_comparison, write_jobs
from marble_rl.bootstrap import Difference
from marble_rl.config import load_config
from marble_rl.errors import InputError
from marble_rl.report import writing
from marble_rl.report.comparison import comparison_page
from marble_rl.report.diagnosis import Direction, StoredDiagnosis
from marble_rl.report.evaluation import StoredEvaluation
from marble_rl.report.jobs import shown_methods
from marble_rl.report.page import run_page
from marble_rl.report.reading import RunData, read_run
from marble_rl.report.verdicts import Verdict, fewer_conflicts, verdicts
from marble_rl.report.wording import MINUS, memory
from marble_rl.report.writing import watch_report, write_report
from runs import base_config, marble, train, write_config

HOSTILE = [
    "<script>alert('a')</script> red",
    "</script><img src=x onerror=alert(2)> \"quoted\" & 'single'",
    "emoji 🪀 and Ünïcödé, right to left \u202e gnirts",
    "{{ 7 * 7 }} {% raw %} ${x}",
    "very long " + "and longer " * 400,
    "</style></textarea><!-- -->",
]


@pytest.fixture(scope="module")
def run(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained, evaluated and diagnosed through the command line; one reward is held out, one is a specialist."""
    folder = tmp_path_factory.mktemp("report")
    rewards = base_config(tiny_sd3)["rewards"]
    rewards[1]["held_out"] = True
    prompts = {"train": [{"name": "odd", "texts": HOSTILE}, {"name": "plain", "texts": ["a red cup", "a blue cup"]}]}
    config = write_config(folder / "config.yaml", tiny_sd3, rewards=rewards, prompts=prompts)
    train(config, folder / "run", "--set", "trainer.eval_every=4")
    for command in (("evaluate", folder / "run"), ("diagnose", folder / "run", "--batches", 6)):
        outcome = marble(*command)
        assert outcome.code == 0, outcome.err
    return folder / "run"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "lora")))


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(folder: Path) -> Page:
    return Page(run_page(read_run(folder)))


def test_the_command_writes_one_file_with_everything_in_it(copy: Path) -> None:
    outcome = marble("report", copy)
    assert outcome.code == 0, outcome.err
    html = (copy / "report.html").read_text()
    assert len(html) < 3_000_000
    page = Page(html)
    for _, attributes in page.tags:
        for key in ("src", "href"):
            assert (attributes.get(key) or "#").startswith(("data:", "#"))
    assert "url(" not in html
    assert "@import" not in html
    assert not re.search(r"\b(nan|inf|infinity|undefined)\b", page.text + " ".join(map(str, page.tags)), re.IGNORECASE)
    assert "data-refresh" not in html
    assert not list(copy.glob(".report*"))


def test_hostile_prompts_are_text_and_nothing_else(copy: Path) -> None:
    page = page_of(copy)
    scripts = [attributes for attributes in page.of("script") if attributes.get("type") != "application/json"]
    assert len(scripts) == 1
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    shown = [prompt for prompt in HOSTILE if prompt in page.text]
    assert set(HOSTILE[:2]) <= set(shown)
    assert "{{ 7 * 7 }}" in page.text


def test_every_picture_has_its_prompt(copy: Path) -> None:
    page = page_of(copy)
    prompts = [*HOSTILE, "a red cup", "a blue cup"]
    pictures = page.of("img")
    assert len(pictures) >= 2 * 6  # six prompts before and after, and rows of training samples
    for picture in pictures:
        assert str(picture["src"]).startswith("data:image/webp;base64,")
        assert any(prompt in str(picture["alt"]) for prompt in prompts)


def test_a_lone_surrogate_does_not_stop_the_page(copy: Path) -> None:
    scores = copy / "evaluation" / "scores.json"
    scores.write_text(scores.read_text().replace("a red cup", "a \\ud800 cup"))
    assert "a ? cup" in write_report(copy).read_text()


def test_scores_cannot_pull_other_files_into_the_page(copy: Path) -> None:
    Image.new("RGB", (8, 8)).save(copy.parent / "secret.webp")
    scores = copy / "evaluation" / "scores.json"
    tree = json.loads(scores.read_text())
    tree["pictures"] = [{"row": 0, "files": {"base": "../../secret.webp"}}]
    scores.write_text(json.dumps(tree))
    assert "secret.webp could not be shown" in page_of(copy).text


def edit_lines(run: Path, change: Callable[[list[str]], list[str]]) -> None:
    file = run / "metrics.jsonl"
    file.write_text("".join(f"{line}\n" for line in change(file.read_text().splitlines())))


def without(prefix: str) -> Callable[[list[str]], list[str]]:
    def change(lines: list[str]) -> list[str]:
        trees = [json.loads(line) for line in lines]
        return [json.dumps({k: v for k, v in tree.items() if not k.startswith(prefix)}) for tree in trees]

    return change


def edit_diagnosis(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = run / "diagnosis" / "diagnosis.json"
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no evaluation": (lambda run: shutil.rmtree(run / "evaluation"), "Not evaluated."),
    "no samples": (lambda run: shutil.rmtree(run / "samples"), "Before and after"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "There is no metrics.jsonl yet"),
    "empty metrics": (lambda run: (run / "metrics.jsonl").write_text(""), "No step was logged yet."),
    "one step": (lambda run: edit_lines(run, lambda lines: lines[:1]), "1 of 8 steps are done"),
    "two steps": (lambda run: edit_lines(run, lambda lines: lines[:2]), "2 of 8 steps are done"),
    "cut short": (lambda run: edit_lines(run, lambda x: [*x[:-1], x[-1][:40]]), "1 of 8 lines of metrics.jsonl"),
    "not numbers": (
        lambda run: edit_lines(run, lambda x: [re.sub(r'"reward/small": [^,]*', '"reward/small": NaN', y) for y in x]),
        "8 values in metrics.jsonl are not finite numbers",
    ),
    "no rewards": (lambda run: edit_lines(run, without("reward/")), "Rewards during training"),
    "no times": (lambda run: edit_lines(run, without("time/")), "No times were logged."),
    "steps only": (lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n'), "Not measured"),
    "no harmony": (lambda run: edit_lines(run, without("heldout/")), "In batch: worst cosine"),
    "scores cut short": (
        lambda run: (run / "evaluation" / "scores.json").write_text('{"step": 8,'),
        "evaluation/scores.json is not what this version of marble writes",
    ),
    "scores of another form": (
        lambda run: (run / "evaluation" / "scores.json").write_text('{"weights": {"ema": []}}'),
        "evaluation/scores.json is not what this version of marble writes",
    ),
    "no diagnosis": (lambda run: shutil.rmtree(run / "diagnosis"), "Not diagnosed. marble diagnose RUN measures"),
    "diagnosis cut short": (
        lambda run: (run / "diagnosis" / "diagnosis.json").write_text('{"names": ["small"],'),
        "diagnosis/diagnosis.json is not what this version of marble writes",
    ),
    "diagnosis of another form": (
        lambda run: edit_diagnosis(run, lambda tree: tree["cosines"].pop()),
        "diagnosis/diagnosis.json is not what this version of marble writes",
    ),
    "diagnosis of other directions": (
        lambda run: edit_diagnosis(run, lambda tree: tree["directions"].pop("weighted_sum")),
        "the diagnosis did not measure both of them",
    ),
    "diagnosis that cannot tell": (
        lambda run: edit_diagnosis(run, lambda tree: tree.update(cosines=[[None] * 2] * 2, signal={"1.0": [None] * 2})),
        "Cosines between rewards",
    ),
    "diagnosis of an older version": (
        lambda run: edit_diagnosis(run, lambda tree: [tree.pop(key) for key in ("larger", "advantages")]),
        "Another batch: worst cosine",
    ),
    "nothing on specialists": (
        lambda run: [shutil.rmtree(run / name) for name in ("diagnosis", "evaluation")],
        "Nothing is known yet on which prompts teach which reward",
    ),
    "no memory": (lambda run: edit_lines(run, without("memory/")), "Memory was not logged"),
    "a broken picture": (
        lambda run: next((run / "evaluation" / "images").glob("*.webp")).write_bytes(b"RIFF"),
        "could not be shown",
    ),
    "a broken grid": (lambda run: (run / "samples" / "step-0.png").write_bytes(b""), "step-0.png could not be shown"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_missing_is_said_and_the_rest_is_shown(copy: Path, damage: str) -> None:
    destroy, said = DAMAGE[damage]
    destroy(copy)
    page = page_of(copy)
    assert said in page.text
    assert not re.search(r"\bnan\b", page.text, re.IGNORECASE)


def test_a_diagnosis_is_shown_with_whatever_directions_it_has(copy: Path) -> None:
    def one_more(tree: dict[str, Any]) -> None:
        tree["directions"]["<new>"] = tree["directions"]["marble"]
        tree["cosines"][0][1] = -0.123

    edit_diagnosis(copy, one_more)
    page = page_of(copy)
    for text in (
        "On fresh batches, does MARBLE work against rewards less often",
        "6 fresh batches of 8 images",
        "after step 8",
        "Another batch: worst cosine",
        "Own batch: conflict rate",
        "the min-norm point of this batch's unit gradients",
        "between_refreshes",
        "<new>",
        "Cosines between rewards",
        "Correlations of advantages",
        "Signal by batch size",
        "Worst cosine by batch size",
        "Length of the common direction",
        "A constructed conflict",
        "Advantages of samples",
        "Advantages by prompt source",
        "Gain by prompt source",
    ):
        assert text in page.text
    assert page.of("new") == []
    assert f"small, colour: {MINUS}0.123" in page.text


def test_gains_by_source_are_in_spreads_and_only_where_a_reward_applies(copy: Path) -> None:
    evaluation = read_run(copy).evaluation
    assert evaluation is not None
    weights = json.loads((copy / "evaluation" / "scores.json").read_text())["weights"]
    pairs = list(zip(weights["base"]["images"], weights["ema"]["images"], strict=True))
    plain = [b["scores"]["small"] - a["scores"]["small"] for a, b in pairs if a["source"] == "plain"]
    expected = sum(plain) / len(plain) / evaluation.spread["small"]
    assert evaluation.gains["plain"]["small"] == pytest.approx(expected)
    applies = {(a["source"], n) for a, _ in pairs for n, score in a["scores"].items() if score is not None}
    assert {(source, n) for source, row in evaluation.gains.items() for n in row} == applies


def test_memory_is_logged_and_shown(copy: Path) -> None:
    peaks = read_run(copy).series("memory/peak_mb").values
    assert len(peaks) == 8
    assert all(100 < low <= high < 1e6 for low, high in itertools.pairwise(peaks))
    page = page_of(copy)
    assert "Peak memory, MiB" in page.text
    assert f"memory at the highest point{memory(peaks[-1])}" in page.text


def test_older_evaluations_and_grids_have_their_prompts_written_in_them(copy: Path) -> None:
    scores = copy / "evaluation" / "scores.json"
    tree = json.loads(scores.read_text())
    del tree["pictures"]
    scores.write_text(json.dumps(tree))
    for grid in (copy / "samples").glob("*.png"):
        Image.fromarray(np.asarray(Image.open(grid))).save(grid)
    page = page_of(copy)
    assert all("under its prompt" in str(picture["alt"]) for picture in page.of("img"))
    assert len(page.of("img")) == 1 + len(list((copy / "samples").iterdir()))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, copy: Path) -> None:
    for target, reason in ((tmp_path / "none", "is not a folder"), (tmp_path, "has no config.json")):
        outcome = marble("report", target)
        assert outcome.code == 2
        assert reason in outcome.err
    tree = json.loads((copy / "config.json").read_text())
    tree["balance"]["temperature"] = 1
    (copy / "config.json").write_text(json.dumps(tree))
    outcome = marble("report", copy)
    assert outcome.code == 2
    assert "its config is not one that this version of marble" in outcome.err
    assert "temperature" in outcome.err


def test_a_file_that_cannot_be_written_is_bad_input(copy: Path) -> None:
    (copy / "file").write_text("")
    with pytest.raises(InputError, match="--out: cannot write"):
        write_report(copy, copy / "file" / "report.html")


def test_a_run_that_goes_on_is_told_from_one_that_stopped(copy: Path) -> None:
    assert "All 8 steps are done" in page_of(copy).text
    edit_lines(copy, lambda lines: lines[:5])
    assert "5 of 8 steps are done, about" in page_of(copy).text
    later = run_page(read_run(copy), now=time.time() + 7200)
    assert "the last was logged 2 h 0 min ago" in Page(later).text


def test_watching_builds_again_when_something_is_new(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three polls: nothing new, a new line, Ctrl-C. Only a watched page reloads itself."""
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    edit_lines(copy, lambda _: lines[:5])
    polls, built = [], []

    def sleep(_: float) -> None:
        polls.append(len(built))
        if len(polls) == 2:
            edit_lines(copy, lambda _: lines[:6])
        if len(polls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(writing.time, "sleep", sleep)
    last = watch_report(copy, None, lambda file: built.append(file.read_text()))
    assert polls == [1, 1, 2, 2]
    assert ["5 of 8 steps" in built[0], "6 of 8 steps" in built[1]] == [True, True]
    assert all('data-refresh="5"' in html for html in built)
    assert "data-refresh" not in last.read_text()


def test_a_long_run_with_many_rewards_and_pictures_stays_small(copy: Path, tiny_sd3: Path) -> None:
    names = [f"reward_with_a_long_name_{i}" for i in range(12)]
    config = write_config(
        copy / "c.yaml", tiny_sd3, rewards=[{"name": n, "type": "brightness"} for n in names], trainer={"steps": 500}
    )
    dice = np.random.default_rng(0)
    lines = []
    for step in range(500):
        line = {f"{key}/{n}": float(dice.normal()) for n in names for key in ("reward", "alpha_bar", "signal")}
        lines.append({"step": step, "time/rollout": 1.0, "heldout/min_cos": 0.1, "ws_heldout/min_cos": 0.0, **line})
    noise = dice.integers(0, 255, (1100, 832, 3), dtype=np.uint8)
    samples = [(step, copy / "samples" / f"step-{step}.png") for step in range(9)]
    Image.fromarray(noise).save(copy / "noise.png")
    for _, file in samples:
        shutil.copy(copy / "noise.png", file)
    everyone = [("source", "a prompt of many words " * 9, dice.normal(size=12).tolist()) for _ in range(5000)]
    diagnosis = replace(
        diagnosed((0.1, 0.2), (0.3, 0.5)), rewards=names, cosines=[[0.5] * 12] * 12, signal={}, samples=everyone
    )
    began = time.process_time()
    html = run_page(RunData(copy, load_config(config), lines, None, samples, time.time(), diagnosis=diagnosis))
    assert time.process_time() - began < 20
    assert len(html) < 3_000_000
    assert "One sample in 13 of one batch" in html
    assert "Some pictures were left out" in html
    assert html.count("data:image/webp") == 2


@pytest.mark.parametrize(
    "balance",
    [
        {"type": "weighted_sum"},
        {"type": "gdpo"},
        {"type": "fixed"},
        {"type": "single", "reward": "small"},
        {"type": "sequential", "stages": [{"reward": "small", "steps": 2}]},
        {"type": "dropout"},
        {"type": "min_variance"},
    ],
    ids=lambda balance: balance["type"],
)
def test_other_ways_to_balance_have_no_harmony_to_show(tiny_sd3: Path, tmp_path: Path, balance: object) -> None:
    config = load_config(write_config(tmp_path / "c.yaml", tiny_sd3, balance=balance))
    lines = [{"step": i, "reward/small": float(i), "update/norm": 2.0, "loss/kl": 0.0} for i in range(20)]
    page = Page(run_page(RunData(tmp_path, config, lines, None, [], None)))
    assert "Not measured: only runs with balance.type: marble" in page.text
    assert "Is held-out harmony above" not in page.text
    assert "On training prompts, the last third of the steps against the first tenth: small rose" in page.text


# A comparison, in the form of `marble compare`.


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    return write_comparison(tmp_path)


def test_a_comparison_has_a_page_of_its_own(comparison: Path) -> None:
    outcome = marble("report", comparison)
    assert outcome.code == 0, outcome.err
    page = Page((comparison / "report.html").read_text())
    for text in (
        "Three methods, two rewards",
        "Better on ocr; worse on taste.",
        "Is <i> better than weighted_sum?",
        "one seed: over its prompts, another training may differ",
        "gdpo seed 3: train ended with exit code 3: <b>full</b>",
        "0.125",
        "It beats <i>",
        "in the paper: +1 < +2",
    ):
        assert text in page.text
    assert page.of("i") == [attributes for attributes in page.of("i") if "swatch" in str(attributes["class"])]
    assert len(page.of("svg")) == 3


def test_a_comparison_shows_what_its_jobs_left(comparison: Path) -> None:
    write_jobs(comparison)
    (comparison / "jobs" / "broken-seed0.json").write_text("{")
    page = Page(comparison_page(comparison))
    assert len(page.of("svg")) == 3 + 1  # a curve of the reward that is trained on
    assert [str(picture["alt"]) for picture in page.of("img")] == [
        f"{method}: a <sign> that says hello" for method in ("weighted_sum", "marble", "<i>")
    ]
    assert all(str(picture["src"]).startswith("data:image/webp") for picture in page.of("img"))
    for text in ("the same noise for every method, seed 0", "701 MiB", "What marble with seed 0 was run with"):
        assert text in page.text
    shutil.rmtree(comparison / "jobs" / "weighted_sum-seed0")
    page = Page(comparison_page(comparison))
    assert len(page.of("img")) == 2


def test_a_comparison_of_many_methods_draws_a_few() -> None:
    names = [f"m{i}" for i in range(9)] + ["sum", "marble"]
    assert shown_methods(names, "sum") == ["m0", "m1", "m2", "m3", "sum", "marble"]
    assert shown_methods(["a", "b"], None) == ["a", "b"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rewards": ["a"], "rows": [{}]}'])
def test_a_comparison_of_another_form_is_refused(comparison: Path, text: str) -> None:
    (comparison / "compare.json").write_text(text)
    outcome = marble("report", comparison)
    assert outcome.code == 2
    assert "--table-only" in outcome.err


# What a run shows: every rule at its border.


def made(tiny: Path, tmp_path: Path, lines: list[dict[str, float]], differences: dict[str, Difference]) -> RunData:
    names = ["a", "b", "c", "d"]
    rewards = [{"name": name, "type": "brightness", "held_out": name == "held"} for name in [*names, "held"]]
    config = load_config(write_config(tmp_path / "c.yaml", tiny, rewards=rewards))
    evaluation = None
    if differences:
        means = {"base": dict.fromkeys(differences, 0.0), "ema": {n: d.mean for n, d in differences.items()}}
        spread = dict.fromkeys(differences, 1.0)
        evaluation = StoredEvaluation(8, frozenset({"held"}), means, differences, spread, 4, 4, (), None)
    return RunData(tmp_path, config, lines, evaluation, [], None)


def answers(run: RunData) -> dict[str, Verdict]:
    keys = ["rise", "held out", "serves", "weighted sum", "signal", "difficulty", "guards"]
    return dict(zip(keys, verdicts(run), strict=True))


def test_nothing_is_claimed_without_data(tiny_sd3: Path, tmp_path: Path) -> None:
    found = answers(made(tiny_sd3, tmp_path, [], {}))
    assert {verdict.answer for verdict in found.values()} == {"unknown"}
    assert all("annot be told" in verdict.text for verdict in found.values())


@pytest.mark.parametrize(
    ("intervals", "answer"),
    [
        ([(0.1, 0.3)] * 4, "yes"),
        ([(0.1, 0.3)] * 3 + [(-0.1, 0.3)], "partly"),
        ([(0.1, 0.3)] * 3 + [(-0.3, -0.1)], "partly"),
        ([(-0.1, 0.3)] * 3 + [(-0.3, -0.1)], "no"),
        ([(-0.1, 0.3)] * 4, "unknown"),
    ],
)
def test_rewards_rise_where_the_interval_leaves_out_zero(
    tiny_sd3: Path, tmp_path: Path, intervals: list[tuple[float, float]], answer: str
) -> None:
    differences = {n: Difference((x + y) / 2, x, y) for n, (x, y) in zip("abcd", intervals, strict=True)}
    verdict = answers(made(tiny_sd3, tmp_path, [], differences))["rise"]
    assert verdict.answer == answer
    assert verdict.figures[0].startswith("a +")


@pytest.mark.parametrize(("low", "high", "answer"), [(0.1, 0.3, "yes"), (-0.1, 0.3, "partly"), (-0.3, -0.1, "no")])
def test_held_out_rewards_that_fall_are_a_warning(
    tiny_sd3: Path, tmp_path: Path, low: float, high: float, answer: str
) -> None:
    differences = {"held": Difference((low + high) / 2, low, high)}
    assert answers(made(tiny_sd3, tmp_path, [], differences))["held out"].answer == answer


@pytest.mark.parametrize(("level", "answer"), [(0.5, "yes"), (-0.5, "no"), (0.0, "unknown")])
def test_harmony_is_judged_beyond_its_noise(tiny_sd3: Path, tmp_path: Path, level: float, answer: str) -> None:
    lines = [
        {"step": i, "heldout/min_cos": level + 0.2 * (-1) ** i, "ws_heldout/min_cos": 0.1 * (-1) ** i}
        for i in range(12)
    ]
    found = answers(made(tiny_sd3, tmp_path, lines, {}))
    assert found["serves"].answer == answer
    assert found["weighted sum"].answer == answer
    too_few = answers(made(tiny_sd3, tmp_path, lines[:4], {}))
    assert too_few["serves"].answer == too_few["weighted sum"].answer == "unknown"


@pytest.mark.parametrize(
    ("signals", "answer"), [((0.3, 0.2, 0.4, 0.1), "yes"), ((0.3, 0.2, 0.4, 0.09), "partly"), ((0.0,) * 4, "no")]
)
def test_signal_is_read_after_ten_refreshes(
    tiny_sd3: Path, tmp_path: Path, signals: tuple[float, ...], answer: str
) -> None:
    line = {f"signal/{name}": value for name, value in zip("abcd", signals, strict=True)}
    lines = [{"step": i, **line} for i in range(10)]
    assert answers(made(tiny_sd3, tmp_path, lines, {}))["signal"].answer == answer
    assert answers(made(tiny_sd3, tmp_path, lines[:9], {}))["signal"].answer == "unknown"


@pytest.mark.parametrize(("gains", "answer"), [((4, 3, 2, 1), "yes"), ((1, 2, 3, 4), "no"), ((4, 2, 3, 1), "unknown")])
def test_coefficients_follow_difficulty_in_their_order(
    tiny_sd3: Path, tmp_path: Path, gains: tuple[float, ...], answer: str
) -> None:
    """Four rewards have 24 orders: only the very one is rarer than one in twenty."""
    lines = [{"step": 0, "alpha_bar/a": 0.1, "alpha_bar/b": 0.2, "alpha_bar/c": 0.3, "alpha_bar/d": 0.4}]
    differences = {name: Difference(gain, gain - 1, gain + 1) for name, gain in zip("abcd", gains, strict=True)}
    assert answers(made(tiny_sd3, tmp_path, lines, differences))["difficulty"].answer == answer


@pytest.mark.parametrize(
    ("line", "quiet"),
    [
        ({"guard/clamped": 0.0, "qp/kkt_residual": 1e-16, "guard/no_signal/a": 0.0, "harmony/conflict": 0.0}, True),
        ({"guard/clamped": 20.0}, False),
        ({"guard/no_signal/a": 1.0}, False),
        ({"guard/watch/held": 1.0}, False),
        ({"guard/clipped/a": 0.9}, False),
        ({"qp/stationary": 1.0}, False),
        ({"qp/kkt_residual": 1e-6}, False),
        ({"harmony/conflict": 1.0}, False),
        ({"scoring/failures/a": 1.0}, False),
    ],
)
def test_guards_that_speak_up_are_named(tiny_sd3: Path, tmp_path: Path, line: dict[str, float], quiet: bool) -> None:
    verdict = answers(made(tiny_sd3, tmp_path, [{"step": 0, **line}], {}))["guards"]
    assert verdict.answer == ("yes" if quiet else "no")
    assert bool(verdict.figures) is not quiet


@pytest.mark.parametrize("in_metric", [0.0, 1.0])
def test_in_adams_metric_the_guarantee_is_one_in_that_metric(tiny_sd3: Path, tmp_path: Path, in_metric: float) -> None:
    """There a euclidean conflict is no fault, and one in the metric is."""
    run = made(tiny_sd3, tmp_path, [{"step": 0, "harmony/conflict": 1.0, "metric_harmony/conflict": in_metric}], {})
    balance = run.config.balance.model_copy(update={"metric": "adam"})
    run = replace(run, config=run.config.model_copy(update={"balance": balance}))
    assert answers(run)["guards"].answer == ("no" if in_metric else "yes")


def diagnosed(ours: tuple[float, float], theirs: tuple[float, float]) -> StoredDiagnosis:
    def direction(name: str, ends: tuple[float, float]) -> Direction:
        found = Difference(sum(ends) / 2, *ends)
        return Direction(name, "", {}, {"min_cos": found, "conflict": found}, {}, None)

    directions = [direction("weighted_sum", theirs), direction("marble", ours)]
    return StoredDiagnosis(["a"], 8, 50, 8, directions, [[1.0]], [], None, {1.0: [0.5]}, [0.5], [1.0], 0.0, [], [])


@pytest.mark.parametrize(
    ("ours", "answer"), [((0.1, 0.29), "yes"), ((0.1, 0.31), "unknown"), ((0.49, 0.6), "unknown"), ((0.51, 0.6), "no")]
)
def test_conflict_rates_are_told_apart_beyond_both_intervals(ours: tuple[float, float], answer: str) -> None:
    verdict = fewer_conflicts(diagnosed(ours, (0.3, 0.5)))
    assert verdict.answer == answer
    assert verdict.figures[0].startswith("marble: conflict rate")
    assert verdict.figures[1].startswith("weighted_sum: conflict rate 0.400 (0.300 to 0.500) in another batch; worst")
