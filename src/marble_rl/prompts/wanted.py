"""The text that a prompt asks a picture to show."""

from __future__ import annotations

import re

from marble_rl.types import Prompt

QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”|\u2018(.+?)\u2019(?!\w)|(?<!\w)'(.+?)'(?!\w)")
"""Text in quotes of four kinds. An apostrophe within or after a word is none."""


def wanted_text(prompt: Prompt) -> str | None:
    """``target`` of the prompt's metadata, otherwise what stands in quotes in it; None where there is neither."""
    target = prompt.metadata.get("target")
    if target is not None:
        return str(target)
    quoted = ["".join(groups) for groups in QUOTED.findall(prompt.text)]
    return " ".join(quoted) or None
