"""From the sources of a config to a prompt set: files, inline texts, generators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marble_rl.errors import InputError
from marble_rl.prompts.drawing import PromptSet
from marble_rl.prompts.files import Row, Split, read_rows
from marble_rl.prompts.generators import generate
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.types import Prompt


def load_prompts(
    sources: Sequence[PromptSourceConfig], key: str, split: Split = "train", but: frozenset[str] = frozenset()
) -> PromptSet:
    """Read every source; ``key`` is where they stand in the config, for messages. ``but``: meanings (meaning.py) that
    generators leave out."""
    loaded: list[tuple[PromptSourceConfig, list[Prompt]]] = []
    index = 0
    for i, source in enumerate(sources):
        where = f"{key}.{i} ({source.name})"
        if any(source.name == other.name for other, _ in loaded):
            raise InputError(f"{where}: the source name {source.name!r} is used twice; names must differ")
        rows = _rows(source, split, where, but)
        if not rows:
            raise InputError(f"{where}: holds zero prompts; add at least one")
        prompts = []
        for text, metadata, rewards in rows:
            names = source.rewards if rewards is None else rewards
            prompts.append(Prompt(index, text, source.name, metadata, None if names is None else frozenset(names)))
            index += 1
        loaded.append((source, prompts))
    if not loaded:
        raise InputError(f"{key}: holds zero prompt sources; add at least one")
    return PromptSet(loaded)


def _rows(source: PromptSourceConfig, split: Split, where: str, but: frozenset[str]) -> list[Row]:
    given = [key for key in ("file", "texts", "generate") if getattr(source, key) is not None]
    if len(given) != 1:
        raise InputError(
            f"{where}: give exactly one of `file`, `texts` and `generate`, not {' and '.join(given) or 'none of them'}"
        )
    if source.texts is not None:
        return [Row(text, {}) for text in source.texts if text.strip()]
    if source.file is not None:
        return read_rows(source.file, split, where)
    assert source.generate is not None
    return generate(source.generate, source.generate.part or split, f"{where}.generate", but)


def read_prompt_file(path: Path) -> PromptSet:
    """A prompt set of one file, for evaluation from the command line."""
    return load_prompts([PromptSourceConfig(name="prompts", file=path.resolve())], "--prompts", "heldout")
