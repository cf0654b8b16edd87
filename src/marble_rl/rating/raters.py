"""Who rates: a name and a secret link for each. They are kept, so that links work again after a restart."""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from marble_rl.errors import InputError
from marble_rl.storage import Record, storage_errors, sync_folder

MOST = 1000


class Raters(Record):
    """raters.json. Whoever reads it can rate in anybody's name, and knows which picture is whose."""

    kind: ClassVar[str] = "a list of raters"
    fix: ClassVar[str] = "Delete it: raters then get new links and a new order, and keep their answers."

    secret: str
    """Key of the order and of the identifiers that a rater sees. No rater gets it."""
    tokens: dict[str, str]
    """By name: the secret part of a rater's link"""

    def write(self, path: Path) -> None:
        mask = os.umask(0o077)  # also the temporary file is the owner's alone
        try:
            super().write(path)
        finally:
            os.umask(mask)


def invite(path: Path, asked: str | None) -> Raters:
    """Those who may rate now: the ones ``asked`` for (names with commas between them, or a number), or all from before,
    or one. Earlier raters keep their links."""
    before = Raters.read(path) if path.exists() else Raters(secret=secrets.token_hex(16), tokens={})
    names = list(before.tokens) or ["rater-1"] if asked is None else _names(asked)
    fresh = {name: secrets.token_urlsafe(16) for name in names if name not in before.tokens}
    every = before.model_copy(update={"tokens": before.tokens | fresh})
    if fresh:
        with storage_errors(str(path), "serve again"):
            every.write(path)
            sync_folder(path.parent)
    return every.model_copy(update={"tokens": {name: every.tokens[name] for name in names}})


def _names(asked: str) -> list[str]:
    if asked.isdecimal() and 1 <= int(asked) <= MOST:
        return [f"rater-{i + 1}" for i in range(int(asked))]
    names = [name.strip() for name in asked.split(",")]
    if not all(re.fullmatch(r"[A-Za-z_-][A-Za-z0-9_-]*", name) for name in names) or len(set(names)) < len(names):
        raise InputError(
            f"--raters: {asked!r}; give different names of letters, digits, _ and - with commas between them, such as "
            f"anna,ben, or how many there are (at most {MOST})"
        )
    return names


def rater_of(token: str, tokens: Mapping[str, str]) -> str | None:
    """Whose token it is. Every token is compared whole, so that the time tells nothing."""
    given = os.fsencode(token)
    matches = [name for name, known in tokens.items() if hmac.compare_digest(given, known.encode())]
    return matches[0] if matches else None
