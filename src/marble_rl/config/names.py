"""Names that a config refers to, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from marble_rl.errors import InputError


def require_name(name: str, names: Sequence[str], key: str) -> None:
    """Raise unless ``name`` is one of ``names``, proposing the nearest."""
    if name not in names:
        raise InputError(f"{key}: unknown name {name!r}.{suggestion(name, names)} Known: {', '.join(names)}")


def suggestion(name: str, names: Sequence[str]) -> str:
    """' Did you mean ...?' for the nearest of the valid names, or nothing."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
