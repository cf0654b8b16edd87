"""Prompts made by rule, from a seed.

A generator has kinds of prompts: GenEval's tasks, or texts of one, two, ... words. Kinds take turns by weight, and each
goes through its prompts in its own random order. So

- the first n prompts do not depend on how many are asked for, and every stretch of them has the mix asked for;
- no prompt comes twice. Where a kind has no more, that is an error: going on without it would change the mix;
- `part` depends on what a prompt asks for, not on seed or number, so `train` and `heldout` never share anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from marble_rl.errors import InputError
from marble_rl.prompts import geneval, ocr
from marble_rl.prompts.files import Row, read_rows
from marble_rl.prompts.kinds import Kind, deal, shuffled
from marble_rl.prompts.meaning import meaning
from marble_rl.prompts.settings import GenevalPromptsConfig, OcrPromptsConfig
from marble_rl.seeding import derive_seed

HELD_OUT = 5
"""One in this many things to ask for is held out."""


def generate(
    config: GenevalPromptsConfig | OcrPromptsConfig, part: str, where: str, but: frozenset[str] = frozenset()
) -> list[Row]:
    """The prompts that a `generate` section asks for, without those that mean one of ``but``."""
    if isinstance(config, GenevalPromptsConfig):
        kinds = geneval.kinds(config.tasks, where)
    else:
        kinds = ocr.kinds(config.words, config.numbers, where)
    excluded = _excluded(config.exclude, f"{where}.exclude") | but

    def wanted(row: Row) -> bool:
        asked = meaning(row.text, row.metadata)
        return part in ("all", part_of(asked)) and asked not in excluded

    streams = {
        name: _stream(kind, derive_seed(config.seed, f"prompts/{config.type}/{name}"), wanted)
        for name, kind in kinds.items()
    }
    rows: list[Row] = []
    for name in deal({name: kind.weight for name, kind in kinds.items()}, config.count):
        row = next(streams[name], None)
        if row is None:
            raise InputError(
                f"{where}.count: {config.count}, but there are no more prompts of {name!r} after {len(rows)} in this "
                f"mix (part {part}); ask for {len(rows)} at most, lower its weight, or give it a separate source"
            )
        rows.append(row)
    return rows


def part_of(asked: str) -> str:
    """`train` or `heldout`, for what a prompt asks for."""
    return "train" if derive_seed(0, f"prompts/part/{asked}") % HELD_OUT else "heldout"


def _stream(kind: Kind, seed: int, wanted: Callable[[Row], bool]) -> Iterator[Row]:
    return filter(wanted, map(kind.write, shuffled(kind.size, random.Random(seed))))


def _excluded(file: Path | None, where: str) -> frozenset[str]:
    """What the prompts of a file ask for."""
    if file is None:
        return frozenset()
    try:
        return frozenset(meaning(row.text, row.metadata) for row in read_rows(file, "heldout", where))
    except InputError as error:
        message = str(error)
        raise InputError(message if message.startswith(where) else f"{where}: {file}: {message}") from None
