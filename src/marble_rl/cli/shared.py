"""Options and helpers that several commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from marble_rl.errors import Escaped, InputError, described
from marble_rl.trust import begin_command

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file, run folder, or the name of a recipe (`marble init`).")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
CheckpointName = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        "--step",
        metavar="best|newest|N",
        help="Of a run: the best on its validation prompts, the newest (the default), or that of step N.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
PathT = TypeVar("PathT", str, Path)
MODELS = ("target", "model")
"""Arguments that are a path or a hub id."""
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, xpu or mps.")]


def _without_types(params: list[Any]) -> list[Any]:
    """A flag takes no value, so its help should show no type."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    trusted: ClassVar[bool] = False
    """What `--trust` sets."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Before a command sees a path, it is known to be one; before it opens a run, whose code it may run."""
        begin_command(self.trusted, _agreed)
        for param in self.params:
            value = ctx.params.get(param.name)
            for path in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(path, Path) or (path is not None and param.name in MODELS):
                    option = param.opts[0].startswith("-")
                    _check_argument(path, param.opts[0] if option else param.metavar or param.name)
        try:
            return super().invoke(ctx)
        except SystemExit as error:  # of code that the command called: a failure, whatever its exit code
            raise Escaped(described(error)) from error


def _check_argument(path: PathT, name: str) -> None:
    from marble_rl.section import check_path

    try:
        check_path(path)
        Path(path).exists()  # PermissionError: a folder above it cannot be entered
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None
    except OSError as error:
        raise InputError(f"{name}: cannot look up {path}: {error.strerror}; fix its permissions") from None


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _agreed(question: str) -> bool:
    """Ask at a terminal; elsewhere the answer is no."""
    from marble_rl.distributed.world import launched

    return launched() == 1 and sys.stdin.isatty() and sys.stderr.isatty() and typer.confirm(question, err=True)


def size_text(size: float) -> str:
    """Bytes, as people write them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def set_library_verbosity() -> None:
    """Let transformers and diffusers log errors only, in this process and in those that it starts."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")


def quiet_libraries() -> None:
    """Hide the loading bars of transformers and diffusers; those of downloads stay."""
    from diffusers.utils import logging as diffusers_logging
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    enable_progress_bars()


@contextmanager
def serve_extra(command: str) -> Iterator[None]:
    """Around the import of a server: a missing package is named with the extra that has it."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"marble {command} needs {error.name}; run: pip install 'marble-rl[serve]'") from error
