"""`marble rate` in a real browser: two raters at the same time, one with keys on a wide page, one with taps on a phone,
and a server that is killed between two answers. Screenshots: build/rating-screenshots/."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from browser import Browser
from clips import ball
from marble_rl.runs.media import encoded
from ratings import NAMES, answer_lines, prepare_study, rate_server, request, shown_model
from runs import marble

pytestmark = pytest.mark.full
SCREENSHOTS = Path(__file__).parents[2] / "build" / "rating-screenshots"
PROMPTS = 30
CRITERIA = ("alignment", "quality")
Expected = dict[tuple[str, int, str, str], int]
"""(rater, prompt, criterion, model) -> rating"""


@pytest.fixture(scope="module")
def prepared(finished_run: Path, tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_study(tmp_path_factory.mktemp("rating"), finished_run, tiny_sd3, PROMPTS)


@pytest.fixture
def study(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "study"))


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, Browser]]:
    with Browser(tmp_path_factory.mktemp("profile")) as one, Browser(tmp_path_factory.mktemp("profile")) as other:
        yield one, other


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


class Rater:
    """A person in front of a page. ``keys``: whether they use the keyboard or tap."""

    def __init__(self, name: str, browser: Browser, study: Path, link: str, width: int, *, keys: bool) -> None:
        self.name, self.browser, self.study, self.link, self.keys = name, browser, study, link, keys
        self.expected: Expected = {}
        self.dice = np.random.default_rng(len(name))
        browser.complaints.clear()
        browser.requests.clear()
        browser.show(link, width=width)
        wait_for(self.is_ready)

    def is_ready(self) -> bool:
        """The pictures are there, and can be rated."""
        return bool(self.browser.run("document.querySelector('.row button:not(:disabled)') !== null")) and not bool(
            self.browser.run("document.querySelector('.row button:disabled') !== null")
        )

    def text(self, identifier: str) -> str:
        return str(self.browser.run(f"document.getElementById('{identifier}').innerText"))

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.browser.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 else "")

    def choose(self, row: int, choice: int) -> None:
        if self.keys:
            self.press(str(choice))
        else:
            self.tap(row, choice)

    def tap(self, row: int, choice: int) -> None:
        self.browser.click(".row button", row * 5 + choice - 1)

    def rate_question(self, *, look: bool = True) -> None:
        """Answer all rows of the question shown. ``look``: find out from the server whose pictures they are."""
        wait_for(self.is_ready)
        sources = self.browser.run("[...document.querySelectorAll('#pictures img')].map(image => image.src)")
        for place, source in enumerate(sources):
            status, _, picture = request(source) if look else (200, {}, self.seen[source])
            assert status == 200
            model, prompt = shown_model(self.study, picture)
            for c, criterion in enumerate(CRITERIA):
                rating = int(np.clip(self.dice.integers(1, 4) + NAMES.index(model), 1, 5))
                self.choose(place * len(CRITERIA) + c, rating)
                self.expected[self.name, prompt, criterion, model] = rating

    def look_ahead(self) -> None:
        """Remember the pictures of this question, for a time without a server."""
        sources = self.browser.run("[...document.querySelectorAll('#pictures img')].map(image => image.src)")
        self.seen = {source: request(source)[2] for source in sources}

    def go_on(self) -> None:
        if self.keys:
            self.press("ArrowRight")
        else:
            self.browser.click("#next")

    def is_saved(self) -> bool:
        return self.text("saved") == "Saved"


def stored(study: Path) -> Expected:
    """The last answer to each question."""
    lines = answer_lines(study)
    return {(line["rater"], line["prompt"], line["criterion"], line["model"]): line["value"] for line in lines}


def test_two_raters_and_a_server_that_is_killed(study: Path, browsers: tuple[Browser, Browser]) -> None:
    with rate_server(study, "--raters", "anna,ben", "--port", 0) as (server, links):
        port = links["anna"].split(":")[2].split("/")[0]
        anna = Rater("anna", browsers[0], study, links["anna"], 1280, keys=True)
        ben = Rater("ben", browsers[1], study, links["ben"], 390, keys=False)
        for number in range(10):
            for rater in (anna, ben):
                rater.rate_question()
                if number == 4:
                    size = rater.browser.run("innerWidth")
                    rater.browser.screenshot(SCREENSHOTS / f"scales-{size}.png")
                    assert rater.browser.run("document.documentElement.scrollWidth") <= size
                rater.go_on()
        for rater in (anna, ben):
            wait_for(rater.is_ready)
            rater.look_ahead()
        wait_for(lambda: anna.is_saved() and ben.is_saved())
        confirmed = {**anna.expected, **ben.expected}
        assert stored(study) == confirmed
        assert anna.browser.complaints == ben.browser.complaints == []
        server.kill()
        server.wait()
    assert stored(study) == confirmed, "kill -9 loses nothing that was confirmed"

    # Without a server the raters go on, and are told.
    for rater in (anna, ben):
        rater.rate_question(look=False)
        wait_for(lambda rater=rater: "6 answers are not saved yet" in rater.text("trouble"))
        assert rater.text("saved") == "Not saved"
        rater.browser.screenshot(SCREENSHOTS / f"not-saved-{rater.browser.run('innerWidth')}.png")
    assert stored(study) == confirmed

    with rate_server(study, "--port", port) as (server, again):
        assert again == links
        ben.browser.click("#retry")
        wait_for(lambda: anna.is_saved() and ben.is_saved())
        assert anna.browser.run("document.getElementById('trouble').hidden")
        assert stored(study) == {**anna.expected, **ben.expected}
        for _ in range(11, PROMPTS):
            for rater in (anna, ben):
                rater.go_on()
                rater.rate_question()
        for rater in (anna, ben):
            rater.go_on()
            wait_for(lambda rater=rater: "All 30 questions are answered and saved" in rater.text("end"))
            assert rater.text("count") == "30 of 30 done"
            outside = [url for url in rater.browser.requests if not url.startswith((rater.link, "data:"))]
            assert outside == [], "no request leaves the rater's link"
        assert server.stdout is not None
        printed = sorted(server.stdout.readline() for _ in links)
        assert printed == ["anna has answered everything\n", "ben has answered everything\n"]
    expected = {**anna.expected, **ben.expected}
    assert len(expected) == 2 * PROMPTS * len(CRITERIA) * len(NAMES)
    assert stored(study) == expected
    check_results(study, expected)


def check_results(study: Path, expected: Expected) -> None:
    results = json.loads(marble("rate", "results", study, "--json").out)
    for of in results["criteria"]:
        by_model = {
            name: np.array(
                [
                    [expected[rater, prompt, of["criterion"], name] for prompt in range(PROMPTS)]
                    for rater in ("anna", "ben")
                ]
            )
            for name in NAMES
        }
        for model in of["models"]:
            own = by_model.pop(model["name"])
            wins = [np.mean((own > other) + 0.5 * (own == other)) for other in by_model.values()]
            by_model[model["name"]] = own
            assert model["mean"]["value"] == pytest.approx(own.mean())
            assert model["win_rate"]["value"] == pytest.approx(np.mean(wins))
        for pair in of["pairs"]:
            difference = by_model[pair["model"]] - by_model[pair["against"]]
            assert pair["difference"]["value"] == pytest.approx(difference.mean())


def test_a_rater_goes_back_changes_an_answer_and_continues_later(
    study: Path, browsers: tuple[Browser, Browser]
) -> None:
    with rate_server(study, "--raters", "anna", "--port", 0) as (_, links):
        anna = Rater("anna", browsers[0], study, links["anna"], 1280, keys=True)
        anna.rate_question()
        anna.go_on()
        anna.press("ArrowLeft")
        assert anna.text("place").startswith("Question 1 of 30")
        for _ in range(4):
            anna.press("ArrowDown")
        anna.press("1")
        anna.press("4")  # the row stays marked, because all are answered: changed again
        wait_for(anna.is_saved)
        prompt = anna.text("prompt")
        chosen = "[...document.querySelectorAll('[aria-checked=true]')].map(button => button.textContent).join('')"
        before = anna.browser.run(chosen)
        assert before[4] == "4"
        assert len(stored(study)) == 6
        assert answer_lines(study)[-1]["value"] == 4
        anna.browser.show(links["anna"], width=390)
        wait_for(anna.is_ready)
        assert anna.text("place").startswith("Question 2 of 30"), "where the rater stopped"
        assert anna.text("count") == "1 of 30 done"
        anna.browser.click("#back")
        wait_for(anna.is_ready)
        assert anna.text("prompt") == prompt
        assert anna.browser.run(chosen) == before
        names = anna.browser.run("[...document.querySelectorAll('[role=radiogroup]')].map(group => group.ariaLabel)")
        assert names[2] == "Picture B. How well does the picture match the text?"
        small = "[...document.querySelectorAll('button')].filter(b => b.offsetParent && b.offsetHeight < 44).length"
        assert anna.browser.run(small) == 0, "every button is large enough for a thumb"
        anna.browser.click(".frame", 1)
        assert anna.browser.run("document.getElementById('large').open")
        anna.browser.click("#large")
        assert not anna.browser.run("document.getElementById('large').open")
        assert anna.browser.complaints == []


def test_answers_that_a_closed_page_could_not_send_are_sent_when_it_is_opened_again(
    study: Path, browsers: tuple[Browser, Browser]
) -> None:
    with rate_server(study, "--raters", "anna", "--port", 0) as (server, links):
        port = links["anna"].split(":")[2].split("/")[0]
        anna = Rater("anna", browsers[0], study, links["anna"], 390, keys=False)
        anna.tap(0, 5)
        wait_for(anna.is_saved)
        server.kill()
        server.wait()
    anna.tap(1, 3)
    wait_for(lambda: "1 answer is not saved yet" in anna.text("trouble"))
    anna.browser.dialogs.clear()
    anna.browser.call("Page.navigate", url="about:blank")
    assert anna.browser.dialogs == ["beforeunload"], "asked whether to leave the page"
    assert len(answer_lines(study)) == 1
    with rate_server(study, "--port", port) as (_, again):
        anna.browser.show(again["anna"], width=390)
        wait_for(anna.is_ready)
        wait_for(anna.is_saved)
        assert [line["value"] for line in answer_lines(study)] == [5, 3]


@pytest.mark.parametrize("width", [1280, 390])
def test_pairs(study: Path, browsers: tuple[Browser, Browser], width: int) -> None:
    plan = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps(plan | {"ask": "pairs"}))
    with rate_server(study, "--raters", "1", "--port", 0) as (_, links):
        rater = Rater("rater-1", browsers[0], study, links["rater-1"], width, keys=True)
        assert rater.text("count") == "0 of 90 done"
        rater.browser.screenshot(SCREENSHOTS / f"pairs-{width}.png")
        assert rater.browser.run("document.documentElement.scrollWidth") <= width
        sources = rater.browser.run("[...document.querySelectorAll('#pictures img')].map(image => image.src)")
        shown = [shown_model(study, request(source)[2])[0] for source in sources]
        rater.press("5")  # there is no such choice
        rater.press("3")
        rater.press("1")
        wait_for(rater.is_saved)
        first, second = answer_lines(study)
        better = [line["model"] if line["value"] == 1 else line["against"] for line in (first, second)]
        assert better == [shown[1], shown[0]]
        assert (first["criterion"], second["criterion"]) == CRITERIA
        assert rater.text("count") == "1 of 90 done"


def test_links_on_an_address_that_phones_can_reach(study: Path) -> None:
    with rate_server(study, "--raters", "anna", "--host", "0.0.0.0", "--port", 0) as (child, links):
        assert "0.0.0.0" not in links["anna"]
        status, _, _ = request(links["anna"])
        assert status == 200
        assert request(links["anna"].partition("/r/")[0])[0] == 403
        child.terminate()
        assert child.wait(timeout=20) == 0


def test_pairs_of_videos_play(browsers: tuple[Browser, Browser], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a ball rolls\n")
    for seed, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.gif").write_bytes(encoded(ball(seed=seed), ".gif"))
    models, study = [tmp_path / "a", tmp_path / "b"], tmp_path / "study"
    given = ("--prompts", tmp_path / "prompts.txt", "--ask", "pairs", "--out", study)
    assert marble("rate", "prepare", *models, *given).code == 0
    page, _ = browsers
    page.complaints.clear()
    with rate_server(study, "--raters", "anna", "--port", 0) as (_, links):
        page.show(links["anna"], width=1280)
        wait_for(lambda: page.run("document.querySelectorAll('.frame img').length") == 2)
        text = page.run("document.body.innerText")
        assert "Which video looks better?" in text
        assert "Video A" in text
        assert "icture" not in text
        seen = set()
        for _ in range(6):
            page.screenshot(SCREENSHOTS / "videos.png")
            seen.add((SCREENSHOTS / "videos.png").read_bytes())
            time.sleep(0.13)
    assert len(seen) > 1
    assert page.complaints == []
