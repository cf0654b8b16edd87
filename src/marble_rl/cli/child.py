"""The process of a job of `marble compare`: runs commands one after the other, up to the first that fails.

python -m marble_rl.cli.child PARENT_PID '["train", "config.json", ...]' '["evaluate", ...]'

If the comparison dies, the job stops too, with everything saved. Training and evaluation share one process, because
importing torch and diffusers takes longer than many small evaluations.
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
"""From linux/prctl.h: sets the signal that this process gets when its parent ends."""


def follow(parent: int) -> None:
    """Ask for SIGTERM when the parent ends. On systems other than Linux a job runs to its end instead."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the call above
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
        gc.collect()  # frees the model of this command before the next one starts


if __name__ == "__main__":
    follow(int(sys.argv[1]))
    run_commands([json.loads(text) for text in sys.argv[2:]])
