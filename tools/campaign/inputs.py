"""Hostile configs, `--set` values and prompt files: `marble config check` accepts them, or refuses them in one line."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import yaml

from tools.campaign import hostile
from tools.campaign.attack import Attack, Seeded, faults_of
from tools.campaign.process import run
from tools.campaign.world import World, write_prompts


def config(world: World, seeded: Seeded) -> Attack:
    rng, file = seeded.rng, seeded.folder / "config.yaml"
    write_prompts(seeded.folder)
    if rng.random() < 0.6:
        file.write_bytes(_dumped(hostile.tree(rng, world.tree)))
        what = "another value"
    else:
        file.write_bytes(hostile.text(rng, yaml.safe_dump(world.tree)))
        what = "another text"
    ended = run(["config", "check", file.name], seeded.folder)
    return Attack(what, ended, faults_of(ended))


def _dumped(tree: object) -> bytes:
    try:
        return yaml.safe_dump(tree, allow_unicode=True).encode(errors="surrogatepass")
    except yaml.YAMLError:  # safe_dump has no form for a value: JSON has
        return json.dumps(tree, default=str, skipkeys=True).encode(errors="surrogatepass")


def override(world: World, seeded: Seeded) -> Attack:
    rng = seeded.rng
    key = _key(rng, world)
    given = rng.choice((*hostile.VALUES, *hostile.SNIPPETS, world.tree))
    text = given if isinstance(given, str) else json.dumps(given, default=str, skipkeys=True)
    argument = (
        f"{key}={text}".replace("\0", "\\0").encode(errors="surrogatepass")[:100_000].decode(errors="surrogateescape")
    )
    ended = run(["config", "check", world.config, "--set", argument], seeded.folder)
    return Attack(f"--set {argument[:80]!r}", ended, faults_of(ended))


def _key(rng: Random, world: World) -> str:
    """A dotted key of the config, sometimes a wrong one."""
    paths = [".".join(map(str, place)) for place in hostile.places(world.tree)]
    right = rng.choice(paths)
    return (
        right if rng.random() < 0.8 else rng.choice((f"{right}.x", right[1:], "", ".", "a" * 3000, "rewards.99.name"))
    )


LINES = (
    *(
        "",
        " ",
        "\0",
        "\ufeff",
        "\x1b[31mred",
        "x" * 2_000_000,
        "{",
        "null",
        "[]",
        "1",
        '"text"',
        '{"prompt": 1}',
        '{"prompt": ""}',
    ),
    *(
        '{"prompt": null}',
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "a", "rewards": "small"}',
        '{"prompt": "a", "rewards": [1]}',
    ),
    *(
        '{"prompt": "a", "rewards": ["nobody"]}',
        '{"prompt": "a", "objects": [{}]}',
        '{"prompt": "a", "count": 1e999}',
        hostile.NESTED,
    ),
    *(
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "x": NaN}',
        '{"text": "a"}',
        '{"prompt": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ),
)


def prompts(world: World, seeded: Seeded) -> Attack:
    rng = seeded.rng
    write_prompts(seeded.folder)
    file = seeded.folder / rng.choice(("things.txt", "colours.jsonl"))
    if rng.random() < 0.5:
        what = f"{file.name}: {hostile.file(rng, file)}"
    else:
        lines = file.read_text().splitlines()
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(LINES))
        file.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
        what = f"{file.name}: another line"
    ended = run(["config", "check", _beside(world, seeded.folder)], seeded.folder)
    return Attack(what, ended, faults_of(ended))


def _beside(world: World, folder: Path) -> Path:
    """The config, in the folder of the prompt files that it names."""
    file = folder / "config.yaml"
    file.write_bytes(world.config.read_bytes())
    return file
