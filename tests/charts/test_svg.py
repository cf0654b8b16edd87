"""A chart inside a page: its text is text, its colours are the page's, and it refers to nothing outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import matplotlib
import pytest
from markupsafe import Markup

from marble_rl.charts.drawing import Line, Reference, curves, forest, matrix
from marble_rl.charts.svg import sheet
from marble_rl.intervals import Interval

HOSTILE = ["<script>alert(1)</script>", "\"quoted\" & 'single'", "$x_1^2$ and $", "\\frac{a}{b} {{x}}", "emoji 🪀 Ünï"]


def drawn(names: list[str], title: str = "t") -> Markup:
    with sheet(460.0, 200.0) as page:
        lines = [Line(n, [0, 1, 2], [0.1 * i, 0.5, i], f"r{i}", n, "line") for i, n in enumerate(names)]
        lines += [Line("dots", [0, 1], [1, 2], "r8", style="dots"), Line("rings", [0, 1], [2, 1], "r9", style="rings")]
        lines.append(Line("band", [0, 2], [1, 2], "theirs", style="dashed", band=[(0, 2), (1, 3)]))
        labels = curves(page.axes, lines, references=[Reference(0.7, names[0])])
        page.fit(labels)
        return page.svg(Markup('aria-label="{}"').format(title))


class Texts(HTMLParser):
    """Tags, and the texts between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_names_are_text_and_nothing_else() -> None:
    page = Texts(drawn(HOSTILE))
    assert set(HOSTILE) <= set(page.texts)
    assert set(page.tags) == {"svg", "g", "path", "text", "use", "defs"}


@pytest.mark.parametrize("name", ["line\nbreak", "nul\x00", "lone \ud800", "bell\x07", "turn \u202e around"])
def test_characters_that_cannot_be_drawn_are_left_out(name: str) -> None:
    page = Texts(drawn([name]))
    assert "".join(filter(str.isprintable, name)) in page.texts


def test_colours_follow_the_theme_and_nothing_is_fetched() -> None:
    svg = drawn(["a", "b"])
    assert not re.search(r"#[0-9a-f]{6}", svg), "every colour is a variable of the page"
    assert {"var(--r0)", "var(--r1)", "var(--r8)", "var(--r9)", "var(--quiet)", "var(--grid)"} <= set(
        re.findall(r"var\(--\w+\)", svg)
    )
    assert "url(" not in svg
    assert "http" not in svg
    assert "font-family" not in svg
    assert "<style" not in svg


def test_markers_of_two_charts_have_different_ids_and_a_chart_is_always_the_same() -> None:
    one, other = (re.findall(r'id="([^"]*)"', drawn(["a"], title)) for title in ("one", "other"))
    assert one
    assert not set(one) & set(other)
    svg = drawn(["a"], "one")
    assert set(re.findall(r'href="#([^"]*)"', svg)) == set(one)
    assert svg == drawn(["a"], "one")


def test_the_readers_own_settings_change_nothing() -> None:
    before = drawn(["a"])
    with matplotlib.rc_context({"text.usetex": True, "font.size": 30, "axes.facecolor": "red", "figure.dpi": 300}):
        assert drawn(["a"]) == before


@pytest.mark.parametrize("width", [340.0, 460.0])
def test_all_labels_lie_inside(width: float) -> None:
    with sheet(width, 100.0) as page:
        rows = [
            ("a name of twenty-two ch", Interval(-12345.0, -123456.0, 1.0), "r0"),
            ("b", Interval(0, 0, 0), "r1"),
        ]
        forest(page.axes, rows)
        page.fit()
        page.svg(Markup())
        box = page.axes.get_tightbbox()
    assert box is not None
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= page.width
    assert box.y1 <= page.height


def test_a_plot_has_the_height_it_was_given_below_and_above_its_labels() -> None:
    with sheet(460.0, 68.0) as page:
        matrix(page.axes, ["a", "b"], ["long name below", "c"], [[0.1, None]] * 2, [["x", ""]] * 2)
        page.fit()
        left, top, right, bottom = page.plot
        places = page.places([0, 1], [0, 1])
    assert bottom - top == pytest.approx(68.0, abs=0.2)
    assert page.height > bottom + 30, "the names of columns stand aslant below"
    assert left < places[0][0] < places[0][1] < right
    assert top < places[1][0] < places[1][1] < bottom
