"""Turns pydantic's errors into one line per mistake that names the key, the value and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from marble_rl.balancing.registry import RULES
from marble_rl.config.run import RunConfig
from marble_rl.errors import InputError, suggestion
from marble_rl.losses.registry import LOSSES
from marble_rl.plugins import Registry

PLUGINS: dict[int | str, Registry[Any]] = {registry.section: registry for registry in (RULES, LOSSES)}
"""Sections whose keys depend on their `type`"""


def explain(error: ValidationError, path: Path, tree: dict[str, Any]) -> str:
    lines = []
    for item in error.errors():
        location = _user_location(item["loc"], tree)
        key = ".".join(map(str, location)) or "(top level)"
        value = item["input"]
        error_here = item.get("ctx", {}).get("error")
        if isinstance(error_here, InputError):  # it names its key itself
            lines.append(str(error_here))
            continue
        if item["type"] == "extra_forbidden":
            valid = _valid_keys(location[:-1], tree)
            text = f"unknown key {location[-1]!r}.{suggestion(str(location[-1]), valid)} Valid: {', '.join(valid)}"
        elif item["type"] == "missing":
            text = "is missing; add it"
        elif item["type"] == "union_tag_not_found":
            text = "needs a `type:`, one of " + item["ctx"]["discriminator"] + " values; see docs/config.md"
        elif item["type"] == "union_tag_invalid":
            valid = [v.strip("' ") for v in item["ctx"]["expected_tags"].split(",")]
            tag = str(item["ctx"]["tag"])
            text = f"unknown type {tag!r}.{suggestion(tag, valid)} Valid: {', '.join(valid)}"
        elif item["type"] in ("model_type", "model_attributes_type", "dict_type"):
            text = f"expected a mapping (key: value), found {kind(value)}"
        elif item["type"] == "list_type":
            text = f"expected a list, found {kind(value)}"
        else:
            text = f"found {value!r}; {item['msg'][0].lower()}{item['msg'][1:]}"
        lines.append(f"{key}: {text}")
    unique = list(dict.fromkeys(lines))
    return f"{path}: {unique[0]}" if len(unique) == 1 else f"{path}:\n  " + "\n  ".join(unique)


def _user_location(location: tuple[int | str, ...], tree: Any) -> list[int | str]:
    """The keys as the user wrote them: pydantic inserts the tag of a union into the path."""
    keys: list[int | str] = []
    node = tree
    for i, part in enumerate(location):
        is_last = i == len(location) - 1
        if isinstance(node, dict) and part not in node and not is_last:
            continue
        keys.append(part)
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
    return keys


def _valid_keys(location: Sequence[int | str], tree: Any) -> list[str]:
    """Keys that the section at ``location`` accepts."""
    annotation: Any = RunConfig
    node: Any = tree
    for depth, part in enumerate(location):
        if isinstance(part, str):  # a number is an index into a list, whose annotation its items share
            annotation = _section_of(annotation, node).model_fields[part].annotation
        node = node[part]
        if depth == 0 and part in PLUGINS:
            annotation = PLUGINS[part].settings_class(node.get("type", PLUGINS[part].default))
    return list(_section_of(annotation, node).model_fields)


def _section_of(annotation: Any, node: Any) -> type[BaseModel]:
    """The section that describes ``node``; of a union's, the one that its `type` names."""
    choices = sections_in(annotation)
    if len(choices) > 1:
        choices = [c for c in choices if node.get("type") in get_args(c.model_fields["type"].annotation)] or choices
    return choices[0]


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The config sections that a field's type holds: none, one, or the variants of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def kind(value: Any) -> str:
    """A value that should have been something else, in words."""
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return f"{value!r}"
