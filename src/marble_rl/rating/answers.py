"""answers.jsonl: one line for each answer, on the disk before the rater is told so. The last answer counts."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from marble_rl.errors import InputError
from marble_rl.rating.study import Criterion
from marble_rl.section import first_mistake
from marble_rl.storage import storage_errors, sync_folder


class Key(NamedTuple):
    """What was asked."""

    rater: str
    prompt: int
    image: int
    criterion: Criterion
    model: str
    against: str | None


class Answer(BaseModel):
    """One answer, with the names of models that the rater did not see."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    rater: str
    prompt: int
    """Index of the prompt"""
    image: int
    """Index of the picture among those of the prompt"""
    criterion: Criterion
    model: str
    against: str | None = None
    """Of a pair: the other model, which comes later in the study"""
    value: float
    """Of a scale: 1 to 5. Of a pair: 1 if `model` is better, 0 if the other is, 0.5 if they are the same"""
    time: float
    """Seconds since 1970"""

    @property
    def key(self) -> Key:
        return Key(self.rater, self.prompt, self.image, self.criterion, self.model, self.against)


def read_answers(path: Path) -> dict[Key, Answer]:
    """The last answer to each question. A last line that a crash cut short was never confirmed, and is ignored."""
    answers: dict[Key, Answer] = {}
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; fix its permissions") from None
    for number, line in enumerate(data[: _complete(data)].splitlines(), 1):
        try:
            answer = Answer.model_validate_json(line)
        except ValidationError as error:
            raise InputError(
                f"{path}, line {number}: not an answer ({first_mistake(error)}); restore the file, or delete the line"
            ) from None
        answers[answer.key] = answer
    return answers


def _complete(data: bytes) -> int:
    """Bytes of the complete lines."""
    return data.rfind(b"\n") + 1


class AnswersFile:
    """The answers so far, and the file that further ones are appended to. Threads may share it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._file = descriptor
        self._turn = threading.Lock()
        self._size = _complete(path.read_bytes())
        os.ftruncate(descriptor, self._size)
        self._latest = read_answers(path)

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[AnswersFile]:
        """Open the file, and keep other servers out of it."""
        with storage_errors(str(path), "serve again"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{path.parent} is being served by another process; stop that first") from None
            sync_folder(path.parent)
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def value(self, key: Key) -> float | None:
        answer = self._latest.get(key)
        return None if answer is None else answer.value

    def add(self, key: Key, value: float) -> None:
        """Returns once the answer is on the disk. One that is there already, sent again by a page that did not hear
        so, adds nothing."""
        answer = Answer(**key._asdict(), value=value, time=time.time())
        line = (json.dumps(answer.model_dump()) + "\n").encode()
        with self._turn, storage_errors(str(self._path), "try again"):
            if self.value(key) == value:
                return
            try:
                if os.write(self._file, line) < len(line):
                    raise OSError(None, "the line was written in part")
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
            self._size += len(line)
            self._latest[key] = answer
