"""A report in a real browser, as wide as a desk and as narrow as a phone. Screenshots: build/report-screenshots/."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from browser import Browser
from comparisons import write_comparison, write_jobs
from marble_rl.charts.style import CSS
from marble_rl.report.wording import MINUS
from runs import base_config, marble, start, train, write_config

pytestmark = pytest.mark.full
SCREENSHOTS = Path(__file__).parents[2] / "build" / "report-screenshots"
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"


@pytest.fixture(scope="module")
def run(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen steps, an evaluation and a diagnosis, with prompts of two sources and two steps of samples."""
    folder = tmp_path_factory.mktemp("browser")
    rewards = [*base_config(tiny_sd3)["rewards"], {"name": "held", "type": "brightness", "held_out": True}]
    texts = [HOSTILE, "a 🪀 yo-yo", "word " * 500, "a_word_without_any_place_to_break_it" * 12]
    prompts = {"train": [{"name": "odd", "texts": texts}, {"name": "plain", "texts": ["a red cup", "a green hat"]}]}
    trainer = {"steps": 16, "eval_every": 8, "micro_batch": 16}
    balance = {"type": "marble", "refresh_every": 2}
    config = write_config(
        folder / "c.yaml", tiny_sd3, rewards=rewards, prompts=prompts, trainer=trainer, balance=balance
    )
    train(config, folder / "run")
    assert marble("evaluate", folder / "run", "--images", 2).code == 0
    assert marble("diagnose", folder / "run", "--batches", 4).code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(params=[(1280, False), (1280, True), (390, False), (390, True)], ids=str)
def shown(request: pytest.FixtureRequest, browser: Browser, run: Path) -> Iterator[Browser]:
    """The report in a window. Whatever a test does with it, nothing may complain and nothing may be fetched."""
    if not (run / "report.html").exists():
        assert marble("report", run).code == 0
    width, dark = request.param
    browser.complaints.clear()
    browser.requests.clear()
    browser.show(run / "report.html", width=width, dark=dark)
    yield browser
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.run("document.title") == "run · marble"


def test_it_fits_its_window(shown: Browser) -> None:
    width = shown.run("innerWidth")
    assert shown.run("document.documentElement.scrollWidth") <= width
    theme = "dark" if shown.run("matchMedia('(prefers-color-scheme: dark)').matches") else "light"
    shown.screenshot(SCREENSHOTS / f"run-{width}-{theme}.png")
    # Labels of charts stay in their cards, and none is too small to read.
    outside = """[...document.querySelectorAll('figure.chart svg text')].filter(text => {
        const box = text.getBoundingClientRect(), card = text.closest('figure').getBoundingClientRect();
        return box.left < card.left || box.right > card.right || box.height < 9;
    }).map(text => text.textContent)"""
    assert shown.run(outside) == []


def test_the_theme_follows_the_system_and_the_button(shown: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = shown.run("matchMedia('(prefers-color-scheme: dark)').matches")
    colours = {True: "rgb(20, 20, 22)", False: "rgb(251, 250, 248)"}
    assert shown.run(ground) == colours[dark]
    shown.click(".theme")
    assert shown.run(ground) == colours[not dark]
    shown.click(".theme")
    assert shown.run(ground) == colours[dark]


def test_every_tab_fold_and_link_works(shown: Browser) -> None:
    panels = "[...document.querySelectorAll('[role=tabpanel]')].map(panel => panel.offsetParent !== null)"
    count = shown.run("document.querySelectorAll('[role=tab]').length")
    assert count > 1
    for index in range(count):
        shown.click("[role=tab]", index)
        assert shown.run(panels) == [i == index for i in range(count)]

    folds = shown.run("document.querySelectorAll('details').length")
    assert folds >= 2
    for index in range(folds):
        shown.click("summary", index)
        assert shown.run(f"document.querySelectorAll('details')[{index}].open")
    assert "refresh_every" in shown.run("document.querySelector('pre').innerText")
    assert shown.run("document.documentElement.scrollWidth <= innerWidth")

    targets = shown.run("[...document.querySelectorAll('nav a')].map(a => document.querySelector(a.hash) !== null)")
    assert len(targets) >= 12
    assert all(targets)


def test_every_chart_shows_its_values(shown: Browser) -> None:
    """Under the pointer, at the middle of the chart; a click on the next chart leaves one tip."""
    live = "figure.chart:has(> script)"
    count = shown.run(f"document.querySelectorAll('{live}').length")
    assert count == shown.run("document.querySelectorAll('figure.chart').length") >= 20
    units = set()
    for index in range(count):
        shown.mouse("mouseMoved", shown.centre(f"{live} svg", index))
        tip = shown.run(f"document.querySelectorAll('{live}')[{index}].querySelector('.tip').innerText")
        heading = re.match(r"(step \d|batch size x|\S).*", tip)
        assert heading, tip
        units.add(heading[1][:5])
        box = "(b => [b.left, b.right])(document.querySelector('.tip').getBoundingClientRect())"
        left, right = shown.run(box)
        assert left >= 0
        assert right <= shown.run("innerWidth")
    assert shown.run("document.querySelectorAll('.tip').length") == 1
    assert {"batch", "step "} < units


def test_no_label_of_a_chart_covers_another(shown: Browser) -> None:
    """Labels aslant are left out: their boxes are larger than they are."""
    overlaps = """[...document.querySelectorAll('figure.chart svg')].flatMap(svg => {
        const texts = [...svg.querySelectorAll('text:not([transform])')].filter(text => text.textContent);
        const boxes = texts.map(text => text.getBoundingClientRect());
        const covers = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.4 * Math.min(a.height, b.height);
        return texts.flatMap((text, i) => texts.slice(i + 1).filter((_, k) => covers(boxes[i], boxes[i + 1 + k]))
            .map(other => [svg.getAttribute('aria-label').slice(0, 30), text.textContent, other.textContent]));
    })"""
    assert shown.run(overlaps) == []


def test_charts_have_the_colours_of_the_theme(shown: Browser) -> None:
    dark = shown.run("matchMedia('(prefers-color-scheme: dark)').matches")
    for name in ("r0", "r1", "grid"):
        light, dark_one = re.findall(rf"--{name}: light-dark\((#\w+), (#\w+)\)", CSS)[0]
        red, green, blue = bytes.fromhex((dark_one if dark else light)[1:])
        strokes = "[...document.querySelectorAll('#rewards svg path')].map(path => getComputedStyle(path).stroke)"
        assert f"rgb({red}, {green}, {blue})" in shown.run(strokes)


def test_a_diagnosis_is_drawn_inside_its_cards(shown: Browser) -> None:
    """Three rewards agree in nine cells, each with its number inside."""
    chart = "[...document.querySelectorAll('#diagnosis figure.chart')].find(f => f.innerText.startsWith('{}'))"
    cells = shown.run(
        rf"""(() => {{
            const svg = {chart.format("Cosines")}.querySelector('svg');
            const boxes = [...svg.querySelectorAll('path')].map(path => path.getBoundingClientRect());
            const number = /^([+{MINUS}]?\d\.\d\d|\?)$/;
            const around = (b, t) => b.left <= t.left && t.right <= b.right && b.top <= t.top && t.bottom <= b.bottom;
            return [...svg.querySelectorAll('text')].filter(text => number.test(text.textContent))
                .map(text => boxes.some(box => around(box, text.getBoundingClientRect())));
        }})()"""
    )
    assert cells == [True] * 9
    rows = shown.run("document.querySelectorAll('#diagnosis tbody tr').length")
    names = f"{chart.format('Another batch: worst')}.querySelectorAll('svg text[style*=end]').length"
    assert rows == shown.run(names) >= 7
    assert shown.run("document.querySelectorAll('#specialists figure.chart').length") == 2
    assert shown.run("document.querySelector('#specialists').innerText").count("source") >= 2


def test_it_prints_everything_on_white(browser: Browser, run: Path) -> None:
    marble("report", run)
    browser.show(run / "report.html", width=1280, dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.body).color") == "rgb(28, 27, 26)"
    assert browser.run("[...document.querySelectorAll('[role=tabpanel]')].every(panel => panel.offsetParent)")
    assert browser.run("document.querySelector('nav').offsetParent") is None
    pdf = browser.call("Page.printToPDF", printBackground=True)["data"]
    browser.call("Emulation.setEmulatedMedia", media="")
    assert len(pdf) > 50_000


@pytest.mark.parametrize("width", [1280, 390])
def test_a_comparison_fits_its_window(browser: Browser, tmp_path: Path, width: int) -> None:
    write_jobs(write_comparison(tmp_path))
    assert marble("report", tmp_path).code == 0
    browser.complaints.clear()
    browser.show(tmp_path / "report.html", width=width)
    browser.screenshot(SCREENSHOTS / f"comparison-{width}-light.png")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("document.querySelectorAll('#charts figure.chart svg use').length") == 3 * 3
    assert browser.run("[...document.querySelectorAll('#pictures img')].filter(i => i.naturalWidth > 0).length") == 3
    assert browser.complaints == []


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_watched_page_follows_its_run_until_ctrl_c(browser: Browser, run: Path, tmp_path: Path) -> None:
    metrics, page = run / "metrics.jsonl", tmp_path / "page.html"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:4]))
    process = start("report", run, "--out", page, "--watch")
    try:
        wait_for(page.exists)
        browser.show(page, width=1280)
        assert "4 of 16 steps" in browser.run("document.body.innerText")
        metrics.write_text("".join(lines[:7]))
        wait_for(lambda: "7 of 16 steps" in page.read_text())
        wait_for(lambda: "7 of 16 steps" in browser.run("document.body ? document.body.innerText : ''"))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert "data-refresh" not in page.read_text()
    finally:
        process.kill()
        process.communicate()
        metrics.write_text("".join(lines))
