"""The gallery of a report in a real browser, with mouse and keyboard. Screenshots: build/report-screenshots/."""

from __future__ import annotations

import base64
import json
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser
from marble_rl.report.wording import MINUS
from runs import base_config, marble, train, write_config

pytestmark = pytest.mark.full
SCREENSHOTS = Path(__file__).parents[2] / "build" / "report-screenshots"
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
COLOURS = ("red", "green", "blue", "white")
THINGS = [f"a {colour} {thing}" for thing in ("cup", "hat", "kite", "drum", "sign", "box") for colour in COLOURS]
ODD = [HOSTILE, "word " * 300, "a_word_without_any_place_to_break_it" * 8, "a 🪀 yo-yo", "Ünïcödé", "a cup"]


@pytest.fixture(scope="module")
def run(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty prompts of two sources; the reward `colour` applies to some of them only."""
    folder = tmp_path_factory.mktemp("gallery")
    rewards = base_config(tiny_sd3)["rewards"]
    prompts = {"train": [{"name": "things", "texts": THINGS}, {"name": "odd", "texts": ODD}]}
    config = write_config(folder / "c.yaml", tiny_sd3, rewards=rewards, prompts=prompts)
    train(config, folder / "run")
    assert marble("evaluate", folder / "run", "--save-images", "--step", 6).code == 0
    assert marble("report", folder / "run").code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(params=[1280, 390])
def page(request: pytest.FixtureRequest, browser: Browser, run: Path) -> Iterator[Browser]:
    """Whatever a test does with it, nothing may complain, nothing may be fetched, and the page fits its window."""
    browser.complaints.clear()
    browser.requests.clear()
    browser.show(run / "report.html", width=request.param)
    browser.run("sessionStorage.clear()")
    browser.show(run / "report.html", width=request.param)
    yield browser
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.run("document.title") == "run · marble"
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def shown(page: Browser) -> list[str]:
    prompts: list[str] = page.run("[...document.querySelectorAll('#cards .prompt')].map(p => p.title)")
    return prompts


def changes(run: Path) -> dict[str, dict[str, float]]:
    """By prompt, then by reward: the last weights' score minus the first's, and the same of all rewards in units."""
    weights = json.loads((run / "evaluation" / "scores.json").read_text())["weights"]
    pairs = list(zip(weights["base"]["images"], weights["ema"]["images"], strict=True))
    units = {
        name: statistics.pstdev(s for pair in pairs for image in pair if (s := image["scores"][name]) is not None)
        for name in ("small", "bright", "colour")
    }
    found = {}
    for before, after in pairs:
        known = {n: after["scores"][n] - s for n, s in before["scores"].items() if s is not None}
        scaled = [change / units[name] for name, change in known.items()]
        found[before["prompt"]] = {**known, "mean": statistics.fmean(scaled), "worst": min(scaled)}
    return found


def screenshot(page: Browser, name: str) -> None:
    """What the window shows."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    time.sleep(0.3)
    data = page.call("Page.captureScreenshot")["data"]
    (SCREENSHOTS / f"{name}-{page.run('innerWidth')}.png").write_bytes(base64.b64decode(data))


def focused(page: Browser) -> str:
    title: str = page.run("(e => e.matches('.card') ? e.querySelector('.prompt').title : e.id)(document.activeElement)")
    return title


def zoomed(page: Browser) -> Any:
    return page.run("document.querySelector('#zoom').open && document.querySelector('#zoom-prompt').textContent")


def test_prompts_are_filtered_searched_and_shown_in_parts(page: Browser) -> None:
    everything = [*THINGS, *ODD]
    assert shown(page) == everything[:24]
    page.click(".further")
    assert shown(page) == everything
    assert page.run("document.querySelector('.further').hidden")
    assert focused(page) == everything[24]
    page.choose("#gallery-source", "=odd")
    assert shown(page) == ODD
    page.choose("#gallery-search", "CUP")
    assert shown(page) == ["a cup"]
    page.choose("#gallery-source", "")
    assert shown(page) == [*(f"a {colour} cup" for colour in COLOURS), "a cup"]
    assert "5 of 30 prompts" in page.run("document.querySelector('.tools').innerText")
    page.run("document.querySelector('#gallery').scrollIntoView({behavior: 'instant'})")
    screenshot(page, "gallery")


def test_prompts_are_sorted_by_gain_and_regression(page: Browser, run: Path) -> None:
    found = changes(run)
    for reward, gain, loss in (("", "mean", "worst"), ("=bright", "bright", "bright"), ("=colour", "colour", "colour")):
        page.choose("#gallery-reward", reward)
        known = [prompt for prompt in found if gain in found[prompt]]
        page.choose("#gallery-order", "gain")
        values = [found[prompt][gain] for prompt in shown(page)]
        assert len(values) == min(24, len(known))
        assert values == pytest.approx(sorted((found[p][gain] for p in known), reverse=True)[:24], abs=1e-4)
        page.choose("#gallery-order", "loss")
        values = [found[prompt][loss] for prompt in shown(page)]
        assert values == pytest.approx(sorted(found[p][loss] for p in known)[:24], abs=1e-4)
    text = page.run("document.querySelector('#cards .change').innerText")
    assert re.fullmatch(rf"colour \S+ → \S+, [+{MINUS}]\S+( [▲▼])?", text)
    page.choose("#gallery-reward", "")
    assert " sd" in page.run("document.querySelector('#cards .change').innerText")


def test_a_picture_is_enlarged_and_the_keyboard_walks_through_all(page: Browser) -> None:
    page.choose("#gallery-source", "=things")
    page.click("#cards .card", 1)
    assert zoomed(page) == THINGS[1]
    screenshot(page, "zoom")
    images = page.run("[...document.querySelectorAll('#zoom img')].map(i => [i.alt, i.getBoundingClientRect().width])")
    assert [alt for alt, _ in images] == [f"{weights}: {THINGS[1]}" for weights in ("base", "ema")]
    small = page.run("document.querySelectorAll('#cards .card')[1].querySelector('img').getBoundingClientRect().width")
    assert all(width >= small for _, width in images)
    assert page.run("document.querySelector('#zoom').scrollWidth <= document.querySelector('#zoom').clientWidth")
    rows = page.run("[...document.querySelectorAll('#zoom tbody th')].map(th => th.innerText)")
    assert rows == ["small", "bright", "colour"]
    for key, prompt in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("ArrowLeft", 1), ("ArrowLeft", 0)):
        page.press(key)
        assert zoomed(page) == THINGS[prompt]
    page.press("ArrowLeft")
    assert zoomed(page) == THINGS[0]
    page.press("Escape")
    assert not zoomed(page)
    page.run("new Promise((later) => setTimeout(later, 300))")  # the event `close`, which moves the focus, comes later
    assert focused(page) == THINGS[0]
    page.press("ArrowRight")
    assert focused(page) == THINGS[1]
    page.press("Enter")
    assert zoomed(page) == THINGS[1]
    page.click("#zoom [data-step='1']")
    assert zoomed(page) == THINGS[2]
    page.click("#zoom [data-close]")
    assert not zoomed(page)


def test_up_and_down_walk_through_the_rows(page: Browser) -> None:
    page.run("document.querySelector('#cards .card').focus()")
    across = page.run("getComputedStyle(document.querySelector('#cards')).gridTemplateColumns.split(' ').length")
    page.press("ArrowDown")
    assert focused(page) == THINGS[across]
    page.press("ArrowUp")
    assert focused(page) == THINGS[0]
    page.press("ArrowUp")
    assert focused(page) == THINGS[0]


def test_a_slash_searches_and_escape_ends_it(page: Browser) -> None:
    page.press("/")
    assert focused(page) == "gallery-search"
    for letter in "kite":
        page.press(letter)
    assert shown(page) == [f"a {colour} kite" for colour in COLOURS]
    page.press("/")
    assert page.run("document.querySelector('#gallery-search').value") == "kite/"
    assert shown(page) == []
    page.press("Escape")
    assert len(shown(page)) == 24
    assert focused(page) == ""


def test_a_long_or_hostile_prompt_stays_in_its_place(page: Browser) -> None:
    page.choose("#gallery-source", "=odd")
    for index, prompt in enumerate(ODD[:3]):
        page.click("#cards .card", index)
        assert zoomed(page).strip() == prompt.strip()
        assert page.run("document.querySelector('#zoom').scrollWidth <= document.querySelector('#zoom').clientWidth")
        page.press("Escape")


def test_a_link_leads_to_the_file_in_full_size(page: Browser, run: Path) -> None:
    page.click("#cards .card")
    links = page.run("[...document.querySelectorAll('#zoom a.file')].map(a => decodeURI(a.pathname))")
    assert len(links) == 2
    assert all(Path(link).parent == (run / "evaluation" / "images").resolve() and Path(link).exists() for link in links)


def test_what_the_reader_chose_outlives_a_reload(page: Browser, run: Path) -> None:
    page.choose("#gallery-order", "gain")
    page.choose("#gallery-reward", "=bright")
    page.choose("#gallery-search", "hat")
    before = shown(page)
    page.show(run / "report.html", width=page.run("innerWidth"))
    assert shown(page) == before
    assert page.run("document.querySelector('#gallery-reward').value") == "=bright"


def test_the_table_before_and_after_needs_no_scrolling(page: Browser) -> None:
    box = "document.querySelector('.evaluation').parentElement"
    assert page.run(f"{box}.scrollWidth <= {box}.clientWidth")
    right = "[...document.querySelectorAll('.evaluation :is(th, td)')].map(cell => cell.getBoundingClientRect().right)"
    assert max(page.run(right)) <= page.run("innerWidth")
    cells = page.run("document.querySelector('.evaluation tbody tr').innerText")
    assert "small" in cells
    assert re.search(rf"[+{MINUS}]?\d.* to [+{MINUS}]?\d", cells)
    page.run("document.querySelector('#evaluation').scrollIntoView({behavior: 'instant'})")
    screenshot(page, "before-and-after")
