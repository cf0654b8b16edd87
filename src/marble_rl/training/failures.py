"""Errors in a training step that a user can do something about, turned into messages that say what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from marble_rl.balancing.registry import RULES
from marble_rl.config import RunConfig
from marble_rl.errors import MarbleError, RunStopped
from marble_rl.losses.registry import LOSSES
from marble_rl.memory.out_of_memory import memory_errors


@contextmanager
def blaming_plugins(config: RunConfig) -> Iterator[None]:
    """Errors out of a rule or a loss that is given by import path become a PluginFailed that names it."""
    with RULES.blaming(config.balance.type), LOSSES.blaming(config.loss.type):
        yield


@contextmanager
def explained(config: RunConfig, stage: Callable[[], str], lockstep: bool) -> Iterator[None]:
    """Out of memory, and errors of plug-ins. In ``lockstep`` they are left as they are, see `memory_errors`."""
    if lockstep:
        yield
    else:
        with blaming_plugins(config), memory_errors(stage), _determinism_errors():
            yield


@contextmanager
def _determinism_errors() -> Iterator[None]:
    """An operation without a deterministic kernel, with `trainer.deterministic`."""
    try:
        yield
    except MarbleError:
        raise
    except RuntimeError as error:
        if "deterministic" not in str(error) or not torch.are_deterministic_algorithms_enabled():
            raise
        first = str(error).partition(". ")[0]
        raise RunStopped(f"trainer.deterministic: {first}. Set it to false, and continue with --resume") from error
