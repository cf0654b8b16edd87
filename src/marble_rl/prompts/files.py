"""Prompt files: our own format, and the datasets of GenEval, flow_grpo, DiffusionNFT and Flow-Factory.

    .txt          a prompt a line
    .jsonl        an object a line: "prompt", optionally "rewards"; everything else is metadata
    .csv, .tsv    a header with a column `prompt` or `prompts`; the other columns are metadata, as text
    a folder      train.* or train_metadata.* to train on, test.* or test_metadata.* to evaluate on

Lines end with LF, CRLF or CR and nothing else: JSON strings may hold U+2028 and the like, at which `str.splitlines`
would break them.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from marble_rl.errors import InputError
from marble_rl.storage import parse_json

Split = Literal["train", "heldout"]
SUFFIXES = (".jsonl", ".txt", ".csv", ".tsv")
STEMS: dict[Split, tuple[str, ...]] = {"train": ("train", "train_metadata"), "heldout": ("test", "test_metadata")}
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class Row(NamedTuple):
    """One prompt, before it has a place in a prompt set."""

    text: str
    metadata: dict[str, Any]
    rewards: list[str] | None = None
    """Names of the rewards that apply; None: the source says"""


def read_rows(path: Path, split: Split, where: str) -> list[Row]:
    """Every prompt of a file, or of a dataset folder's file for the split; ``where`` is its key, for messages."""
    if os.path.isdir(path):  # unlike Path's, these return False where permission is denied
        path = _file_of_folder(path, split, where)
    suffix = path.suffix.lower()
    if os.path.exists(path) and suffix not in SUFFIXES:
        raise InputError(f"{where}: {path} ends in {suffix or 'no suffix'!r}; expected one of {', '.join(SUFFIXES)}")
    text = _read_text(path, where)
    at = f"{where}: {path}"
    if suffix in (".csv", ".tsv"):
        return _table_rows(text, "," if suffix == ".csv" else "\t", at)
    numbered = [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if suffix == ".txt":
        return [Row(line, {}) for _, line in numbered]
    last = numbered[-1][0] if numbered else 0
    return [_json_row(line, f"{at}, line {n}", n == last) for n, line in numbered]


def _file_of_folder(folder: Path, split: Split, where: str) -> Path:
    names = [stem + suffix for stem in STEMS[split] for suffix in SUFFIXES]
    present = [name for name in names if (folder / name).is_file()]
    if not present:
        raise InputError(f"{where}: the folder {folder} has none of {', '.join(names)}; name the file itself")
    if len(present) > 1:
        raise InputError(f"{where}: the folder {folder} has both {' and '.join(present)}; name the file itself")
    return folder / present[0]


def _read_text(path: Path, where: str) -> str:
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{where}: {path} is not a regular file; give one")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{where}: prompt file not found: {path}; fix the path") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot read {path}: {error}; fix the path or its permissions") from None
    if data.startswith(LFS_POINTER):
        raise InputError(f"{where}: {path} is a Git LFS pointer, not the file itself; run: git lfs pull")
    if data.startswith(UTF16_MARKS):
        raise InputError(f"{where}: {path} is UTF-16; save it as UTF-8, as with: iconv -f utf-16 -t utf-8")
    if b"\0" in data:
        line = data[: data.index(b"\0")].count(b"\n") + 1
        raise InputError(f"{where}: {path}, line {line}: holds a zero byte, so it is not text; give a text file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `object` is what was decoded: without the mark, if there was one.
        line = bytes(error.object[: error.start]).count(b"\n") + 1
        byte = error.object[error.start]
        raise InputError(
            f"{where}: {path}, line {line}: the byte 0x{byte:02X} is not UTF-8; "
            "save the file as UTF-8, as with: iconv -f latin1 -t utf-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _json_row(line: str, where: str, is_last: bool) -> Row:
    try:
        record = parse_json(line)
    except ValueError as error:
        problem = getattr(error, "msg", None) or str(error)
        fix = "the file ends here, so it may be cut off: get it again, or fix the line" if is_last else "fix it"
        raise InputError(f"{where}: not valid JSON, one object on each line ({problem}); {fix}") from None
    if not isinstance(record, dict):
        raise InputError(f'{where}: expected an object with "prompt": "text", got {line[:80]!r}')
    return _row(record, where)


def _table_rows(text: str, delimiter: str, where: str) -> list[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    rows = []
    line = 1  # where the record begins: one in quotes may go over several lines
    try:
        for cells in reader:
            at = f"{where}, line {line}"
            if not header:
                header = _header(cells, at)
            elif cells and len(cells) != len(header):
                raise InputError(
                    f"{at}: has {len(cells)} columns, but the header {len(header)}; "
                    f'put "quotes" around a text that holds {delimiter!r}'
                )
            elif cells:
                rows.append(_row(dict(zip(header, cells, strict=True)), at))
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f'{where}, line {line}: {error}; end a quoted text with ", and write " within it as ""'
        ) from None
    return rows


def _header(cells: Sequence[str], where: str) -> list[str]:
    """The names of the columns; that of the prompts becomes `prompt`."""
    names = ["prompt" if name.strip().lower() in ("prompt", "prompts") else name.strip() for name in cells]
    if names.count("prompt") != 1 or len(set(names)) != len(names):
        raise InputError(
            f"{where}: expected the names of the columns, one of them `prompt` and none twice, "
            f"got {', '.join(cells)[:80]!r}; add them, or use .txt for a prompt a line"
        )
    return names


def _row(record: dict[str, Any], where: str) -> Row:
    prompt = record.pop("prompt", None)
    if not isinstance(prompt, str) or not prompt.strip():
        given = repr(prompt) if prompt is not None else f"only {', '.join(map(repr, record)) or 'nothing'}"
        raise InputError(f'{where}: expected a row with "prompt": a text that is not blank, got {given[:80]}')
    if not _is_unicode(prompt):
        raise InputError(f"{where}: the prompt holds half of a character (a lone surrogate): {prompt[:80]!r}; fix it")
    rewards = record.pop("rewards", None)
    if rewards is not None and not (isinstance(rewards, list) and all(isinstance(r, str) for r in rewards)):
        raise InputError(f'{where}: expected "rewards" to be a list of reward names (in JSONL), got {rewards!r}')
    return Row(prompt.strip(), record, rewards)


def _is_unicode(text: str) -> bool:
    """JSON can spell halves of characters, which no tokenizer and no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
