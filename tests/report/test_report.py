"""The report of a run: built from a real one with hostile prompts, and from what is left when parts are missing."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from built_once import built_once
from comparisons import write_comparison, write_jobs
from jobs import result
from marble_rl.balancing.registry import RULES
from marble_rl.config import load_config
from marble_rl.diagnose.record import Diagnosis, DirectionFigures, QpFacts
from marble_rl.errors import InputError
from marble_rl.intervals import Interval
from marble_rl.report import page as page_module
from marble_rl.report import writing
from marble_rl.report.comparison import comparison_page
from marble_rl.report.evaluation import gains_by_source, score_spread
from marble_rl.report.jobs import FinishedJob, curves, shown_methods
from marble_rl.report.page import run_page
from marble_rl.report.run_data import RunData, read_run
from marble_rl.report.statistics import MOST_POINTS
from marble_rl.report.verdicts import Verdict, fewer_conflicts, verdicts
from marble_rl.report.wording import MINUS, memory
from marble_rl.report.writing import watch_report, write_report
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.scores import ImageScores, Scores, WeightsScores
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
    return built_once(tmp_path_factory, "reported-run", lambda folder: make_run(folder, tiny_sd3)) / "run"


def make_run(folder: Path, tiny_sd3: Path) -> None:
    rewards = base_config(tiny_sd3)["rewards"]
    rewards[1]["held_out"] = True
    prompts = {"train": [{"name": "odd", "texts": HOSTILE}, {"name": "plain", "texts": ["a red cup", "a blue cup"]}]}
    config = write_config(folder / "config.yaml", tiny_sd3, rewards=rewards, prompts=prompts)
    train(config, folder / "run", "--set", "trainer.eval_every=4")
    for command in (("evaluate", folder / "run"), ("diagnose", folder / "run", "--batches", 6)):
        outcome = marble(*command)
        assert outcome.code == 0, outcome.err


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "lora")))


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    VOID = frozenset({"meta", "link", "img", "br", "input"})

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
    assert set(HOSTILE[:2]) <= {card["prompt"] for card in gallery_cards(run_page(read_run(copy)))}
    assert "{{ 7 * 7 }}" in page.text


def gallery_cards(html: str) -> list[dict[str, Any]]:
    """What the script of the page draws."""
    found = re.search(r'id="gallery-data">(.*?)</script>', html, re.DOTALL)
    assert found
    cards: list[dict[str, Any]] = json.loads(found[1])["cards"]
    return cards


def test_every_picture_has_its_prompt(copy: Path) -> None:
    """Rows of training samples, and six prompts before and after."""
    html = run_page(read_run(copy))
    prompts = [*HOSTILE, "a red cup", "a blue cup"]
    pictures = Page(html).of("img")
    assert len(pictures) >= 4
    for picture in pictures:
        assert str(picture["src"]).startswith("data:image/webp;base64,")
        assert any(prompt in str(picture["alt"]) for prompt in prompts)
    cards = gallery_cards(html)
    assert [card["prompt"] for card in cards] == [*HOSTILE[:4], *prompts[-2:]]
    for card in cards:
        assert [picture["label"] for picture in card["pictures"]] == ["base", "ema"]
        assert all(picture["image"]["address"].startswith("data:image/webp;base64,") for picture in card["pictures"])


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


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def edit_diagnosis(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit_json(run / "diagnosis" / "diagnosis.json", change)


def edit_scores(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit_json(run / "evaluation" / "scores.json", change)


ENDLESS = 10**400
"""An integer, as far as JSON is concerned, that no float holds."""


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no evaluation": (lambda run: shutil.rmtree(run / "evaluation"), "Not evaluated."),
    "no samples": (lambda run: shutil.rmtree(run / "samples"), "Before and after"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "There is no metrics.jsonl yet"),
    "empty metrics": (lambda run: (run / "metrics.jsonl").write_text(""), "No step was logged yet."),
    "one step": (lambda run: edit_lines(run, lambda lines: lines[:1]), "1 of 8 steps done"),
    "two steps": (lambda run: edit_lines(run, lambda lines: lines[:2]), "2 of 8 steps done"),
    "cut short": (lambda run: edit_lines(run, lambda x: [*x[:-1], x[-1][:40]]), "1 of 8 lines of metrics.jsonl"),
    "not numbers": (
        lambda run: edit_lines(run, lambda x: [re.sub(r'"reward/small": [^,]*', '"reward/small": NaN', y) for y in x]),
        "not finite numbers: 8 values in metrics.jsonl",
    ),
    "no rewards": (lambda run: edit_lines(run, without("reward/")), "Rewards during training"),
    "no times": (lambda run: edit_lines(run, without("time/")), "No times were logged."),
    "steps only": (lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n'), "Not measured"),
    "no harmony": (lambda run: edit_lines(run, without("heldout/")), "In batch: worst cosine"),
    "scores cut short": (
        lambda run: (run / "evaluation" / "scores.json").write_text('{"step": 8,'),
        "evaluation/scores.json is not an evaluation that this version reads",
    ),
    "scores of another form": (
        lambda run: (run / "evaluation" / "scores.json").write_text('{"weights": {"ema": []}}'),
        "evaluation/scores.json is not an evaluation that this version reads",
    ),
    "no diagnosis": (lambda run: shutil.rmtree(run / "diagnosis"), "Not diagnosed. marble diagnose RUN measures"),
    "diagnosis cut short": (
        lambda run: (run / "diagnosis" / "diagnosis.json").write_text('{"names": ["small"],'),
        "diagnosis/diagnosis.json is not a diagnosis that this version reads",
    ),
    "diagnosis of another form": (
        lambda run: edit_diagnosis(run, lambda tree: tree["cosines"].pop()),
        "diagnosis/diagnosis.json is not a diagnosis that this version reads",
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
    "a broken picture": (
        lambda run: next((run / "evaluation" / "images").glob("*.webp")).write_bytes(b"RIFF"),
        "could not be shown",
    ),
    "a picture that is a folder": (
        lambda run: edit_scores(run, lambda tree: tree["pictures"][0]["files"].update(base="..")),
        ".. could not be shown",
    ),
    "prompts without pictures": (
        lambda run: edit_scores(run, lambda tree: [entry.update(files={}) for entry in tree["pictures"]]),
        "Before and after",
    ),
    "scores beyond numbers": (
        lambda run: edit_scores(run, lambda tree: tree["weights"]["ema"]["images"][0]["scores"].update(small=ENDLESS)),
        "weights.ema.images.0.scores.small: Input should be",
    ),
    "a difference in words": (
        lambda run: edit_scores(run, lambda tree: tree["differences"]["small"].update(mean="much", more=1.0)),
        "differences.small.mean: Input should be a valid number",
    ),
    "a difference beyond numbers": (
        lambda run: edit_scores(run, lambda tree: tree["differences"]["small"].update(mean=ENDLESS)),
        "differences.small.mean: Input should be",
    ),
    "scores without end": (
        lambda run: (run / "evaluation" / "scores.json").write_text("[" * 100_000),
        "evaluation/scores.json is not an evaluation that this version reads",
    ),
    "metrics in a folder": (
        lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
        "metrics.jsonl could not be read",
    ),
    "values beyond numbers": (
        lambda run: edit_lines(run, lambda x: [*x[:-1], json.dumps({"step": 7, "reward/small": ENDLESS})]),
        "not finite numbers: 1 value in metrics.jsonl",
    ),
    "a diagnosis beyond numbers": (
        lambda run: edit_diagnosis(run, lambda tree: tree["qp"].update(norm=[float("inf"), 0.5])),
        "diagnosis/diagnosis.json is not a diagnosis that this version reads",
    ),
    "a diagnosis with a batch of no size": (
        lambda run: edit_diagnosis(run, lambda tree: tree["signal"].update({"0": [0.5] * 2})),
        "diagnosis/diagnosis.json is not a diagnosis that this version reads",
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


@pytest.mark.parametrize(
    "step", ["3", True, None, -1, 1.5, 1e300, ENDLESS, [3], float("nan")], ids=lambda s: str(s)[:9]
)
def test_a_line_without_a_step_is_left_out(copy: Path, step: object) -> None:
    edit_lines(copy, lambda lines: [*lines, json.dumps({"step": step, "reward/small": 1e9})])
    run = read_run(copy)
    assert run.remarks == ["Left out, since not readable: 1 of 9 lines of metrics.jsonl."]
    assert len(run.lines) == 8
    assert "1 of 9 lines" in page_of(copy).text


def test_lines_without_end_are_left_out(copy: Path) -> None:
    edit_lines(copy, lambda lines: [*lines, "[" * 100_000, '{"step": ' * 50_000, "9" * 10_000])
    assert "3 of 11 lines of metrics.jsonl" in page_of(copy).text


def test_pictures_too_large_to_open_are_left_out(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow refuses what is twice as large as this, and only warns of what is larger than it."""
    before = len(page_of(copy).of("img"))
    with Image.open(copy / "samples" / "step-0.png") as grid:
        pixels = grid.width * grid.height
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels - 1)
    assert len(page_of(copy).of("img")) == before
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels // 2 - 1)
    page = page_of(copy)
    assert "step-0.png was left out: it has too many pixels to be opened here." in page.text
    assert len(page.of("img")) < before
    assert len(gallery_cards(run_page(read_run(copy)))) == 6


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
        "The min-norm point of a batch's unit gradients has a length of",
        "Advantages by prompt source",
        "Gain by prompt source",
    ):
        assert text in page.text
    assert page.of("new") == []
    assert any(f"small, colour: {MINUS}0.123" in str(drawing.get("aria-label")) for drawing in page.of("svg"))


def test_gains_by_source_are_in_spreads_and_only_where_a_reward_applies(copy: Path) -> None:
    scores = read_run(copy).evaluation
    assert scores is not None
    gains, pairs = gains_by_source(scores), list(zip(scores.images, scores.weights["ema"].images, strict=True))
    plain = [(a.scores["small"], b.scores["small"]) for a, b in pairs if a.source == "plain"]
    expected = np.diff(np.array(plain, float)).mean() / score_spread(scores)["small"]
    assert gains["plain"]["small"] == pytest.approx(expected)
    applies = {(a.source, n) for a, _ in pairs for n, score in a.scores.items() if score is not None}
    assert {(source, n) for source, row in gains.items() for n in row} == applies


def test_memory_is_logged_and_shown(copy: Path) -> None:
    peaks = read_run(copy).series("memory/peak_mb").values
    assert len(peaks) == 8
    assert all(100 < low <= high < 1e6 for low, high in itertools.pairwise(peaks))
    page = page_of(copy)
    assert f"memory at the highest point{memory(peaks[-1])}" in page.text


def test_older_grids_have_their_prompts_written_in_them(copy: Path) -> None:
    edit_scores(copy, lambda tree: tree.pop("pictures"))
    for grid in (copy / "samples").glob("*.png"):
        Image.fromarray(np.asarray(Image.open(grid))).save(grid)
    page = page_of(copy)
    assert all("under its prompt" in str(picture["alt"]) for picture in page.of("img"))
    assert len(page.of("img")) == len(list((copy / "samples").iterdir()))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, copy: Path) -> None:
    for target, reason in ((tmp_path / "none", "there is no run yet"), (tmp_path, "has no config.json")):
        outcome = marble("report", target)
        assert outcome.code == 2
        assert reason in outcome.err
    tree = json.loads((copy / "config.json").read_text())
    tree["balance"]["temperature"] = 1
    (copy / "config.json").write_text(json.dumps(tree))
    outcome = marble("report", copy)
    assert outcome.code == 2
    assert "cannot read its config" in outcome.err
    assert "temperature" in outcome.err


def test_a_file_that_cannot_be_written_is_bad_input(copy: Path) -> None:
    (copy / "file").write_text("")
    with pytest.raises(InputError, match="--out: cannot write"):
        write_report(copy, copy / "file" / "report.html")


def test_a_run_that_goes_on_is_told_from_one_that_stopped(copy: Path) -> None:
    assert "All 8 steps are done" in page_of(copy).text
    edit_lines(copy, lambda lines: lines[:5])
    much_later = time.time() + 7200
    with RunFolder(copy)._locked():
        assert "5 of 8 steps done, about" in Page(run_page(read_run(copy), now=much_later)).text, "a long evaluation"
    assert "5 of 8 steps done; the last was logged" in page_of(copy).text
    (copy / ".lock").unlink()  # of another machine, or an older version: its age alone tells
    assert "5 of 8 steps done, about" in page_of(copy).text
    assert "the last was logged 2 h 0 min ago" in Page(run_page(read_run(copy), now=much_later)).text


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
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(writing.time, "sleep", sleep)
    last = watch_report(copy, None, lambda file: built.append(file.read_text()))
    assert polls == [1, 1, 2, 2]
    assert ["5 of 8 steps" in built[0], "6 of 8 steps" in built[1]] == [True, True]
    assert all('data-refresh="5"' in html for html in built)
    assert "data-refresh" not in last.read_text()


@pytest.mark.parametrize(("done", "words"), [(5, ["running"] * 4 + ["stopped"]), (8, ["finished"] * 5)])
def test_a_watched_page_tells_when_its_run_died(
    copy: Path, monkeypatch: pytest.MonkeyPatch, done: int, words: list[str]
) -> None:
    """Nothing is written any more, but time goes by, 50 seconds between two polls. No lock tells either."""
    edit_lines(copy, lambda lines: lines[:done])
    (copy / ".lock").unlink()
    now = time.time()
    shown: list[str] = []
    built: list[Path] = []

    def sleep(_: float) -> None:
        nonlocal now
        shown.append((copy / "report.html").read_text())
        now += 50
        if len(shown) == len(words):
            signal.raise_signal(signal.SIGINT)

    clock = SimpleNamespace(
        sleep=sleep, time=lambda: now, monotonic=lambda: now, strftime=time.strftime, localtime=time.localtime
    )
    for module in (writing, page_module):
        monkeypatch.setattr(module, "time", clock)
    watch_report(copy, None, built.append)
    assert [re.findall(r'<p class="status (\w+)">', html) for html in shown] == [[word] for word in words]
    assert len(set(shown)) == (1 if done == 8 else 3), "a finished run is not built again, another one every minute"
    assert len(built) == 1, "only what is new is announced"


def test_a_watched_comparison_is_built_again_when_a_job_is_new(
    comparison: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []

    def sleep(_: float) -> None:
        if len(built) == 1:
            write_jobs(comparison)
        elif len(built) == 2:
            edit_json(
                comparison / "jobs" / "marble-seed0.json",
                lambda tree: tree.update(failed={"stage": "train", "exit_code": 3, "last_lines": []}),
            )
        else:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(writing.time, "sleep", sleep)
    watch_report(comparison, None, lambda file: built.append(len(Page(file.read_text()).of("img"))))
    assert built == [0, 3, 0]


@pytest.mark.full
def test_a_run_of_many_steps_needs_little_memory(tiny_sd3: Path, tmp_path: Path) -> None:
    """20,000 squared would be 3 GB."""
    config = load_config(write_config(tmp_path / "c.yaml", tiny_sd3, trainer={"steps": 20_000}))
    wave = np.sin(np.arange(20_000) / 500).tolist()
    keys = [f"{key}/{name}" for key in ("reward", "eval", "alpha_bar") for name in ("small", "bright", "colour")]
    keys += ["heldout/min_cos", "ws_heldout/min_cos", "heldout/mean_cos", "harmony/min_cos", "qp/norm", "time/rollout"]
    lines = [{"step": step, **dict.fromkeys(keys, value)} for step, value in enumerate(wave)]
    job = FinishedJob(result("marble", 0, {}), tmp_path, lines)
    began = time.process_time()
    tracemalloc.start()
    html = run_page(RunData(tmp_path, config, lines, None, [], time.time()))
    charts = curves([job], ["marble"], ["small"], {"marble": "r0"})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60e6
    assert time.process_time() - began < 30
    assert len(html) < 3_000_000
    assert len(charts[0].data["x"]) <= MOST_POINTS  # type: ignore[arg-type]


@pytest.mark.full
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
    change = {"names": names, "cosines": [[0.5] * 12] * 12, "signal": {}}
    diagnosis = diagnosed((0.1, 0.2), (0.3, 0.5)).model_copy(update=change)
    began = time.process_time()
    html = run_page(RunData(copy, load_config(config), lines, None, samples, time.time(), diagnosis=diagnosis))
    assert time.process_time() - began < 20
    assert len(html) < 3_000_000
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
    assert "Not measured: only rules with one gradient per reward" in page.text
    assert "Is harmony on unseen samples above" not in page.text
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
        "Four methods (one crashed), two rewards",
        "8 held-out prompts, 2 images each",
        "Rewards on the evaluated prompts",
        "Better on ocr; worse on taste.",
        "Is <i> better than weighted_sum?",
        "No reward differs beyond its interval; in one training of each: others may differ.",
        "one seed: the interval is over its prompts",
        "gdpo seed 3: train ended with exit code 3: <b>full</b>",
        "0.125",
    ):
        assert text in page.text
    assert page.of("i") == [attributes for attributes in page.of("i") if "swatch" in str(attributes["class"])]
    assert len(page.of("svg")) == 3


@pytest.mark.parametrize(
    ("differences", "answer", "text"),
    [
        ({"ocr": 0.4, "taste": 0.0, "composite": 0.0}, "yes", "Better on ocr."),
        ({"ocr": 0.4, "taste": -0.4, "composite": 0.2}, "partly", "Better on ocr; worse on taste."),
        ({"ocr": 0.0, "taste": 0.4, "composite": -0.2}, "partly", "Better on taste."),
        ({"ocr": -0.4, "taste": 0.0, "composite": 0.2}, "no", "Worse on ocr."),
        ({"ocr": 0.0, "taste": 0.0, "composite": 0.2}, "unknown", "No reward differs beyond its interval."),
        (
            {"ocr": 0.0, "taste": -0.4, "worst share": 0.2, "mean share": 0.0},
            "yes",
            "Better by the worst share; worse on taste.",
        ),
        (
            {"ocr": 0.0, "taste": 0.0, "worst share": 0.2, "mean share": -0.2},
            "partly",
            "Better by the worst share, worse by the mean share.",
        ),
        ({"ocr": 0.4, "taste": 0.0, "worst share": -0.2, "mean share": 0.0}, "no", "Worse by the worst share;"),
        (
            {"ocr": 0.4, "taste": -0.4, "worst share": 0.0, "mean share": 0.0},
            "partly",
            "No clear difference in the worst share; better on ocr; worse on taste.",
        ),
    ],
)
def test_a_method_is_better_by_the_worst_share_or_the_rewards_never_by_the_composite(
    comparison: Path, differences: dict[str, float], answer: str, text: str
) -> None:
    """taste is evaluation-only: yes takes every trained reward, and none that is worse."""

    def change(tree: dict[str, Any]) -> None:
        tree["rows"][1]["differences"] = {
            n: {"mean": d, "low": d - 0.1, "high": d + 0.1} for n, d in differences.items()
        }

    edit_json(comparison / "compare.json", change)
    html = comparison_page(comparison)
    assert re.findall(r'class="verdict (\w+)"', html)[0] == answer
    assert text in html


def test_one_seed_in_common_tells_nothing_of_other_trainings(comparison: Path) -> None:
    """Two seeds of each method, of which one is shared: the interval is over that one's prompts, and far from 0."""

    def change(tree: dict[str, Any]) -> None:
        far = {"mean": 3.0, "low": 2.9, "high": 3.1, "n": 1, "over": "prompts"}
        tree["rows"][1] |= {"seeds": [0, 5], "differences": dict.fromkeys(("ocr", "composite"), far)}

    edit_json(comparison / "compare.json", change)
    html = comparison_page(comparison)
    assert re.findall(r'class="verdict (\w+)"', html)[0] == "unknown"
    assert "Better on ocr; in one training of each: others may differ." in html
    assert "one seed: the interval is over its prompts" in html


def test_methods_that_crashed_are_in_the_table_and_the_title(comparison: Path) -> None:
    page = Page(comparison_page(comparison))
    assert "Four methods (one crashed), two rewards" in page.text
    assert re.search(r"gdpo\s*0\s*crashed", page.text)


def test_a_comparison_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "marble-seed0").mkdir(parents=True)
    with pytest.raises(InputError, match="no job of this comparison has ended yet"):
        write_report(tmp_path)
    (tmp_path / "jobs" / "marble-seed0.json").write_text("{}")
    with pytest.raises(InputError, match=f"marble compare {tmp_path} --table-only"):
        write_report(tmp_path)


def test_only_what_methods_have_in_common_is_called_the_same(comparison: Path) -> None:
    def lead() -> str:
        return next(line for line in comparison_page(comparison).splitlines() if 'class="lead"' in line)

    assert "the same budget for every method" in lead(), "seeds differ"
    edit_json(comparison / "compare.json", lambda tree: [row.update(seeds=[0, 1]) for row in tree["rows"]])
    assert "the same budget and seeds for every method" in lead()
    edit_json(comparison / "compare.json", lambda tree: tree["rows"][1].update(steps=90, seeds=[7]))
    assert "the same" not in lead()


@pytest.mark.parametrize("words", ["held-out", "training"])
def test_a_comparison_says_which_prompts_were_evaluated(comparison: Path, words: str) -> None:
    write_jobs(comparison)
    edit_json(comparison / "compare.json", lambda tree: tree.update(prompts_are=words))
    text = Page(comparison_page(comparison)).text
    assert f"8 {words} prompts, 2 images each" in text
    assert f"{words.capitalize()} prompts, the same noise for every method" in text


def test_a_comparison_whose_jobs_kept_no_pictures_shows_none(comparison: Path) -> None:
    write_jobs(comparison)
    for scores in comparison.rglob("scores.json"):
        edit_json(scores, lambda tree: tree["pictures"][0].update(files={}))
    assert Page(comparison_page(comparison)).of("img") == []


def test_a_comparison_shows_what_its_jobs_left(comparison: Path) -> None:
    write_jobs(comparison)
    (comparison / "jobs" / "broken-seed0.json").write_text("{")
    page = Page(comparison_page(comparison))
    assert "Left out: jobs/broken-seed0.json is not the result of a job that this version reads" in page.text
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


NO_METHODS = {
    "rewards": [], "held_out": [], "against": None, "rows": [], "holes": [], "prompts": 1, "images_per_prompt": 1
}  # fmt: skip


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"rewards": ["a"], "rows": [{}]}', "[" * 100_000, json.dumps(NO_METHODS)]
)
def test_a_comparison_of_another_form_is_refused(comparison: Path, text: str) -> None:
    (comparison / "compare.json").write_text(text)
    outcome = marble("report", comparison)
    assert outcome.code == 2
    assert "--table-only" in outcome.err


# What a run shows: every rule at its border.


def made(tiny: Path, tmp_path: Path, lines: list[dict[str, float]], differences: dict[str, Interval]) -> RunData:
    names = ["a", "b", "c", "d"]
    rewards = [{"name": name, "type": "brightness", "held_out": name == "held"} for name in [*names, "held"]]
    config = load_config(write_config(tmp_path / "c.yaml", tiny, rewards=rewards))
    evaluation = None
    if differences:
        before, after = dict.fromkeys(differences, 0.0), {n: d.mean for n, d in differences.items()}
        # Over two prompts, each reward's scores have a standard deviation of 1.
        images = [ImageScores("", "s", i, 0, dict.fromkeys(differences, x)) for i, x in enumerate((0.0, 2**0.5))]
        weights = {"base": WeightsScores(before, images), "ema": WeightsScores(after, images)}
        evaluation = Scores(step=8, held_out_rewards=["held"], differences=differences, weights=weights)
    return RunData(tmp_path, config, lines, evaluation, [], None)


def answers(run: RunData) -> dict[str, Verdict]:
    keys = ["rise", "held out", "serves", "weighted sum", "signal", "guards"]
    return dict(zip(keys, verdicts(run), strict=True))


def test_nothing_is_claimed_without_data(tiny_sd3: Path, tmp_path: Path) -> None:
    found = answers(made(tiny_sd3, tmp_path, [], {}))
    assert {verdict.answer for verdict in found.values()} == {"unknown"}
    assert all("ot known" in verdict.text for verdict in found.values())


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
    differences = {n: Interval((x + y) / 2, x, y) for n, (x, y) in zip("abcd", intervals, strict=True)}
    verdict = answers(made(tiny_sd3, tmp_path, [], differences))["rise"]
    assert verdict.answer == answer
    assert verdict.figures[0].startswith("a +")


@pytest.mark.parametrize(("low", "high", "answer"), [(0.1, 0.3, "yes"), (-0.1, 0.3, "unknown"), (-0.3, -0.1, "no")])
def test_held_out_rewards_that_fall_are_a_warning(
    tiny_sd3: Path, tmp_path: Path, low: float, high: float, answer: str
) -> None:
    differences = {"held": Interval((low + high) / 2, low, high)}
    assert answers(made(tiny_sd3, tmp_path, [], differences))["held out"].answer == answer


def test_a_held_out_reward_that_was_not_measured_confirms_nothing(tiny_sd3: Path, tmp_path: Path) -> None:
    run = made(tiny_sd3, tmp_path, [], {"held": Interval(0.2, 0.1, 0.3)})
    (last,) = [reward for reward in run.config.rewards if reward.held_out]
    other = last.model_copy(update={"name": "other"})
    config = run.config.model_copy(update={"rewards": [*run.config.rewards, other]})
    verdict = answers(replace(run, config=config))["held out"]
    assert (verdict.answer, verdict.text) == (
        "partly",
        "None fell; held rose clearly. Of other nothing was measured.",
    )


@pytest.mark.parametrize(("level", "answer"), [(0.5, "yes"), (-0.5, "no"), (0.0, "unknown")])
def test_harmony_is_judged_beyond_its_noise(tiny_sd3: Path, tmp_path: Path, level: float, answer: str) -> None:
    """The smallest of several cosines is below 0 on average where all are noise: that alone is no reason for a no."""
    lines = [
        {"step": i, "heldout/min_cos": level + 0.2 * (-1) ** i, "ws_heldout/min_cos": 0.1 * (-1) ** i}
        for i in range(12)
    ]
    found = answers(made(tiny_sd3, tmp_path, lines, {}))
    assert found["serves"].answer == ("yes" if answer == "yes" else "unknown")
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


@pytest.mark.parametrize(
    ("measured", "answer", "text"),
    [
        ({"a": 0.3, "b": 0.3, "c": 0.3}, "partly", "Of d it is not known"),
        ({"a": 0.3, "b": 0.3, "c": 0.0}, "partly", "the gradient of c: nine tenths"),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, "no", "the gradient of a, b and c: nine tenths"),
        ({}, "unknown", "Not known: one refresh"),
    ],
)
def test_a_reward_that_was_hardly_ever_measured_has_shown_no_signal(
    tiny_sd3: Path, tmp_path: Path, measured: dict[str, float], answer: str, text: str
) -> None:
    """Reward d has a value in the last refresh alone."""
    lines = [{"step": i, **{f"signal/{name}": value for name, value in measured.items()}} for i in range(10)]
    lines[-1]["signal/d"] = 0.9
    verdict = answers(made(tiny_sd3, tmp_path, lines, {}))["signal"]
    assert verdict.answer == answer
    assert text in verdict.text
    assert ("d: measured in one refresh" in verdict.figures) is bool(measured)


def test_a_reward_that_never_had_a_gradient_is_named(tiny_sd3: Path, tmp_path: Path) -> None:
    lines = [{"step": i, "signal/a": 0.5, "signal/b": 0.5, "signal/c": 0.5} for i in range(12)]
    verdict = answers(made(tiny_sd3, tmp_path, lines, {}))["signal"]
    assert verdict.answer == "partly"
    assert verdict.figures[-1] == "d: measured in no refreshes"


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
        ({"guard/skipped": 0.0, "guard/overflows": 0.0, "qp/fallback": 0.0}, True),
        ({"guard/skipped": 1.0}, False),
        ({"guard/overflows": 1.0}, False),
    ],
)
def test_guards_that_speak_up_are_named(tiny_sd3: Path, tmp_path: Path, line: dict[str, float], quiet: bool) -> None:
    verdict = answers(made(tiny_sd3, tmp_path, [{"step": 0, **line}], {}))["guards"]
    assert verdict.answer == ("yes" if quiet else "no")
    assert bool(verdict.figures) is not quiet


def with_balance(run: RunData, **changes: object) -> RunData:
    tree = {"type": run.config.balance.type, **changes}
    balance = RULES.settings_for(tree).model_validate(tree)
    return replace(run, config=run.config.model_copy(update={"balance": balance}))


@pytest.mark.parametrize(
    ("balance", "trouble"),
    [
        ({}, ["error of the quadratic program", "updates against a reward in their own batch"]),
        ({"type": "unit_mean"}, []),
        ({"type": "marble_no_norm"}, ["error of the quadratic program"]),
    ],
    ids=str,
)
def test_guards_ask_of_a_solver_what_it_promises(
    tiny_sd3: Path, tmp_path: Path, balance: dict[str, object], trouble: list[str]
) -> None:
    line = {"qp/kkt_residual": 0.1, "harmony/conflict": 1.0}
    run = with_balance(made(tiny_sd3, tmp_path, [{"step": 0, **line}], {}), **balance)
    verdict = answers(run)["guards"]
    assert [figure.split(": ")[0] for figure in verdict.figures] == trouble
    assert verdict.answer == ("no" if trouble else "yes")


def test_updates_left_out_now_and_then_are_no_trouble(tiny_sd3: Path, tmp_path: Path) -> None:
    lines = [{"step": i, "guard/skipped": float(i == 0), "guard/overflows": 3.0 * (i < 5)} for i in range(50)]
    assert answers(made(tiny_sd3, tmp_path, lines, {}))["guards"].answer == "yes"
    lines[1]["guard/skipped"] = 1.0
    figures = answers(made(tiny_sd3, tmp_path, lines, {}))["guards"].figures
    assert figures == ["updates left out: not finite: 2 beside 50 that were made"]


def diagnosed(ours: tuple[float, float], theirs: tuple[float, float]) -> Diagnosis:
    def direction(ends: tuple[float, float]) -> DirectionFigures:
        figure = Interval(sum(ends) / 2, *ends)
        return DirectionFigures({}, {"min_cos": figure, "conflict": figure}, {}, [])

    return Diagnosis(
        names=("a",),
        step=8,
        batches=50,
        images=8,
        directions={"weighted_sum": direction(theirs), "marble": direction(ours)},
        signal={1.0: [0.5]},
        cosines=[[1.0]],
        qp=QpFacts([0.5], 0.0),
    )


@pytest.mark.parametrize(
    ("ours", "answer"), [((0.1, 0.29), "yes"), ((0.1, 0.31), "unknown"), ((0.49, 0.6), "unknown"), ((0.51, 0.6), "no")]
)
def test_conflict_rates_are_told_apart_beyond_both_intervals(ours: tuple[float, float], answer: str) -> None:
    verdict = fewer_conflicts(diagnosed(ours, (0.3, 0.5)))
    assert verdict.answer == answer
    assert verdict.figures[0].startswith("marble: conflict rate")
    assert verdict.figures[1].startswith("weighted_sum: conflict rate 0.400 (0.300 to 0.500) in another batch; worst")
