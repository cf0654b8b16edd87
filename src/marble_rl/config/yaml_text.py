"""YAML from strangers: the types of JSON and nothing else, and a bounded amount of work.

A few lines with aliases can stand for billions of values, and YAML's tags for dates and Python objects raise whatever
their constructors raise. Both end here, as a `yaml.YAMLError` that knows its line.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.error import MarkedYAMLError

MOST_BYTES = 10_000_000
MOST_NODES = 100_000
"""Values of a file, with those that aliases repeat."""
DEEPEST = 50
"""Lists and mappings within each other."""
LARGEST = 2**64
"""Above all integers of a config."""
MOST_DIGITS = 100
PREFIX = "tag:yaml.org,2002:"
TYPES = ("null", "bool", "int", "float", "str", "seq", "map")


def read_yaml(path: Path) -> Any:
    """The content of a file. Raises OSError, UnicodeDecodeError or yaml.YAMLError."""
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    return parse_yaml(data.decode("utf-8-sig"))


def parse_yaml(text: str) -> Any:
    """The value that the text spells. Raises yaml.YAMLError."""
    if len(text) > MOST_BYTES:
        raise _mistake(f"more than {MOST_BYTES:,} characters; put prompts into a prompt file")
    if text.lstrip().startswith("{"):  # JSON is nearly YAML, but two escapes that spell one character are not
        with suppress(ValueError, RecursionError):
            return json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    try:
        _check_size(text)
        return yaml.load(text, _Loader)
    except UnicodeError:
        raise _mistake("it holds half of a character (a lone surrogate)") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError  # the YAML loader says which key is there twice
    return dict(pairs)


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS or not -LARGEST < int(text) < LARGEST:
        raise ValueError  # as above
    return int(text)


def explained(error: yaml.YAMLError) -> str:
    """Where and why a text is not valid YAML."""
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{where}: {getattr(error, 'problem', None) or error}"


_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast


class _Loader(_Safe):  # type: ignore[misc]
    """YAML's own loader has no limits, and forgets the first of two equal keys without a word."""

    # A date is text: YAML 1.1 would make it an object that JSON does not have, and raise for the 45th of a month.
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{PREFIX}timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = _short(node.tag)
        if kind in ("!!int", "!!float") and len(node.value) > MOST_DIGITS:  # `1:59:59...` takes quadratic time
            raise _mistake(f"{_shown(node)} has too many digits for a number", node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, OverflowError):  # `!!int abc`, `!!bool abc`
            raise _mistake(f"{_shown(node)} is not a value of the type {kind}", node.start_mark) from None
        if isinstance(value, int) and not -LARGEST < value < LARGEST:
            raise _mistake(f"{_shown(node)} is too large a number; integers have at most 64 bits", node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise _mistake(f"the key {_shown(key)} is there twice", key.start_mark)
                seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping

    def refuse_tag(self, node: yaml.Node) -> Any:
        raise _mistake(
            f"the tag {_short(node.tag)} is not read; write text, numbers, lists and mappings without tags",
            node.start_mark,
        )

    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        **{f"{PREFIX}{name}": yaml.SafeLoader.yaml_constructors[f"{PREFIX}{name}"] for name in TYPES},
        None: refuse_tag,
    }


@dataclass
class _Value:
    """A value while its events come in."""

    anchor: str | None = None
    count: int = 1
    """Of the values in it and itself"""
    depth: int = 1

    def add(self, part: _Value) -> None:
        self.count += part.count
        self.depth = max(self.depth, 1 + part.depth)


def _check_size(text: str) -> None:
    """Refuse a text that stands for too many values, aliases counted wherever they are used; or for infinitely many."""
    named: dict[str, _Value | None] = {}
    open_ = [_Value()]
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append(_Value(event.anchor))
            if event.anchor is not None:
                named[event.anchor] = None  # still open
        elif isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent, yaml.CollectionEndEvent)):
            if isinstance(event, yaml.CollectionEndEvent):
                value = open_.pop()
            elif isinstance(event, yaml.ScalarEvent):
                value = _Value(event.anchor)
            else:  # an alias that names nothing is refused by the loader
                known = named.get(str(event.anchor), _Value())
                if known is None:
                    raise _mistake(f"the alias *{event.anchor} stands within the value that it names", event.start_mark)
                value = replace(known, anchor=None)
            if value.anchor is not None:
                named[value.anchor] = value
            open_[-1].add(value)
        if open_[-1].count > MOST_NODES:
            raise _mistake(
                f"more than {MOST_NODES:,} values, those that aliases repeat included; put prompts into a prompt file",
                event.start_mark,
            )
        if max(len(open_), open_[-1].depth) > DEEPEST:
            raise _mistake(f"lists and mappings are more than {DEEPEST} deep in each other", event.start_mark)


def _mistake(problem: str, mark: Any = None) -> MarkedYAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=mark)


def _shown(node: yaml.Node) -> str:
    text = node.value if isinstance(node, yaml.ScalarNode) else "this"
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _short(tag: str) -> str:
    """As it is written in a file."""
    return f"!!{tag.removeprefix(PREFIX)}" if tag.startswith(PREFIX) else tag
