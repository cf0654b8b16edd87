"""Prompt files: what others publish is read as it is, and what cannot be read is refused with file, line and fix."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from marble_rl.errors import InputError
from marble_rl.prompts import load_prompts, read_prompt_file
from marble_rl.prompts.files import Split
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.prompts.wanted import wanted_text
from marble_rl.rewards.builtin.geneval import GenEval
from marble_rl.types import Prompt


def read(path: Path, data: str | bytes | None = None, split: Split = "train") -> list[Prompt]:
    if data is not None:
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return load_prompts([PromptSourceConfig(name="a", file=path)], f"prompts.{split}", split).prompts


def test_geneval_metadata(tmp_path: Path) -> None:
    """A line of each form in GenEval's evaluation_metadata.jsonl and flow_grpo's train_metadata.jsonl."""
    rows = [
        {
            "tag": "colors",
            "include": [{"class": "dog", "count": 1, "color": "blue"}],
            "prompt": "a photo of a blue dog",
        },
        {
            "tag": "counting",
            "include": [{"class": "cup", "count": 3}],
            "exclude": [{"class": "cup", "count": 4}],
            "prompt": "a photo of three cups",
        },
        {
            "tag": "position",
            "include": [{"class": "horse", "count": 1}, {"class": "cat", "count": 1, "position": ["below", 0]}],
            "prompt": "a photo of a cat below a horse",
        },
    ]
    file = tmp_path / "evaluation_metadata.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    prompts = read_prompt_file(file).prompts
    assert [{**p.metadata, "prompt": p.text} for p in prompts] == rows
    assert all(GenEval(detector="photo").applies_to(p) for p in prompts)


def test_text_to_write_in_a_plain_list(tmp_path: Path) -> None:
    prompts = read(
        tmp_path / "test.txt", "A neon sign that reads \"Open Late\", at night.\nA storefront with 'Toronto'.\n"
    )
    assert [wanted_text(p) for p in prompts] == ["Open Late", "Toronto"]


def test_further_keys_are_metadata(tmp_path: Path) -> None:
    line = {"prompt": "solve it", "image": "clue70_0026.png", "clue": 70, "negative_prompt": "blurry"}
    assert read(tmp_path / "train.jsonl", json.dumps(line))[0].metadata == {k: line[k] for k in line if k != "prompt"}


@pytest.mark.parametrize(("name", "comma"), [("drawbench.csv", ","), ("DrawBench.TSV", "\t")])
def test_tables(tmp_path: Path, name: str, comma: str) -> None:
    lines = [f"Prompts{comma}Category", f"A red car.{comma}Colors", f'"A ""sign"", big{comma}\r\ntall"{comma}Text', ""]
    prompts = read(tmp_path / name, "\ufeff" + "\r\n".join(lines))
    assert [(p.text, p.metadata) for p in prompts] == [
        ("A red car.", {"Category": "Colors"}),
        (f'A "sign", big{comma}\ntall', {"Category": "Text"}),
    ]


@pytest.mark.parametrize("name", ["{}.txt", "{}.jsonl", "{}_metadata.jsonl", "{}.csv"])
def test_folders(tmp_path: Path, name: str) -> None:
    form = {".txt": "{}", ".jsonl": '{{"prompt": "{}"}}', ".csv": "prompt\n{}"}[Path(name).suffix]
    for split in ("train", "test"):
        (tmp_path / name.format(split)).write_text(form.format(split))
    assert [p.text for p in read(tmp_path, split="train")] == ["train"]
    assert [p.text for p in read(tmp_path, split="heldout")] == ["test"]
    assert [p.text for p in read_prompt_file(tmp_path).prompts] == ["test"]


def test_folders_that_leave_it_open(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of train\.jsonl, .*train_metadata\.jsonl.*; name the file itself"):
        read(tmp_path)
    (tmp_path / "train.txt").write_text("a")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(InputError, match=r"both train\.jsonl and train\.txt; name the file itself"):
        read(tmp_path)


def test_line_ends_marks_and_blank_lines(tmp_path: Path) -> None:
    assert [p.text for p in read(tmp_path / "a.txt", "\ufeffone\r\n\r\n\t two \rthree\n\n")] == ["one", "two", "three"]
    # Characters at which `str.splitlines` breaks a line, as JSON and old text files may hold them.
    odd = "left\u2028right\x85end"
    assert [p.text for p in read(tmp_path / "b.txt", odd)] == [odd]
    assert [p.text for p in read(tmp_path / "b.jsonl", json.dumps({"prompt": odd}, ensure_ascii=False))] == [odd]


def test_equal_prompts_stay_apart(tmp_path: Path) -> None:
    prompts = read(tmp_path / "a.jsonl", '{"prompt": "grid", "clue": 1}\n{"prompt": "grid", "clue": 2}\n')
    assert [(p.index, p.metadata["clue"]) for p in prompts] == [(0, 1), (1, 2)]


@pytest.mark.full
def test_a_hundred_thousand_lines_take_about_a_second(tmp_path: Path) -> None:
    line = '{{"tag": "counting", "include": [{{"class": "cup", "count": 3}}], "prompt": "a photo of {} cups"}}'
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(line.format(i) for i in range(100_000)))
    # Processor time, and several times what it takes, so that a busy machine does not fail it; a quadratic reader does.
    start = time.process_time()
    prompts = read_prompt_file(file).prompts
    assert time.process_time() - start < 5
    assert len(prompts) == 100_000
    assert prompts[-1].text == "a photo of 99999 cups"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "tag"', r"a\.jsonl, line 2: .*it may be cut off"),
        ("a.jsonl", '{"prompt": "a"\n{"prompt": "b"}', r"line 1: not valid JSON.*; fix it"),
        ("a.jsonl", '[\n{"prompt": "a"}\n]', "line 1: not valid JSON, one object on each line"),
        ("a.jsonl", '{"prompt": "a"}\n\n["b"]', "line 3: expected an object"),
        ("a.jsonl", "[" * 100_000, "line 1: not valid JSON"),
        ("a.jsonl", '{"prompt": "a", "n": ' + "1" * 5000 + "}", "line 1: not valid JSON"),
        ("a.jsonl", '{"caption": "a"}', "line 1: expected a row with \"prompt\": .* got only 'caption'"),
        ("a.jsonl", '{"prompt": ["a"]}', r"line 1: expected a row with \"prompt\": .* got \['a'\]"),
        ("a.jsonl", '{"prompt": "  "}', 'line 1: expected a row with "prompt": a text that is not blank'),
        ("a.jsonl", '{"prompt": "a\\ud800"}', "line 1: .*half of a character"),
        ("a.jsonl", '{"prompt": "a", "rewards": "ocr"}', "line 1: expected \"rewards\" to be a list .* got 'ocr'"),
        ("a.csv", "text,tag\na,b\n", r"line 1: expected the names of the columns.*got 'text, tag'.*use \.txt"),
        ("a.csv", "prompt,Prompts\na,b\n", "line 1: expected the names of the columns"),
        ("a.csv", "prompt,tag\na,b\na, with a comma,b\n", "line 3: has 3 columns, but the header 2"),
        ("a.csv", "prompt,tag\na\n", "line 2: has 1 columns, but the header 2"),
        ("a.csv", 'prompt,tag\n"a" b,c\n', 'line 2: .*write " within it as ""'),
        ("a.csv", 'prompt\n\n"a\nb\n', "line 3: unexpected end of data"),
        ("a.csv", "prompt,tag\n,b\n", 'line 2: expected a row with "prompt"'),
        ("a.txt", b"one\ncaf\xe9\n", r"a\.txt, line 2: the byte 0xE9 is not UTF-8; .*iconv"),
        ("a.txt", "one".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        ("a.txt", b"\x89PNG\r\n\x1a\n\x00\x00", "line 3: holds a zero byte"),
        ("a.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "git lfs pull"),
        ("a.txt", "\n \r\n", "holds zero prompts; add at least one"),
        ("a.csv", "", "holds zero prompts"),
        ("a.csv", "prompt\n", "holds zero prompts"),
        ("a.json", '[{"prompt": "a"}]', r"ends in '\.json'; expected one of \.jsonl, \.txt, \.csv, \.tsv"),
        ("prompts", "a", "ends in 'no suffix'; expected one of"),
    ],
)
def test_refused(tmp_path: Path, name: str, data: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=rf"(?s)^prompts\.train\.0 \(a\): .*{message}"):
        read(tmp_path / name, data)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompt file not found: .*absent\.json; fix the path"):
        read(tmp_path / "absent.json")
    with pytest.raises(InputError, match=r"cannot read .*: embedded null byte"):
        read(tmp_path / "zero\0byte.txt")
    with pytest.raises(InputError, match=r"cannot read .*File name too long"):
        read(tmp_path / ("long" * 2000))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(InputError, match=r"pipe\.txt is not a regular file"):
        read(tmp_path / "pipe.txt")
