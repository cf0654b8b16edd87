"""The gate before code that came with a run folder.

Whoever gives a config runs the code that it names. Whoever opens a run that someone else made need not want that: code
that lies in the folder of such a run is imported only with `--trust`. Every command starts with `begin_command`; what
opens a run calls `guard`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from marble_rl.errors import Untrusted

INTERPRETER = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
"""Where installed code lies, which runs anyway."""


class _Guarded:
    """A folder, by its name and by what links lead to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._prefixes = _forms(folder)
        own = (form for place in INTERPRETER for form in _forms(place))
        self._own = tuple(form for form in own if form.startswith(self._prefixes))

    def holds(self, file: str) -> bool:
        """Whether code of the run lies there; an interpreter within the folder is none."""
        return any(form.startswith(self._prefixes) and not form.startswith(self._own) for form in _forms(file))


def _forms(path: str | Path) -> tuple[str, ...]:
    return tuple(os.path.join(form, "") for form in (os.path.abspath(path), os.path.realpath(path)))


class _Gate(MetaPathFinder):
    """Stands before Python's own finders and refuses modules in guarded folders. All imports pass here, so it does not
    matter which module imports another, and which entry of sys.path leads into the folder."""

    def __init__(self) -> None:
        self.guarded: list[_Guarded] = []
        self.trusted = False
        self.ask: Callable[[str], bool] = lambda question: False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._check(spec)
                return spec
        return None

    def _check(self, spec: ModuleSpec) -> None:
        files = [spec.origin] if spec.has_location and spec.origin else []
        for file in [*files, *(spec.submodule_search_locations or ())]:
            run = next((guarded.folder for guarded in self.guarded if guarded.holds(file)), None)
            if run is None or self.trusted:
                continue
            self.trusted = self.ask(f"{run} brings code of its own, {file}. Run it?")
            if not self.trusted:
                raise Untrusted(
                    f"{spec.name!r} is code in the run folder {run} ({file}); it is not run, because a run may come "
                    "from someone else. Read it, and give --trust to run it"
                )


_gate = _Gate()


def guard(folder: Path) -> None:
    """From now on import no code that lies in this folder, unless it is trusted."""
    if all(guarded.folder != folder for guarded in _gate.guarded):
        _gate.guarded.append(_Guarded(folder))
    if _gate not in sys.meta_path:
        sys.meta_path.insert(0, _gate)


def begin_command(trusted: bool, ask: Callable[[str], bool]) -> None:
    """Forget the folders of the command before. ``trusted``: guarded code may run; otherwise ``ask`` decides."""
    _gate.guarded, _gate.trusted, _gate.ask = [], trusted, ask
