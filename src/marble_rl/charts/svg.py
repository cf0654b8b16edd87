"""A chart as SVG inside a page: matplotlib's own, with the colours and the font of the page and without its ids."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure

from marble_rl.charts.style import VARIABLES, styled

DPI = 72
"""One point is one pixel."""
FONT, SMALL_FONT = 14.5, 12.0
"""Pixels of labels. Room is made for `FONT` although only phones show it, where wide charts are scaled down."""
WIDE = 400
EDGE = 3.0
"""Pixels around a chart."""
RULER = RendererAgg(1, 1, DPI)
"""Measures texts, and remembers their sizes from one chart to the next."""


class Sheet:
    """A chart in pixels: its width is that of the whole, its height that of the plot without its labels."""

    def __init__(self, width: float, plot_height: float) -> None:
        self.width, self.height, self.plot_height = width, plot_height, plot_height
        self.figure = Figure(figsize=(width / DPI, plot_height / DPI), dpi=DPI)
        self.figure.patch.set_visible(False)
        self.axes = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))

    def fit(self, labels: Sequence[Any] = ()) -> None:
        """Make room for the axes' labels, the legend, and ``labels`` beside the plot. Call it once, after drawing."""
        legend = self.axes.get_legend()
        beside = [*labels, *([legend] if legend else [])]
        plot = self.axes.get_window_extent(RULER)
        whole = self.axes.get_tightbbox(RULER, bbox_extra_artists=beside)
        assert whole is not None, "the axes are visible"
        left, right = plot.x0 - whole.x0 + EDGE, whole.x1 - plot.x1 + EDGE
        below, above = plot.y0 - whole.y0 + EDGE, whole.y1 - plot.y1 + EDGE
        self.height = below + self.plot_height + above
        self.figure.set_size_inches(self.width / DPI, self.height / DPI)
        size = (self.width - left - right) / self.width, self.plot_height / self.height
        self.axes.set_position((left / self.width, below / self.height, *size))

    def places(self, x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
        """Pixels from the left and from the top."""
        across, up = self.axes.transData.transform(np.column_stack([x, y])).T
        return across.round(1).tolist(), (self.height - up).round(1).tolist()

    @property
    def plot(self) -> list[float]:
        """Left, top, right and bottom of the plot in pixels."""
        box = self.axes.get_window_extent()
        return [round(float(v), 1) for v in (box.x0, self.height - box.y1, box.x1, self.height - box.y0)]

    def svg(self, attributes: Markup) -> Markup:
        """``attributes`` distinguish it from the other charts of its page: ids of markers are made from them."""
        written = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": str(attributes)}):
            self.figure.savefig(written, format="svg")
        shapes = [shape for e in ElementTree.fromstring(written.getvalue()).iter() if (shape := _for_page(e))]
        return Markup('<svg viewBox="0 0 {:.0f} {:.0f}" {}>{}<g class="hover"></g></svg>').format(
            self.width, self.height, attributes, Markup("").join(shapes)
        )


@contextmanager
def sheet(width: float, plot_height: float) -> Iterator[Sheet]:
    """An empty one, in the style of the page."""
    with styled({"font.size": FONT if width >= WIDE else SMALL_FONT}):
        yield Sheet(width, plot_height)


def _for_page(element: ElementTree.Element) -> Markup | None:
    """A path, a marker or a text as the page needs it; None for what it does not need, such as groups."""
    tag = element.tag.rpartition("}")[2]
    style = re.sub(r"font(-size|-family)?: [^;]*;? ?|stroke-dashoffset: 0; ", "", element.get("style", ""))
    if tag not in ("path", "use", "text") or style == "fill: none":
        return None
    style = re.sub(r"#[0-9a-f]{6}", lambda colour: VARIABLES.get(colour[0], colour[0]), style)
    attributes = {"style": re.sub(r"([:;]) ", r"\1", style)}
    for key, value in element.attrib.items():
        if key in ("x", "y", "d") or (key == "transform" and not value.startswith("rotate(-0 ")):
            short = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value)
            attributes[key] = re.sub(r"\s*([A-Za-z])\s+", r"\1", short).strip() if key == "d" else short
        elif key == "id" or key.endswith("href"):
            attributes[key.rpartition("}")[2]] = value
    inside = Markup("").join(Markup(' {}="{}"').format(*pair) for pair in attributes.items())
    shape = Markup("<{}{}>{}</{}>").format(tag, inside, element.text if tag == "text" else "", tag)
    return Markup("<defs>{}</defs>").format(shape) if "id" in attributes else shape
