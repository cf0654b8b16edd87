"""One process of a comparison: the command line, stopped with everything saved if the comparison dies.

python -m marble_rl.compare.child PARENT_PID train CONFIG ...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""linux/prctl.h: the signal that this process gets when its parent ends."""


def follow(parent: int) -> None:
    """Get SIGTERM when the parent is gone. Elsewhere than on Linux a job goes on to its end instead."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before it could be followed
            sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    follow(int(sys.argv[1]))
    from marble_rl.cli import main

    main(sys.argv[2:])
