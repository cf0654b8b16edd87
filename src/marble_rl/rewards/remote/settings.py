"""Params of the rewards that ask servers.

A message names the param, the value and the fix. Params that could hold a secret by mistake are checked by functions
that leave the value out of the message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from marble_rl.errors import InputError
from marble_rl.section import FilePath, Section
from marble_rl.storage import read_regular, reason

P = TypeVar("P", bound=Section)

PLACEHOLDER = "{prompt}"
LONGEST_QUESTION = 100_000
"""Bytes of a `question_file`"""


def _addresses(value: Any, example: str, secret_param: str) -> tuple[str, ...]:
    """One address or a list of them, without a slash at the end. ``secret_param`` is where a key belongs instead."""
    urls = [value] if isinstance(value, str) else value
    if not isinstance(urls, Sequence) or not urls:
        raise ValueError(f"expected an address such as {example}, or a list of them, got {value!r}")
    for url in urls:
        if isinstance(url, str) and re.search(r"[@?#]", url):
            raise ValueError(  # without the value, which may hold a secret
                f"the address has a user, a `?` or a `#` in it; give one such as {example}, "
                f"and put a key into an environment variable named by {secret_param}"
            )
        if not isinstance(url, str) or not _is_address(url):
            raise ValueError(f"expected an address such as {example}, got {url!r}")
    return tuple(url.rstrip("/") for url in urls)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not re.search(r"\s", url)


def _reward_servers(value: Any) -> tuple[str, ...]:
    return _addresses(value, "http://127.0.0.1:8765", "token_env")


def _chat_servers(value: Any) -> tuple[str, ...]:
    urls = _addresses(value, "http://localhost:8000/v1", "api_key_env")
    for url in urls:
        if url.endswith("/chat/completions"):
            raise ValueError(f"got {url!r}; leave /chat/completions out, it is added")
    return urls


def _variable_name(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and re.fullmatch(r"[A-Z_][A-Z0-9_]*", value)):
        raise ValueError(  # without the value, which may be the key itself
            "expected the name, in capitals, of an environment variable; put the key into one, such as JUDGE_API_KEY, "
            "and give its name here"
        )
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError(f"expected a text, got {value!r}")
    return value


def _template(value: str) -> str:
    others = re.findall(r"\{\w*\}", value)
    if PLACEHOLDER not in value and others:
        raise ValueError(f"{others[0]} is not filled in; write {PLACEHOLDER} where the picture's prompt belongs")
    return value


def _read_question(path: Path) -> str:
    try:
        text = read_regular(path.expanduser(), LONGEST_QUESTION).decode("utf-8-sig").replace("\r\n", "\n").strip()
        if PLACEHOLDER not in text:
            raise ValueError(f"it holds no {PLACEHOLDER}")
        if "\\n" in text:
            raise ValueError("it holds a backslash and an n, as in a program's text, where the question has a new line")
    except (OSError, ValueError) as error:
        raise InputError(
            f"question_file: {str(path)!r} cannot be used ({reason(error)}); give a text file in UTF-8 with the whole "
            f"question, and {PLACEHOLDER} where the picture's prompt belongs"
        ) from None
    return text


def _one_group(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression ({error}); correct it") from None
    if groups != 1:
        raise ValueError(
            f"{value!r} has {groups} groups; put the score, and nothing else, in (...), and write other brackets "
            "as (?:...)"
        )
    return value


def _score_range(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    try:
        low, high = (float(end) for end in value)
    except (TypeError, ValueError):
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"expected [lowest, highest] score, such as [1, 5], got {value!r}")
    return low, high


def _duration(value: Any) -> float:
    """Seconds, as a number or with a unit: 90, 90s, 10m, 2h."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", value.strip(), re.ASCII)):
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"expected a time such as 90, 90s, 10m or 2h, got {value!r}")
    return float(value)


Text = Annotated[str, AfterValidator(_not_blank)]
Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
NotNegative = Annotated[float, Field(strict=True, ge=0)]
Timeout = Annotated[float, Field(strict=True, gt=0)]
Question = Annotated[Text, AfterValidator(_template)]
Pattern = Annotated[Text, AfterValidator(_one_group)]
Scale = Annotated[tuple[float, float] | None, BeforeValidator(_score_range)]
VariableName = Annotated[str | None, BeforeValidator(_variable_name)]


Wait = Annotated[float, BeforeValidator(_duration)]


class RemoteParams(Section):
    """Params of `remote`."""

    url: Annotated[tuple[str, ...], BeforeValidator(_reward_servers)]
    """Address of a server, or a list of addresses."""
    reward: Text
    """The reward's name in the served config."""
    timeout: Timeout = 120.0
    """Seconds that a server may be silent before it counts as failed."""
    wait: Wait = 300.0
    """How long to wait for servers that do not answer, during training: 90, 90s, 10m, 2h. So a server may restart."""
    retries: Count = 2
    """Further attempts at one batch, each at the next server, where a server answers with an error."""
    backoff: NotNegative = 0.5
    """Seconds before the first further attempt, doubled for each one after it."""
    token_env: VariableName = None
    """Environment variable that holds the token; null: MARBLE_REWARDS_TOKEN, if it is set."""


class JudgeParams(Section):
    """Params of `judge`."""

    url: Annotated[tuple[str, ...], BeforeValidator(_chat_servers)]
    """Base of an OpenAI-compatible API, or a list of them."""
    model: Text
    """The model's name on the server."""
    question_file: FilePath | None = None
    """Text file with the question, in place of `prompt`. {prompt} in it becomes the picture's prompt."""
    prompt: Question | None = Field(None, validate_default=True)
    """The question. {prompt} becomes the picture's prompt."""
    insist: Text = "Answer in exactly the form that is asked for above: the score, and nothing else."
    """Added to the question from the second time on, where a reply could not be understood."""
    pattern: Pattern
    """Regular expression with one group, the score. The last match in a reply counts."""
    scale: Scale = None
    """[lowest, highest] score. One outside is an error."""
    concurrency: Positive = 16
    """Requests under way at once."""
    wait: Wait = 300.0
    """How long to wait for servers that do not answer, during training: 90, 90s, 10m, 2h. So a server may restart."""
    retries: Count = 3
    """Further attempts for a picture, where a server answers with an error or a reply without a score."""
    backoff: NotNegative = 1.0
    """Seconds before the first further attempt, less up to half at random; doubled for each one after it."""
    timeout: Timeout = 120.0
    """Seconds for one request."""
    api_key_env: VariableName = None
    """Name, in capitals, of the environment variable with the key."""
    max_tokens: Positive | None = 1024
    """Longest reply; null leaves it to the server."""
    temperature: NotNegative | None = 0.0
    """null leaves it to the server."""
    image_format: Literal["png", "jpeg"] = "png"
    """How pictures are sent; jpeg has quality 95."""
    extra: dict[str, Any] = {}
    """Further fields of the request."""

    @field_validator("prompt")
    @classmethod
    def _one_question(cls, prompt: str | None, info: ValidationInfo) -> str | None:
        file = info.data.get("question_file")
        if prompt is None and file is None:
            raise ValueError("is missing; add it, or name a file with the question in question_file")
        if prompt is not None and file is not None:
            raise ValueError(f"the question is also in question_file, {str(file)!r}; remove one of the two")
        return prompt

    def question(self) -> str:
        """The question, with a placeholder for the picture's prompt. Raises an `InputError` that names a bad file."""
        return self.prompt or "" if self.question_file is None else _read_question(self.question_file)


class UnifiedRewardParams(JudgeParams):
    """Params of `unifiedreward`: `judge` with other defaults."""

    model: Text = "CodeGoat24/UnifiedReward-qwen-7b"
    """The model's name on the server."""
    prompt: Question | None = (
        "This image was generated from a text caption. Judge two things.\n"
        "1. Does it show what the caption says: its objects, their attributes, and how they relate to each other?\n"
        "2. How good is it to look at: sharpness, detail, colours, overall appeal?\n"
        "Name the elements of the caption, each as 'element (type): value', where value is 1 if the image shows it "
        "and 0 if not. Then write 'Final Score:' and a score from 1 to 5.\n"
        "Caption: [{prompt}]"
    )
    """The question. {prompt} becomes the picture's prompt."""
    insist: Text = "Answer with one line and nothing else: Final Score: N, where N is a number from 1 to 5."
    """Added to the question from the second time on, where a reply could not be understood."""
    pattern: Pattern = r"(?i)Final Score(?: \(1-5\))?[*_ ]*:[\s*_\[]*([-+]?\d+(?:\.\d+)?)"
    """Regular expression with one group, the score. The last match in a reply counts."""
    scale: Scale = (1.0, 5.0)
    """[lowest, highest] score. One outside is an error."""
