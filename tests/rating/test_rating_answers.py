"""answers.jsonl: what was confirmed is there after a crash, the last answer counts, and one sent twice counts once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marble_rl.errors import InputError, StorageFailed
from marble_rl.rating.answers import AnswersFile, Key, read_answers
from ratings import files_end_at

FIRST = Key("anna", 0, 0, "alignment", "base", None)
SECOND = Key("anna", 0, 0, "quality", "base", None)


def values(path: Path) -> dict[Key, float]:
    return {key: answer.value for key, answer in read_answers(path).items()}


def test_the_last_answer_counts_and_a_repeated_one_adds_no_line(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    with AnswersFile.opened(file) as answers:
        for value in (2.0, 2.0, 5.0, 5.0, 2.0):
            answers.add(FIRST, value)
        answers.add(SECOND, 1.0)
        assert answers.value(FIRST) == 2.0
    assert [json.loads(line)["value"] for line in file.read_text().splitlines()] == [2.0, 5.0, 2.0, 1.0]
    assert values(file) == {FIRST: 2.0, SECOND: 1.0}


@pytest.mark.parametrize("torn", ['{"rater": "anna", "pro', "{", "\x00\x00\x00"])
def test_a_torn_last_line_is_ignored_and_then_replaced(tmp_path: Path, torn: str) -> None:
    file = tmp_path / "answers.jsonl"
    with AnswersFile.opened(file) as answers:
        answers.add(FIRST, 3.0)
    with open(file, "a") as end:
        end.write(torn)
    assert values(file) == {FIRST: 3.0}
    with AnswersFile.opened(file) as answers:
        assert answers.value(FIRST) == 3.0
        answers.add(SECOND, 4.0)
    assert values(file) == {FIRST: 3.0, SECOND: 4.0}
    assert len(file.read_text().splitlines()) == 2


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    with AnswersFile.opened(file) as answers:
        answers.add(FIRST, 3.0)
    file.write_text(file.read_text() + '{"rater": "anna"}\n')
    with pytest.raises(InputError, match=r"answers\.jsonl, line 2: not an answer .*delete the line"):
        read_answers(file)


def test_a_second_server_is_kept_out(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    with (
        AnswersFile.opened(file),
        pytest.raises(InputError, match="served by another process"),
        AnswersFile.opened(file),
    ):
        pass


def test_an_answer_that_does_not_fit_on_the_disk_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    with AnswersFile.opened(file) as answers:
        answers.add(FIRST, 3.0)
        with (
            files_end_at(file.stat().st_size + 10),
            pytest.raises(StorageFailed, match=r"cannot write .*answers\.jsonl"),
        ):
            answers.add(SECOND, 4.0)
        assert answers.value(SECOND) is None
        assert values(file) == {FIRST: 3.0}
        answers.add(SECOND, 5.0)
    assert values(file) == {FIRST: 3.0, SECOND: 5.0}
