"""From a YAML file and `--set` overrides to a checked RunConfig, or to one clear line that says what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from marble_rl.config.consistency import check_consistency
from marble_rl.config.older import upgraded
from marble_rl.config.recipes import find_config
from marble_rl.config.run import RunConfig
from marble_rl.config.yaml_text import explained, parse_yaml, read_yaml
from marble_rl.errors import InputError
from marble_rl.section import FOLDER, MINI, explain, shown
from marble_rl.storage import reason


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML config, a run's config.json or a recipe by its name, and apply overrides such as
    ``trainer.steps=10``.

    Relative file names in it count from the config's own folder. Raises InputError with one line per mistake.
    """
    path = find_config(Path(path))
    return _resolve(_overridden(path, overrides), path)


def load_scoring_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A config of which only the rewards matter: a file that has no other section will do, and then no prompts."""
    path = find_config(Path(path))
    others = {"model": {"path": MINI}, "prompts": {"train": []}}
    return _resolve({**others, **_overridden(path, overrides)}, path)


def _overridden(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    tree = _read(path)
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _resolve(tree: dict[str, Any], path: Path) -> RunConfig:
    tree = upgraded(tree)
    try:
        config = RunConfig.model_validate(tree, context={FOLDER: path.parent.resolve()})
    except ValidationError as error:
        lines = explain(error, RunConfig, tree)
        raise InputError(f"{path}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{path}:", *lines])) from None
    check_consistency(config)
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved config as JSON; `load_config` reads it back to an equal one."""
    return config.model_dump_json(indent=2) + "\n"


def to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML, for people."""
    return yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False, allow_unicode=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(path)
    except FileNotFoundError:
        raise InputError(f"config file not found: {path}. Give the path of a YAML file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read config file {path}: {reason(error)}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML{explained(error)}. Fix that line.") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: expected a mapping of sections (model:, prompts:, ...), got {shown(tree)}.")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key; numbers in it index lists: ``rewards.0.held_out=true``."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise InputError(f"--set {override!r}: expected key=value, for example --set trainer.steps=10")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise InputError(f"--set {key}: {shown(text)} is not a valid YAML value{explained(error)}; quote it") from None
    *parents, last = key.split(".")
    node: Any = tree
    for name in parents:
        if isinstance(node, dict):
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
        else:
            node = node[_list_index(node, name, override)]
    if isinstance(node, dict):
        node[last] = value
    else:
        node[_list_index(node, last, override)] = value


def _list_index(node: Any, name: str, override: str) -> int:
    if not isinstance(node, list):
        raise InputError(f"--set {override!r}: {name!r} is set below a plain value, {node!r}; shorten the key")
    if not re.fullmatch("[0-9]{1,9}", name) or int(name) >= len(node):
        raise InputError(f"--set {override!r}: {name!r} must be an index from 0 to {len(node) - 1} of that list")
    return int(name)
