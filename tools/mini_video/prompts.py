"""Write the mini video world's prompt files: for each source one to train on and one held out.

No held-out prompt asks for what a training prompt asks for, in the same words or in others (`a red cone and a blue star
meet` is `a blue star and a red cone meet`). Every kind of motion, direction, speed, shape and colour occurs in
training; held-out prompts of the source `motion` join them in ways that training does not (`a red cone falls` where
training has red cones that bounce, and yellow ones that fall). Held-out signs say other letters.

python -m tools.mini_video.prompts configs/prompts
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tools.mini.prompts import Captioned, World, write_prompts
from tools.mini_video.scenes import SOURCES, draw_clip


def kind_of(clip: Captioned) -> str:
    """Of its motion; empty where no rule checks it."""
    return str(clip.metadata.get("motion", {}).get("kind", ""))


MINI_VIDEO = World("mini-video", SOURCES, draw_clip, kind_of)


def main(folder: Annotated[Path, typer.Argument(help="Where to write the six files.")]) -> None:
    """Write the mini video world's prompt files."""
    write_prompts(folder, MINI_VIDEO)


if __name__ == "__main__":
    typer.run(main)
