"""Seeded mutations of values, trees, texts and files."""

from __future__ import annotations

import copy
import datetime
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

NESTED = "[" * 500 + "]" * 500
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]
)
"""Nine aliases of nine aliases of ...: 9^10 nodes in 400 bytes."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1_000_000_000, -(10**18), 2**63, 10**400, 0.0, -0.0, 1e-308, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "null",
        "true",
        "0",
        "-1",
        "1e309",
        "nan",
        "auto",
        "none",
        "~",
        "a\0b",
        "a\ud800b",
        "a\nb: c",
        "é" * 300,
    ),
    *(
        "x" * 5000,
        "../" * 2000,
        "/",
        ".",
        "..",
        "/dev/null",
        "/nonexistent",
        "~nobody/x",
        "$HOME",
        "file:///etc/passwd",
    ),
    *("os:path", "os.path:join", "json:loads", "nowhere:Nothing", "a:b:c", ":", "http://127.0.0.1:9", "https://[::1"),
    *(
        [],
        [[]],
        [None],
        [1, 2, 3],
        ["a", 1, None],
        [[[[[[[[]]]]]]]],
        {},
        {"": ""},
        {"type": "marble"},
        {"a": {"b": {"c": []}}},
    ),
    *(datetime.date(2026, 1, 1), b"bytes", {1: 2, None: 3}),
)

SNIPPETS = (
    *("trainer: {steps: 2026-13-45}", "x: !!python/object/apply:os.getcwd []", "x: !!binary '='", "x: !unknown 1"),
    *("x: &x [*x]", "x: &x {y: *x}", f"x: {NESTED}", f"x: {'9' * 5000}", "x: *nowhere", "? [a, b]\n: c", "<<: 1"),
    *(
        "<<: [*a]",
        BOMB,
        "\t- x",
        "%YAML 9.9",
        "--- a\n--- b",
        "x: 'unclosed",
        'x: "\\ud800"',
        "\ufeff",
        "x: 0x" + "f" * 3000,
    ),
    *(
        "x: 1_0_0",
        "x: 12:30:45",
        "x: .inf",
        "x: !!set {a, b}",
        "x: !!omap [a: 1]",
        "x: |\n  text",
        "@",
        "`",
        "{",
        "]",
        "!!",
    ),
)


def value(rng: Random) -> Any:
    return copy.deepcopy(rng.choice(VALUES))


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all nodes below the root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, child in items for place in ((*path, key), *places(child, (*path, key)))]


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def tree(rng: Random, original: Any) -> Any:
    """``original`` with one or two nodes changed."""
    changed = {"root": copy.deepcopy(original)}
    for _ in range(rng.choice((1, 1, 1, 2))):
        nodes = places(changed)
        path = rng.choice(nodes)
        parent, key = _at(changed, path[:-1]), path[-1]
        match rng.randrange(7):
            case 0 | 1 | 2:
                parent[key] = value(rng)
            case 3 if len(path) > 1:
                del parent[key]
            case 4 if isinstance(parent, dict) and len(path) > 1:
                parent[rng.choice((f"{key}x", str(key)[:-1], str(key).upper(), 7, None))] = parent.pop(key)
            case 5:
                parent[key] = rng.choice(([parent[key]], {"x": parent[key]}, [parent[key]] * 3))
            case _:
                parent[key] = copy.deepcopy(_at(changed, rng.choice(nodes)))
    return changed["root"]


def text(rng: Random, original: str) -> bytes:
    """The bytes of ``original`` with one of them, a line, or a part changed."""
    data = original.encode()
    lines = original.splitlines(keepends=True)
    place, row = rng.randrange(len(data) + 1), rng.randrange(len(lines) + 1)
    match rng.randrange(7):
        case 0:
            return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        case 1:
            return data[:place]
        case 2:
            return data[:place] + rng.randbytes(rng.randrange(1, 20)) + data[place:]
        case 3 | 4:
            return "".join([*lines[:row], rng.choice(SNIPPETS) + "\n", *lines[row:]]).encode(errors="surrogatepass")
        case 5:
            rng.shuffle(lines)
            return "".join(lines).encode()
        case _:
            return "".join([*lines[:row], *(" " + line for line in lines[row:])]).encode()


def file(rng: Random, path: Path) -> str:
    """Damage a file; says how."""
    damages: tuple[tuple[str, Callable[[], object]], ...] = (
        ("a bit flipped", lambda: _flip(rng, path)),
        ("cut off", lambda: os.truncate(path, rng.randrange(max(1, path.stat().st_size)))),
        ("empty", lambda: path.write_bytes(b"")),
        ("deleted", path.unlink),
        ("a folder", lambda: _replace(path, path.mkdir)),
        ("a symlink to itself", lambda: _replace(path, lambda: path.symlink_to(path.name))),
        ("a symlink to nothing", lambda: _replace(path, lambda: path.symlink_to("/nonexistent"))),
        ("random bytes", lambda: path.write_bytes(rng.randbytes(rng.randrange(1, 3000)))),
        ("bytes in front", lambda: path.write_bytes(rng.randbytes(9) + path.read_bytes())),
        ("bytes at the end", lambda: path.write_bytes(path.read_bytes() + b"\xff\xfe{" + rng.randbytes(9))),
        ("another value", lambda: path.write_text(_other_json(rng, path))),
        ("another value", lambda: path.write_text(_other_json(rng, path))),
    )
    name, damage = rng.choice(damages)
    damage()
    return name


def _replace(path: Path, make: Callable[[], object]) -> None:
    path.unlink()
    make()


def _flip(rng: Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _other_json(rng: Random, path: Path) -> str:
    """A JSON file, or one line of a JSON-lines file, with another value in it; anything else becomes deep JSON."""
    try:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        row = rng.randrange(len(lines))
        lines[row] = json.dumps(tree(rng, json.loads(lines[row])), default=str)
    except (ValueError, TypeError):
        return rng.choice((NESTED * 30, "true", "null", "[]", "{}", '"text"', "1e999", "NaN"))
    return "\n".join(lines)


def folder(path: Path, source: Path) -> Path:
    """A fresh copy of ``source`` at ``path``."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, path)
    return path
