"""Stage 1: prompts, their groups, and which rewards apply.

Drawing is stateless: the groups of rollout r are a function of (seed, r), so a resumed run meets the prompts that
the uninterrupted one would have met. Each source is walked through in random order, without repetition, again and
again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from marble_rl.config.schema import PromptSourceConfig
from marble_rl.errors import InputError
from marble_rl.seeding import generator
from marble_rl.types import HALVES, Group, Prompt


class PromptSet:
    """All prompts of a split, by source."""

    def __init__(self, sources: Sequence[tuple[PromptSourceConfig, list[Prompt]]]) -> None:
        self.sources = {config.name: tuple(prompts) for config, prompts in sources}
        self._shares = [config.share for config, _ in sources]

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for prompts in self.sources.values() for prompt in prompts]

    def draw(self, seed: int, rollout: int, groups: int, updates: int = 1) -> tuple[Group, ...]:
        """The groups of one rollout, those of an update together, both of its halves with every source's share.

        Groups are dealt out like cards to the updates' halves; the deal goes on from one source to the next, so
        that halves differ by at most one group in all and in each source.
        """
        drawn: list[tuple[int, int, Prompt]] = []
        for (name, prompts), count in zip(self.sources.items(), self.counts(groups), strict=True):
            for prompt in _walk(prompts, seed, name, rollout, count):
                hand = len(drawn) % (HALVES * updates)
                drawn.append((hand % updates, hand // updates, prompt))
        drawn.sort(key=lambda item: item[:2])
        return tuple(Group(slot, prompt, update, half) for slot, (update, half, prompt) in enumerate(drawn))

    def counts(self, groups: int) -> list[int]:
        """Groups of each source in a rollout, by largest remainder."""
        total = sum(self._shares)
        exact = [groups * share / total for share in self._shares]
        counts = [int(x) for x in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
        for i in by_remainder[: groups - sum(counts)]:
            counts[i] += 1
        return counts

    def check_groups(self, groups: int) -> None:
        """Every source must be present, and no prompt twice, in a rollout."""
        for (name, prompts), count in zip(self.sources.items(), self.counts(groups), strict=True):
            if count == 0:
                raise InputError(
                    f"rollout.groups: {groups} groups leave none for the prompt source {name!r}; "
                    f"use at least {len(self.sources)} groups or raise its share"
                )
            if count > len(prompts):
                raise InputError(
                    f"rollout.groups: {groups} groups need {count} different prompts of the source {name!r}, "
                    f"which has {len(prompts)}; lower rollout.groups or its share, or add prompts"
                )


def load_prompts(sources: Sequence[PromptSourceConfig], key: str) -> PromptSet:
    """Read every source; ``key`` is where they stand in the config, for messages."""
    loaded: list[tuple[PromptSourceConfig, list[Prompt]]] = []
    index = 0
    for i, source in enumerate(sources):
        where = f"{key}.{i} ({source.name})"
        if any(source.name == other.name for other, _ in loaded):
            raise InputError(f"{where}: the source name {source.name!r} is used twice; names must differ")
        rows = _rows(source, where)
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


Row = tuple[str, dict[str, Any], list[str] | None]


def _rows(source: PromptSourceConfig, where: str) -> list[Row]:
    if (source.file is None) == (source.texts is None):
        raise InputError(f"{where}: give either `file` or `texts`")
    if source.texts is not None:
        return [(text, {}, None) for text in source.texts if text.strip()]
    assert source.file is not None
    try:
        lines = source.file.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise InputError(f"{where}: prompt file not found: {source.file}; mend the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: cannot read {source.file}: {error}") from None
    numbered = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip()]
    if source.file.suffix == ".jsonl":
        return [_json_row(line, f"{where}: {source.file}, line {n}") for n, line in numbered]
    return [(line, {}, None) for _, line in numbered]


def _json_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON: {error.msg}; mend that line") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise InputError(f'{where}: expected an object with "prompt": "text", found {line[:80]!r}')
    text = row.pop("prompt").strip()
    rewards = row.pop("rewards", None)
    if rewards is not None and not (isinstance(rewards, list) and all(isinstance(r, str) for r in rewards)):
        raise InputError(f'{where}: "rewards" must be a list of reward names, found {rewards!r}')
    return text, row, rewards


def _walk(prompts: Sequence[Prompt], seed: int, source: str, rollout: int, count: int) -> list[Prompt]:
    """``count`` prompts for this rollout: pass after pass over the source, each in an order of its own.

    A pass ends when fewer than ``count`` prompts are left in it, so that no rollout holds a prompt twice.
    """
    if count == 0:
        return []
    rollouts_per_pass = len(prompts) // count
    number, position = divmod(rollout, rollouts_per_pass)
    order = torch.randperm(len(prompts), generator=generator(seed, f"prompts/{source}", number)).tolist()
    return [prompts[i] for i in order[position * count : (position + 1) * count]]


def read_prompt_file(path: Path) -> PromptSet:
    """One file as a prompt set of its own, for evaluation from the command line."""
    return load_prompts([PromptSourceConfig(name="prompts", file=path.resolve())], "--prompts")
