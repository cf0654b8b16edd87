"""What every section of the config has in common: its base class, its types, and how mistakes in it are explained."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    ValidationError,
    ValidationInfo,
)

from marble_rl.errors import suggestion

MINI, MINI_VIDEO = "mini", "mini-video"
"""Model paths that stand for the small pipelines inside the package, of images and of videos."""
FOLDER = "folder"
"""Key of pydantic's validation context: the folder of the config that is being loaded."""
UNKNOWN_TYPE = "unknown_type"
"""Pydantic's name for the error that the `type` of a section is unknown."""
SHOWN = 100
"""Characters of a value that a message shows at most."""
MOST_MISTAKES = 10
"""Mistakes in a config that are explained; of the others their number is told."""


class Section(BaseModel):
    """Base class of config sections. Unknown keys, infinity and NaN are refused (saved configs are JSON). The
    docstring under a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def describing(cls, tree: Any) -> type[Section]:
        """The section class that validates ``tree`` (parsed config); a subclass if `type` selects one."""
        return cls


SectionClass = type[Section]
"""Alias for sections with a field `type`, whose class body shadows the builtin `type`."""


PathT = TypeVar("PathT", str, Path)


def check_path(path: PathT) -> PathT:
    """Raise ValueError for a path that the system cannot look up, whether or not there is anything: too long, a loop of
    links, characters that no file name has. Every path that a user gives goes through here (in a config by its type, on
    the command line by `cli.shared.Command`), so that the code behind need not expect these errors."""
    whole = os.path.expanduser(path)
    if str(whole).startswith("~"):
        raise ValueError(f"{whole!r} cannot be a path (there is no such user); give another")
    try:
        os.stat(whole)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # who opens it says so
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} cannot be a path ({_reason(error)}); give another") from None
    return path


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeError):
        return "it holds half of a character, a lone surrogate"
    return getattr(error, "strerror", None) or str(error)


def _absolute_file(path: Path, info: ValidationInfo) -> Path:
    folder = (info.context or {}).get(FOLDER)
    if folder is None:
        return path
    whole: Path = folder / os.path.expanduser(check_path(path))
    return check_path(whole).resolve()


def _absolute_model(path: str, info: ValidationInfo) -> str:
    local = Path(os.path.expanduser(check_path(path)))
    folder = (info.context or {}).get(FOLDER)
    if folder is None or path in (MINI, MINI_VIDEO):
        return path
    for candidate in (folder / local, local):  # the current folder is where `--set` is typed
        if os.path.exists(check_path(candidate)):
            return str(candidate.resolve())
    return path


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Weights = dict[str, NonNegativeFloat]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
FilePath = Annotated[Path, AfterValidator(_absolute_file)]
"""A file or folder on this machine. Relative ones count from the config's folder, and are made absolute when it is
loaded."""
ModelPath = Annotated[str, AfterValidator(_absolute_model)]
"""A hub id, a folder or file on this machine, `mini` or `mini-video`. What lies in the config's folder or in the
current one is made absolute when the config is loaded; anything else is an id on the hub."""


def explain(error: ValidationError, section: type[BaseModel], tree: Any, prefix: str = "") -> list[str]:
    """One line for each mistake in ``tree``: the key, what is expected there, and what was given.

    ``prefix`` stands before each key.
    """
    mistakes: dict[tuple[str, str], list[str]] = {}
    items = error.errors(include_url=False)
    for item in items[:MOST_MISTAKES]:
        location = _user_location(item["loc"], tree, item["type"] in ("missing", "value_error"))
        if item["type"] == UNKNOWN_TYPE:
            location = [*location, "type"]
        key = (prefix + ".".join(map(str, location))).rstrip(".") or "(top level)"
        mistake = _mistake(item, location, section, tree)
        given = "" if mistake else f", got {shown(item['input'])}"
        mistakes.setdefault((key, given), []).append(mistake or _expected(item))
    lines = [f"{key}: {' or '.join(dict.fromkeys(what))}{given}" for (key, given), what in mistakes.items()]
    # Of a union, pydantic reports one error for each variant.
    lines = [line.replace(" or expected ", " or ") for line in lines]
    return lines if len(items) <= MOST_MISTAKES else [*lines, f"... and {len(items) - MOST_MISTAKES:,} more mistakes"]


def _mistake(item: Mapping[str, Any], location: Sequence[int | str], root: type[BaseModel], tree: Any) -> str:
    """What is wrong, if it is not the value of a key that is known; else empty."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "missing":
        return "is missing; add it"
    if kind == "union_tag_not_found":
        return "needs a `type`; docs/config.md lists the valid ones"
    if kind == "union_tag_invalid":
        valid = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
        return f"unknown type {context['tag']!r}.{suggestion(str(context['tag']), valid)} Valid: {', '.join(valid)}"
    if kind == UNKNOWN_TYPE:
        return str(item["msg"])
    if kind in ("value_error", "assertion_error"):  # the message of a validator
        return str(context["error"])
    if kind == "extra_forbidden":
        valid = list(_section_at(root, location, tree).model_fields)
        near = suggestion(str(location[-1]), valid)
        return f"unknown key {location[-1]!r}.{near} Valid: {', '.join(valid) or 'none'}"
    return ""


def _expected(item: Mapping[str, Any]) -> str:
    """What pydantic expects at a place, in its words: `Input should be a valid integer, unable to parse ...`."""
    kind, message = item["type"], re.sub(r", (unable to|got a) .*", "", item["msg"]).replace("tuple", "list")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "expected a mapping (key: value)"
    number = "a number " if kind.startswith(("greater_than", "less_than")) else ""
    return re.sub("^Input should be ", f"expected {number}", message)


def _user_location(location: Sequence[int | str], tree: Any, last_may_be_missing: bool) -> list[int | str]:
    """The keys as the user wrote them: pydantic inserts the names of a union's variants into the path."""
    keys: list[int | str] = []
    node = tree
    for i, part in enumerate(location):
        if _holds(node, part):
            keys.append(part)
            node = node[part]
        elif last_may_be_missing and i == len(location) - 1:
            keys.append(part)
    return keys


def _holds(node: Any, part: int | str) -> bool:
    return part in node if isinstance(node, Mapping) else isinstance(node, (list, tuple)) and part in range(len(node))


def _section_at(root: type[BaseModel], location: Sequence[int | str], tree: Any) -> type[BaseModel]:
    """The innermost section on the path ``location``."""
    section, node = root, tree
    annotation: Any = root
    for part in location:
        choices = sections_in(annotation)
        if isinstance(part, str) and choices:  # an integer is a list index, and its items share the annotation
            section = _variant(choices, node)
            field = section.model_fields.get(part)
            annotation = None if field is None else field.annotation
        node = node[part] if _holds(node, part) else None
    return section


def _variant(choices: Sequence[type[BaseModel]], node: Any) -> type[BaseModel]:
    """Of a union's sections, the one that the `type` of ``node`` names."""
    if len(choices) == 1:
        (section,) = choices
        return section.describing(node) if issubclass(section, Section) else section
    named = [c for c in choices if node.get("type") in get_args(c.model_fields["type"].annotation)]
    return (named or list(choices))[0]


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The config sections that a field's type holds: none, one, or the variants of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def first_mistake(error: ValidationError) -> str:
    """The first of pydantic's errors on one line: `key: message`."""
    first = error.errors(include_url=False)[0]
    key, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def shown(value: Any) -> str:
    """A value as a message shows it: as JSON, cut if it is long."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
