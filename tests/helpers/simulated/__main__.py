"""python -m simulated '["train", "config.yaml", ...]' '["evaluate", ...]': marble's commands on a machine whose
accelerator is the simulated one.

PLANTED="training.batch|text|other text" in the environment changes the source of a module while it is imported, to see
whether that mistake would be found.
"""

import json
import os
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType

import simulated  # noqa: F401


def plant(module: str, text: str, other: str) -> None:
    compiled = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        if name != f"marble_rl.{module}":
            return compiled(self, name)
        source = self.get_data(self.path).decode()
        assert text in source, f"{name} has no {text}"
        return compile(source.replace(text, other), self.path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


if planted := os.environ.get("PLANTED"):
    plant(*planted.split("|"))

from marble_rl.cli.child import run_commands  # noqa: E402  after the change of the source

run_commands([json.loads(text) for text in sys.argv[1:]])
