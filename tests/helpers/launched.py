"""What torchrun starts in the tests: several marble commands one after the other, to import torch only once.

python -m torch.distributed.run ... launched.py FOLDER, where FOLDER/commands.json lists the commands' arguments. Leaves
FOLDER/pid-RANK while it runs and FOLDER/codes-RANK.json, the exit code of each command.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from marble_rl.cli import main


def run(folder: Path) -> None:
    rank = os.environ["RANK"]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    codes = []
    for arguments in json.loads((folder / "commands.json").read_text()):
        try:
            main(arguments)
        except SystemExit as exit_:
            codes.append(int(exit_.code or 0))
        (folder / f"codes-{rank}.json").write_text(json.dumps(codes))
    sys.exit(max(codes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
