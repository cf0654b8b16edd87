"""Classes chosen by `type` in a config: a built-in name, or an import path `package.module:name`.

Such a class (a *part*) has its config section as `Settings`. Balancing rules and losses are parts. Code of users runs
inside `user_code` or `Registry.blaming`, which turn whatever it raises into an error that names it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from marble_rl.errors import InputError, MarbleError, PluginFailed, Untrusted, described, is_signal, suggestion
from marble_rl.section import UNKNOWN_TYPE, Section

PartT = TypeVar("PartT")
PACKAGE = __name__.partition(".")[0]


@contextmanager
def user_code(
    failed: Callable[[BaseException], Exception], passing: tuple[type[Exception], ...] = (MarbleError,)
) -> Iterator[None]:
    """Around code of users: whatever it raises, SystemExit included, becomes what ``failed`` makes of it. Signals, and
    errors of the types ``passing``, are raised as they are."""
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        if is_signal(error):
            raise
        raise failed(error) from error


def did_you_mean(type_name: str, known: Sequence[str]) -> str:
    """A hint for an unknown type: an import path with a dot in place of its colon, or a name that is spelt alike."""
    module, dot, name = type_name.rpartition(".")
    return f" Did you mean {f'{module}:{name}'!r}?" if dot and module else suggestion(type_name, known)


def import_path(path: str, key: str) -> Any:
    """The object at ``package.module:name``; ``key`` is the setting that errors name."""
    module_name, _, name = path.partition(":")
    if module_name.partition(".")[0] != PACKAGE and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a project's own modules lie in the current folder

    def failed(error: BaseException) -> MarbleError:
        if isinstance(error, Untrusted):
            return Untrusted(f"{key}: {error}")
        return InputError(
            f"{key}: cannot import {module_name!r} ({described(error)}); "
            "fix it, install it, or put its folder on PYTHONPATH"
        )

    with user_code(failed, passing=()):
        module = importlib.import_module(module_name)
        found = hasattr(module, name)  # a module may have its own __getattr__
        target = getattr(module, name, None)
    if not found:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise InputError(f"{key}: {module_name!r} has no {name!r}.{suggestion(name, public)}")
    return target


@dataclass(frozen=True)
class Registry(Generic[PartT]):
    """The parts that one section of the config chooses from."""

    section: str
    """Name of the section, such as `balance`."""
    kind: Any
    """The abstract class that every part is derived from."""
    default: str
    """`type` of a section that names none."""
    built_in: Mapping[str, str]
    """type -> import path. To add a part: one file, and one line here."""

    def find(self, type_name: str) -> type[PartT]:
        """The class that a `type` names. Raises InputError for an unknown or unsuitable one."""
        key = f"{self.section}.type"
        path = self.built_in.get(type_name, type_name)
        if ":" not in path:
            raise InputError(
                f"{key}: unknown type {type_name!r}.{did_you_mean(type_name, list(self.built_in))} "
                f"Valid: {', '.join(self.built_in)}; or an import path `package.module:name`"
            )
        part = import_path(path, key)
        if not (inspect.isclass(part) and issubclass(part, self.kind)) or inspect.isabstract(part):
            raise InputError(f"{key}: {path} is not a class derived from {self.kind.__module__}.{self.kind.__name__}")
        return cast("type[PartT]", part)

    def settings_class(self, type_name: str) -> type[Section]:
        """The config section of a part."""
        settings: type[Section] = self.find(type_name).Settings  # type: ignore[attr-defined]
        return settings

    def settings_for(self, tree: Any) -> type[Section]:
        """The config section of the part that the `type` of ``tree`` names, or of the default one."""
        type_name = tree.get("type", self.default) if isinstance(tree, Mapping) else self.default
        if not isinstance(type_name, str):
            raise InputError(f"{self.section}.type: expected a name, got {type_name!r}")
        return self.settings_class(type_name)

    def validate(self, value: Any, info: ValidationInfo) -> Any:
        """For pydantic: a mapping becomes the section of the part that its `type` names."""
        if not isinstance(value, Mapping):
            return value
        try:
            settings = self.settings_for(value)
        except InputError as error:
            text = str(error).removeprefix(f"{self.section}.type: ")
            raise PydanticCustomError(UNKNOWN_TYPE, "{text}", {"text": text}) from None
        with user_code(lambda error: ValueError(f"the settings raised {described(error)}"), passing=(ValidationError,)):
            return settings.model_validate({"type": self.default, **value}, context=info.context)

    @contextmanager
    def blaming(self, type_name: str, kind: type[MarbleError] = PluginFailed) -> Iterator[None]:
        """Around code that calls a part: an error out of a method of a plug-in becomes a ``kind`` that names the
        plug-in."""
        try:
            yield
        except MarbleError:
            raise
        except BaseException as error:
            if is_signal(error) or ":" not in type_name or not _passed_through(error, self.find(type_name)):
                raise
            raise kind(f"{self.section}.type: {type_name} raised {described(error)}") from error

    def part_of(self, settings: Section) -> type[PartT]:
        """The class whose settings these are."""
        return self.find(settings.type)  # type: ignore[attr-defined]


def _passed_through(error: BaseException, part: type) -> bool:
    """Whether a method of the plug-in, written outside of this package, is in the traceback."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        own = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        belongs = isinstance(own, part) or (inspect.isclass(own) and issubclass(own, part))
        if belongs and not str(frame.f_globals.get("__name__")).startswith("marble_rl."):
            return True
        trace = trace.tb_next
    return False
