"""Where rewards come from: a built-in name, or an import path in the config.

To add a built-in: one file in this folder and one line here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from marble_rl.errors import InputError, suggestion
from marble_rl.rewards.core.base import METADATA, FunctionReward, Reward
from marble_rl.rewards.core.settings import RewardConfig

BUILT_IN = {
    "clipscore": "marble_rl.rewards.builtin.clip:ClipScore",
    "pickscore": "marble_rl.rewards.builtin.clip:PickScore",
    "hpsv2": "marble_rl.rewards.builtin.clip:Hpsv2",
    "aesthetic": "marble_rl.rewards.builtin.clip:Aesthetic",
    "imagereward": "marble_rl.rewards.builtin.imagereward:ImageReward",
    "ocr": "marble_rl.rewards.builtin.ocr:Ocr",
    "tesseract": "marble_rl.rewards.builtin.tesseract:Tesseract",
    "geneval": "marble_rl.rewards.builtin.geneval:GenEval",
    "judge": "marble_rl.rewards.remote.judge:Judge",
    "unifiedreward": "marble_rl.rewards.remote.judge:UnifiedReward",
    "jpeg_compressibility": "marble_rl.rewards.builtin.jpeg_compressibility:JpegCompressibility",
    "brightness": "marble_rl.rewards.builtin.brightness:Brightness",
    "colour": "marble_rl.rewards.builtin.colour:Colour",
    "frames": "marble_rl.rewards.builtin.frames:Frames",
    "temporal_consistency": "marble_rl.rewards.builtin.temporal_consistency:TemporalConsistency",
    "motion": "marble_rl.rewards.builtin.motion:Motion",
    "remote": "marble_rl.rewards.remote.client:Remote",
}


def build_rewards(configs: Sequence[RewardConfig]) -> dict[str, Reward]:
    """Construct every reward by name. Nothing is loaded yet."""
    return {config.name: build_reward(config, f"rewards.{i} ({config.name})") for i, config in enumerate(configs)}


def build_reward(config: RewardConfig, where: str) -> Reward:
    """Construct one reward; ``where`` is the key that errors name."""
    path = BUILT_IN.get(config.type, config.type)
    if ":" not in path:
        raise InputError(
            f"{where}.type: unknown reward {config.type!r}.{suggestion(config.type, list(BUILT_IN))} "
            f"Built in: {', '.join(BUILT_IN)}; or an import path `package.module:name`"
        )
    target = _import(path, f"{where}.type")
    if inspect.isclass(target):
        missing = [name for name in ("applies_to", "load", "score") if not callable(getattr(target, name, None))]
        if missing:
            raise InputError(
                f"{where}.type: the class {path} has no method `{missing[0]}`; "
                "derive it from marble_rl.rewards.core.base.RewardBase, see docs/adding_a_reward.md"
            )
        _check_params(list(inspect.signature(target).parameters.values()), config.params, where)
        try:
            return cast(Reward, target(**config.params))
        except Exception as error:
            raise InputError(f"{where}.params: {error}") from error
    if not callable(target):
        raise InputError(f"{where}.type: {path} is neither a class nor a function")
    _check_params(_params_of_function(target, f"{where}.type: the function {path}"), config.params, where)
    return FunctionReward(target, **config.params)


def _params_of_function(function: Callable[..., Any], what: str) -> list[inspect.Parameter]:
    """Images, prompts and metadata are ours to give; the rest are the config's params."""
    needed = "it must take (images, prompts, ...) by position, see docs/adding_a_reward.md"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} does not say what it takes ({error}); {needed}") from None
    parameters = list(signature.parameters.values())
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    if len(by_position) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise InputError(f"{what} takes {signature}; {needed}")
    ours = {p.name for p in by_position} | {METADATA}
    return [p for p in parameters if p.name not in ours and p.kind is not p.VAR_POSITIONAL]


def _import(path: str, where: str) -> Any:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever somebody else's module does while it is imported
        raise InputError(
            f"{where}: cannot import {module_name!r} ({type(error).__name__}: {error}); "
            "mend it, install it, or put its folder on PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise InputError(f"{where}: {module_name!r} has no {name!r}.{suggestion(name, public)}")
    return getattr(module, name)


def _check_params(parameters: Sequence[inspect.Parameter], params: Mapping[str, Any], where: str) -> None:
    """Refuse unknown and missing arguments by name."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters]
    for key in params:
        if key not in names:
            raise InputError(
                f"{where}.params: unknown argument {key!r}.{suggestion(key, names)} Valid: {', '.join(names) or 'none'}"
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
