"""The colours of charts and pages can be read and told apart, in the light and in the dark theme."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import marble_rl.report
from marble_rl.charts.drawing import STRONGEST
from marble_rl.charts.style import CSS, LIGHT, PALETTE, VARIABLES
from marble_rl.report.speed import STAGES

PAGE = (Path(marble_rl.report.__file__).parent / "templates" / "style.css").read_text()
COLOURS = {
    name: (light, dark) for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", CSS + PAGE)
}


def contrast(a: str, b: str) -> float:
    """WCAG 2: (lighter + 0.05) / (darker + 0.05) of the relative luminances."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_text_and_rewards_can_be_read_in_both_themes() -> None:
    written = ["text", "quiet", "accent", "good", "bad", *(f"r{i}" for i in range(PALETTE))]
    pairs = [(name, ground) for name in written for ground in ("page", "surface")]
    pairs += [(name, f"{name}-soft") for name in ("good", "bad", "mixed", "open")]
    for (name, ground), theme in itertools.product(pairs, (0, 1)):
        assert contrast(COLOURS[name][theme], COLOURS[ground][theme]) >= 4.5, (name, ground, theme)


def test_numbers_can_be_read_on_the_strongest_cells() -> None:
    for name, theme in itertools.product(("accent", "bad"), (0, 1)):
        over, under = ([int(COLOURS[n][theme][i : i + 2], 16) for i in (1, 3, 5)] for n in (name, "surface"))
        mixed = [round(STRONGEST * a + (1 - STRONGEST) * b) for a, b in zip(over, under, strict=True)]
        assert contrast(COLOURS["text"][theme], "#{:02x}{:02x}{:02x}".format(*mixed)) >= 4.5


def test_every_reward_and_stage_has_its_own_colour() -> None:
    for theme in (0, 1):
        assert len({COLOURS[f"r{i}"][theme] for i in range(PALETTE)}) == PALETTE
        assert len({COLOURS[f"s{i}"][theme] for i in range(len(STAGES))}) == len(STAGES)
    for name in [*(f"r{i}" for i in range(PALETTE)), *(f"s{i}" for i in range(len(STAGES)))]:
        assert f".{name} {{ --c: var(--{name}); }}" in PAGE


def test_a_light_colour_has_one_name_so_that_a_page_can_replace_it() -> None:
    assert len(VARIABLES) == CSS.count("light-dark(")
    assert LIGHT["ours"] == LIGHT["accent"]
