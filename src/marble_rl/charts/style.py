"""The style that the charts of pages and PNG files share."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import matplotlib.style

SETTINGS = matplotlib.rc_params_from_file(Path(__file__).with_name("marble.mplstyle"), use_default_template=False)
CSS = Path(__file__).with_name("palette.css").read_text(encoding="utf-8")
LIGHT: dict[str, str] = dict(re.findall(r"--(\w+): light-dark\((#\w{6})", CSS))
"""Colours by name, as in a light page."""
VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
LIGHT |= {"ink": LIGHT["text"], "ours": LIGHT["accent"], "theirs": LIGHT["quiet"]}
PALETTE = 10
"""Colours of rewards and methods, `r0` to `r9`."""


@contextmanager
def styled(settings: Mapping[str, object] | None = None) -> Iterator[None]:
    """Draw in this style, whatever the user's own matplotlibrc says."""
    with warnings.catch_warnings(), matplotlib.style.context(["default", SETTINGS | dict(settings or {})]):
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # a browser has more fonts
        yield


def plain(text: str) -> str:
    """Without line breaks, control characters and lone surrogates, which a label cannot show."""
    return "".join(filter(str.isprintable, text))
