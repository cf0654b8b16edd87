"""Checks of rewards' params. A message names the param, the value found and the fix; never what may be a key."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from marble_rl.errors import InputError


def addresses(url: Any, example: str, secret_param: str) -> tuple[str, ...]:
    """One address or a list of them, without a slash at the end. ``secret_param`` is where a key belongs instead."""
    given = [url] if isinstance(url, str) else url
    if not isinstance(given, Sequence) or not given:
        raise InputError(f"url: {url!r} is no address; give one, or a list of them, such as {example}")
    return tuple(_address(one, example, secret_param) for one in given)


def _address(url: Any, example: str, secret_param: str) -> str:
    if isinstance(url, str) and re.search(r"[@?#]", url):
        # Not quoted: what stands there may be a secret.
        raise InputError(
            f"url: the address has a user, a `?` or a `#` in it; give one such as {example}, "
            f"and a key in an environment variable named by {secret_param}"
        )
    if not isinstance(url, str) or not _is_address(url):
        raise InputError(f"url: {url!r} is no address; give one such as {example}")
    return url.rstrip("/")


def base_urls(url: Any) -> tuple[str, ...]:
    """Bases of chat servers' APIs."""
    bases = addresses(url, "http://localhost:8000/v1", "api_key_env")
    for base in bases:
        if base.endswith("/chat/completions"):
            raise InputError(f"url: {base!r} is too long; leave /chat/completions out, it is added")
    return bases


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not re.search(r"\s", url)


def text(name: str, value: Any, meaning: str) -> str:
    """A text that is not blank."""
    if value is None:
        raise InputError(f"{name}: is missing; give {meaning}")
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name}: {value!r} is no text; give {meaning}")
    return value


def one_group_pattern(pattern: Any) -> re.Pattern[str]:
    """A regular expression whose one group is the score."""
    given = text("pattern", pattern, r"a regular expression with the score as its group, such as `Score: (\d+)`")
    try:
        compiled = re.compile(given)
    except re.error as error:
        raise InputError(f"pattern: {given!r} is no regular expression ({error}); mend it") from error
    if compiled.groups != 1:
        raise InputError(
            f"pattern: {given!r} has {compiled.groups} groups; put the score, and nothing else, in (...), "
            "and write other brackets as (?:...)"
        )
    return compiled


def score_range(scale: Any) -> tuple[float, float]:
    """(lowest, highest), both finite."""
    try:
        low, high = (float(end) for end in scale)
        fits = -math.inf < low < high < math.inf
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise InputError(f"scale: {scale!r} is no range; give [lowest, highest] score, such as [1, 5]")
    return low, high


def whole(name: str, value: Any, least: int) -> int:
    """A whole number that is not too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name}: {value!r} will not do; give a whole number of at least {least}")
    return value


def number(name: str, value: Any, meaning: str, *, positive: bool = False) -> float:
    """A finite number, 0 or more."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or value < 0 or (positive and value == 0):
        raise InputError(f"{name}: {value!r} will not do; give {meaning}")
    return float(value)


def variable_name(param: str, value: Any) -> str | None:
    """The name of the environment variable that holds a key; None where there is none."""
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
        # Capitals only, and not quoted: it may be the key itself.
        raise InputError(
            f"{param}: is not the name, in capitals, of an environment variable; put the key in one, "
            "such as JUDGE_API_KEY, and give its name here"
        )
    return value
