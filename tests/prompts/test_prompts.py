"""Prompts: reading, drawing and dealing them out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from marble_rl.errors import InputError
from marble_rl.prompts import PromptSet, load_prompts, read_prompt_file
from marble_rl.prompts.settings import PromptSourceConfig


def prompt_set(sizes: dict[str, int], shares: dict[str, float] | None = None) -> PromptSet:
    sources = [
        PromptSourceConfig(name=name, texts=[f"{name} {i}" for i in range(size)], share=(shares or {}).get(name, 1.0))
        for name, size in sizes.items()
    ]
    return load_prompts(sources, "prompts.train")


def test_reads_text_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffone\n\n  two  \ntwo\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"prompt": "three", "target": "3", "rewards": ["ocr"]}\n\n{"prompt": "four"}\n')
    sources = [
        PromptSourceConfig(name="a", file=tmp_path / "a.txt"),
        PromptSourceConfig(name="b", file=tmp_path / "b.jsonl", rewards=["geneval"]),
    ]
    prompts = load_prompts(sources, "prompts.train").prompts
    assert [p.text for p in prompts] == ["one", "two", "two", "three", "four"]
    assert [p.index for p in prompts] == [0, 1, 2, 3, 4]
    assert prompts[3].metadata == {"target": "3"}
    assert [p.rewards for p in prompts[2:]] == [None, frozenset({"ocr"}), frozenset({"geneval"})]


def test_a_hundred_thousand_lines(tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("\n".join(f"prompt {i}" for i in range(100_000)))
    assert len(read_prompt_file(tmp_path / "many.txt").prompts) == 100_000


def test_equal_texts_are_different_groups() -> None:
    prompts = load_prompts([PromptSourceConfig(name="a", texts=["same", "same"])], "p")
    assert {group.prompt.index for group in prompts.draw(0, 0, 2)} == {0, 1}


def test_drawing_is_a_function_of_seed_and_rollout() -> None:
    prompts = prompt_set({"a": 7, "b": 5})
    assert prompts.draw(3, 11, 4) == prompts.draw(3, 11, 4)
    assert prompts.draw(3, 11, 4) != prompts.draw(4, 11, 4)
    assert prompts.draw(3, 11, 4) != prompts.draw(3, 12, 4)


def test_every_prompt_once_in_a_pass_and_never_twice_in_a_rollout() -> None:
    prompts = prompt_set({"a": 12})
    for number in range(3):
        drawn = [g.prompt.index for r in range(4) for g in prompts.draw(0, 4 * number + r, 3)]
        assert sorted(drawn) == list(range(12))
    leftovers = prompt_set({"a": 7})
    for rollout in range(20):
        assert max(Counter(g.prompt.index for g in leftovers.draw(0, rollout, 3)).values()) == 1


def test_shares() -> None:
    prompts = prompt_set({"a": 40, "b": 40, "c": 40}, {"a": 2.0, "b": 1.0, "c": 1.0})
    assert prompts.counts(8) == [4, 2, 2]
    assert prompts.counts(9) == [5, 2, 2]
    assert sum(prompts.counts(7)) == 7


@pytest.mark.parametrize(("groups", "updates"), [(8, 1), (8, 2), (9, 1), (9, 3), (7, 1), (12, 3), (2, 1), (6, 6)])
def test_updates_and_halves_are_balanced_in_all_and_by_source(groups: int, updates: int) -> None:
    prompts = prompt_set({"a": 40, "b": 40})
    drawn = prompts.draw(0, 0, groups, updates)
    assert [g.slot for g in drawn] == list(range(groups))
    assert Counter(g.update for g in drawn) == dict.fromkeys(range(updates), groups // updates)
    assert [g.update for g in drawn] == sorted(g.update for g in drawn)
    for chosen in (drawn, *([g for g in drawn if g.prompt.source == s] for s in ("a", "b"))):
        cells = Counter((g.update, g.half) for g in chosen)
        counts = [cells[u, h] for u in range(updates) for h in (0, 1)]
        assert max(counts) - min(counts) <= 1


def test_too_many_groups_are_refused() -> None:
    with pytest.raises(InputError, match=r"lower rollout\.groups"):
        prompt_set({"a": 3, "b": 40}).check_groups(8)
    with pytest.raises(InputError, match=r"gets none\. Use 101 groups"):
        prompt_set({"a": 3, "b": 40}, {"a": 0.01}).check_groups(8)
