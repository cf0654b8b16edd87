"""Where rewards come from: a built-in name, or an import path in the config.

To add a built-in: one file in this folder and one line here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from marble_rl.config import suggestion
from marble_rl.config.schema import RewardConfig
from marble_rl.errors import InputError
from marble_rl.rewards.base import FunctionReward, Reward

BUILT_IN = {
    "jpeg_compressibility": "marble_rl.rewards.jpeg_compressibility:JpegCompressibility",
    "brightness": "marble_rl.rewards.brightness:Brightness",
    "colour": "marble_rl.rewards.colour:Colour",
}


def build_rewards(configs: Sequence[RewardConfig]) -> dict[str, Reward]:
    """Construct every reward by name. Nothing is loaded yet."""
    return {config.name: _build(config, f"rewards.{i} ({config.name})") for i, config in enumerate(configs)}


def _build(config: RewardConfig, where: str) -> Reward:
    path = BUILT_IN.get(config.type, config.type)
    if ":" not in path:
        raise InputError(
            f"{where}.type: unknown reward {config.type!r}.{suggestion(config.type, list(BUILT_IN))} "
            f"Built in: {', '.join(BUILT_IN)}; or an import path `package.module:name`"
        )
    target = _import(path, f"{where}.type")
    if inspect.isclass(target):
        if not callable(getattr(target, "score", None)):
            raise InputError(
                f"{where}.type: the class {path} has no method `score(batch)`; see docs/adding_a_reward.md"
            )
        _check_params(target, config.params, where, skip=0)
        return cast(Reward, target(**config.params))
    if not callable(target):
        raise InputError(f"{where}.type: {path} is neither a class nor a function")
    _check_params(target, config.params, where, skip=2)
    return FunctionReward(target, **config.params)


def _import(path: str, where: str) -> Any:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            f"{where}: cannot import {module_name!r} ({error}); install it or put its folder on PYTHONPATH"
        ) from None
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise InputError(f"{where}: {module_name!r} has no {name!r}.{suggestion(name, public)}")
    return getattr(module, name)


def _check_params(target: Any, params: Mapping[str, Any], where: str, skip: int) -> None:
    """Refuse unknown and missing arguments by name; the first ``skip`` positional ones are ours to give."""
    parameters = list(inspect.signature(target).parameters.values())[skip:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters]
    for key in params:
        if key not in names:
            raise InputError(
                f"{where}.params: unknown argument {key!r}.{suggestion(key, names)} Valid: {', '.join(names)}"
            )
    for p in parameters:
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in params:
            raise InputError(f"{where}.params: argument {p.name!r} is missing; add it")


def describe_built_in() -> dict[str, str]:
    """The first line of each built-in reward's docstring."""
    described = {}
    for name, path in BUILT_IN.items():
        target = _import(path, name)
        described[name] = (inspect.getdoc(target) or "").split("\n")[0]
    return described
