"""Taking functions and loops out of a checkout's files."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marble_rl.errors import InputError


class Checkout:
    """A work tree of another program."""

    def __init__(self, root: Path, option: str, needs: str) -> None:
        """``needs``: a file that must be there. ``option``: of the command line, for messages."""
        if not (root / needs).is_file():
            raise InputError(f"{option}: {root} has no {needs}; give the folder of a checkout")
        self.root = root

    @property
    def commit(self) -> str:
        """Its commit, for the page."""
        asked = subprocess.run(["git", "-C", str(self.root), "rev-parse", "HEAD"], capture_output=True, text=True)
        return asked.stdout.strip()[:12] or "unknown commit"

    def define(self, file: str, names: set[str], into: dict[str, Any]) -> None:
        """Define the functions and constants ``names`` of a file in the namespace ``into``."""
        nodes = [node for node in self._tree(file).body if names & _defined(node)]
        self._check(file, names, {name for node in nodes for name in _defined(node)})
        self._run(nodes, file, into)

    def methods(self, file: str, of: str, names: set[str], into: dict[str, Any]) -> None:
        """The same of methods of the class ``of``."""
        kinds = [node for node in self._tree(file).body if isinstance(node, ast.ClassDef) and node.name == of]
        self._check(file, {of}, {kind.name for kind in kinds})
        nodes = [node for node in kinds[0].body if names & _defined(node)]
        self._check(file, names, {name for node in nodes for name in _defined(node)})
        self._run(nodes, file, into)

    def loop(self, file: str, function: str, over: str) -> Callable[[dict[str, Any]], None]:
        """The `for` statement in a function that assigns to ``over``, to be run in a namespace."""
        for node in ast.walk(self._tree(file)):
            if isinstance(node, ast.FunctionDef) and node.name == function:
                for inner in ast.walk(node):
                    if isinstance(inner, ast.For) and over in _names(inner.target):
                        found = inner
                        return lambda into: self._run([found], file, into)
        raise InputError(f"{self.root / file}: {function} has no loop over {over}; another version of it is needed")

    def _tree(self, file: str) -> ast.Module:
        path = self.root / file
        if not path.is_file():
            raise InputError(f"{self.root} has no {file}; another version of it is needed")
        return ast.parse(path.read_text(encoding="utf-8"))

    def _check(self, file: str, wanted: set[str], found: set[str]) -> None:
        if wanted - found:
            missing = ", ".join(sorted(wanted - found))
            raise InputError(f"{self.root / file} has no {missing}; another version of it is needed")

    def _run(self, nodes: list[Any], file: str, into: dict[str, Any]) -> None:
        exec(compile(ast.Module(body=nodes, type_ignores=[]), str(self.root / file), "exec"), into)


def _names(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _defined(node: ast.stmt) -> set[str]:
    """Names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
