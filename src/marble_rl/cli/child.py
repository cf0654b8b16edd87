"""The process of a job: commands of the command line one after the other, up to the first that fails.

python -m marble_rl.cli.child PARENT_PID '["train", "config.json", ...]' '["evaluate", ...]'

If the comparison dies it stops too, with everything saved. One process for training and evaluation: importing torch and
diffusers takes longer than many a small evaluation.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""linux/prctl.h: the signal that this process gets when its parent ends."""


def follow(parent: int) -> None:
    """Get SIGTERM when the parent is gone. Elsewhere than on Linux a job goes on to its end instead."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before it could be followed
            sys.exit(128 + signal.SIGTERM)


def run_commands(commands: Sequence[Sequence[str]]) -> None:
    from marble_rl.cli import main

    for arguments in commands:
        print("$ marble", *arguments, flush=True)
        try:
            main(arguments)
        except SystemExit as end:
            if end.code:
                raise
        gc.collect()  # the model of the command before


if __name__ == "__main__":
    follow(int(sys.argv[1]))
    run_commands([json.loads(text) for text in sys.argv[2:]])
