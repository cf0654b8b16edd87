"""Where rewards come from: a built-in name, or an import path in the config; and how their parameters are checked.

To add a built-in: one file in rewards/builtin and one line here.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from marble_rl.errors import InputError, described, shortened, suggestion, text_of
from marble_rl.plugins import did_you_mean, import_path, user_code
from marble_rl.rewards.core.base import METADATA, FunctionReward, Reward, RewardBase, Traits, traits_of
from marble_rl.section import FOLDER, Section, explain

if TYPE_CHECKING:
    from marble_rl.rewards.core.settings import RewardChoice, RewardConfig

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
    "trajectory": "marble_rl.rewards.builtin.trajectory:Trajectory",
    "optical_flow": "marble_rl.rewards.builtin.optical_flow:OpticalFlow",
    "remote": "marble_rl.rewards.remote.client:Remote",
}


def build_rewards(configs: Sequence[RewardConfig]) -> dict[str, Reward]:
    """Construct every reward by name. Nothing is loaded yet."""
    return {config.name: build_reward(config, f"rewards.{i} ({config.name})") for i, config in enumerate(configs)}


def build_reward(choice: RewardChoice, where: str) -> Reward:
    """Construct one reward; ``where`` is the key that errors name."""
    target = _find(choice.type, f"{where}.type")
    if inspect.isclass(target):
        missing = [name for name in ("applies_to", "load", "score") if not callable(getattr(target, name, None))]
        if missing:
            raise InputError(
                f"{where}.type: the class {choice.type} has no method `{missing[0]}`; "
                "derive it from marble_rl.rewards.RewardBase, see docs/adding_a_reward.md"
            )
        reward: Reward = construct(target, choice.params, f"{where}.params")
        _check_traits(reward, f"{where}.type: {choice.type}")
        return reward
    if not callable(target):
        raise InputError(f"{where}.type: {choice.type} is neither a class nor a function")
    arguments = _params_of_function(target, f"{where}.type: the function {choice.type}")
    _check_arguments(arguments, choice.params, f"{where}.params")
    function = FunctionReward(target, **choice.params)
    _check_traits(function, f"{where}.type: {choice.type}")
    return function


def _check_traits(reward: Reward, what: str) -> None:
    with user_code(lambda error: InputError(f"{what}: its `traits` raised {described(error)}")):
        traits: object = traits_of(reward)
    if not isinstance(traits, Traits):
        raise InputError(f"{what}: `traits` must be a marble_rl.rewards.Traits, but is {shortened(repr(traits), 100)}")


def _find(type_name: str, key: str) -> Any:
    """The class or function that a `type` names."""
    path = BUILT_IN.get(type_name, type_name)
    if ":" not in path:
        raise InputError(
            f"{key}: unknown reward {type_name!r}.{did_you_mean(type_name, list(BUILT_IN))} "
            f"Built in: {', '.join(BUILT_IN)}; or an import path `package.module:name`"
        )
    return import_path(path, key)


def construct(target: type, params: Mapping[str, Any], where: str) -> Any:
    """Construct an object. Its parameters are checked first, by its `Params` or by the signature of its constructor."""

    def failed(error: BaseException) -> InputError:
        text = (text_of(error) if isinstance(error, Exception) else "") or described(error)
        names_key = text.partition(":")[0].partition(".")[0] in params
        return InputError(f"{where}{'.' if names_key else ': '}{text}")

    with user_code(failed):
        model = _params_model(target, params, where)
        if model is None:
            _check_arguments(list(inspect.signature(target).parameters.values()), params, where)
        else:
            try:
                model.model_validate(params)
            except ValidationError as error:
                raise InputError("\n  ".join(explain(error, model, params, f"{where}."))) from None
    with user_code(failed, passing=()):
        return target(**params)


def _params_model(target: Any, params: Mapping[str, Any], where: str) -> type[Section] | None:
    """The model that checks the parameters; None if the class or function does not declare one."""
    try:
        model = target.params_model(params) if hasattr(target, "params_model") else getattr(target, "Params", None)
    except InputError as error:
        raise InputError(f"{where}.{error}") from None
    declares_none = model is Section and target.__init__ is not RewardBase.__init__
    return None if declares_none else model


def with_absolute_paths(type_name: str, params: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make relative paths in ``params`` absolute; they are relative to ``folder``. The reward's `Params` say which are
    paths.

    Mistakes are not reported here but by `build_reward`, so that a run's config can be read where its rewards are not
    installed. For the same reason the reward is imported only if some parameter is an existing path.
    """
    if not any(os.path.exists(folder / text) or os.path.exists(text) for text in _strings(params.values())):
        return params
    try:
        with user_code(lambda error: InputError(described(error))):
            model = _params_model(_find(type_name, "type"), params, "params")
            absolute = None if model is None else model.model_validate(params, context={FOLDER: folder})
    except InputError:
        return params
    return params if absolute is None else _with_strings(params, absolute.model_dump(mode="json", exclude_unset=True))


def _strings(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        if isinstance(value, str):
            yield os.path.expanduser(value)
        elif isinstance(value, Mapping):
            yield from _strings(value.values())


def _with_strings(given: Any, absolute: Any) -> Any:
    """``given`` with its strings replaced by those of ``absolute``; numbers stay as they were written."""
    if isinstance(given, Mapping) and isinstance(absolute, Mapping):
        return {name: _with_strings(value, absolute.get(name, value)) for name, value in given.items()}
    return absolute if isinstance(given, str) and isinstance(absolute, str) else given


def _params_of_function(function: Callable[..., Any], what: str) -> list[inspect.Parameter]:
    """The function's parameters besides images, prompts and metadata."""
    needed = "it must take (images, prompts, ...) by position, see docs/adding_a_reward.md"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} has no signature ({error}); {needed}") from None
    parameters = list(signature.parameters.values())
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    if len(by_position) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise InputError(f"{what} takes {signature}; {needed}")
    ours = {p.name for p in by_position} | {METADATA}
    return [p for p in parameters if p.name not in ours and p.kind is not p.VAR_POSITIONAL]


def _check_arguments(parameters: Sequence[inspect.Parameter], params: Mapping[str, Any], where: str) -> None:
    """Refuse unknown and missing arguments by name."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters]
    for key in params:
        if key not in names:
            raise InputError(
                f"{where}.{key}: unknown key {key!r}.{suggestion(key, names)} Valid: {', '.join(names) or 'none'}"
            )
    for p in parameters:
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in params:
            raise InputError(f"{where}.{p.name}: is missing; add it")


def describe_built_in() -> dict[str, str]:
    """The first line of each built-in reward's docstring."""
    return {name: (inspect.getdoc(_find(name, name)) or "").split("\n")[0] for name in BUILT_IN}
