"""python -m tools.tiny FOLDER [--family flux]"""

from __future__ import annotations

import argparse
from pathlib import Path

from marble_rl.cli.shared import quiet_libraries, set_library_verbosity
from tools.tiny import BUILDERS

if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tools.tiny", description="Write a tiny random pipeline.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=BUILDERS, default="sd3")
    arguments = parser.parse_args()
    set_library_verbosity()
    quiet_libraries()
    BUILDERS[arguments.family](arguments.folder)
    print(f"wrote a tiny random {arguments.family} pipeline to {arguments.folder}")
