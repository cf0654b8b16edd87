"""The order of the layers: a package imports only from what stands below it. And the size of files and functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import marble_rl

ROOT = Path(marble_rl.__file__).parent
LAYERS = (
    {"errors", "types", "section", "seeding", "devices", "storage", "hub", "intervals", "plugins", "trust"}
    | {"advantages"},
    {"charts"},
    {"mini"},
    {"distributed"},
    {"losses"},
    {"gradients"},
    {"balancing"},
    {"prompts"},
    {"models"},
    {"rollout"},
    {"rewards"},
    {"config"},
    {"runs"},
    {"memory"},
    {"inference"},
    {"evaluation"},
    {"training"},
    {"diagnose"},
    {"compare"},
    {"report"},
    {"bench"},
    {"rating"},
    {"cli"},
)
"""From the bottom to the top. The modules of the first layer are the only ones outside of a package."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Modules of the package that the code imports, functions included, blocks for type checkers left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.module == "marble_rl":
            yield from ((alias.name, child.lineno) for alias in child.names if alias.name in LEVEL)
        elif isinstance(child, ast.ImportFrom) and (child.module or "").startswith("marble_rl."):
            yield (child.module or "").split(".")[1], child.lineno
        elif isinstance(child, ast.Import):
            yield from ((a.name.split(".")[1], child.lineno) for a in child.names if a.name.startswith("marble_rl."))
        yield from imports(child)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_its_own_package_and_from_layers_below(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for package, line in imports(ast.parse(path.read_text())):
        below = LEVEL[package] < LEVEL[own] or own == package or LEVEL[own] == 0 == LEVEL[package]
        assert below, f"{path.relative_to(ROOT)}:{line} imports marble_rl.{package}, which is not below {own}"


def test_every_module_and_package_has_its_layer() -> None:
    there = {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert there - {"__init__", "__pycache__"} == set(LEVEL)
    assert len(LAYERS[0]) <= 11


TOOLS = ROOT.parents[1] / "tools"
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 350, 60
EXCEPTIONS: dict[str, str] = {}
"""file, or file:function -> why it may be longer"""


@pytest.mark.parametrize("path", sorted([*ROOT.rglob("*.py"), *TOOLS.rglob("*.py")]), ids=lambda path: path.stem)
def test_a_reader_can_see_a_part_whole(path: Path) -> None:
    text = path.read_text()
    if path.name not in EXCEPTIONS:
        assert len(text.splitlines()) <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and f"{path.name}:{node.name}" not in EXCEPTIONS:
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MOST_LINES_OF_A_FUNCTION, f"{path}: {node.name} has {lines} lines"
