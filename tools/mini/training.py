"""Trainings of an hour or more: they go on where they were stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

SAVE_EVERY = 200
OnStep = Callable[[int, float], None]
Bar = Callable[[str, int], OnStep]
"""Name and number of steps of a training -> what shows its progress"""


@contextmanager
def bars(console: Console) -> Iterator[Bar]:
    """A line for every training."""
    with Progress(
        TextColumn("{task.description:<12}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    ) as progress:

        def bar(name: str, steps: int) -> OnStep:
            task = progress.add_task(name, total=steps, loss="")
            return lambda step, loss: progress.update(task, completed=step + 1, loss=f"loss {loss:.4f}")

        yield bar


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def stateful(
    parts: Mapping[str, Stateful], optimizers: Sequence[Stateful], schedules: Sequence[Stateful]
) -> dict[str, Stateful]:
    """All that a training changes, by name."""
    numbered = {"optimizer": optimizers, "schedule": schedules}
    return {**parts, **{f"{name} {i}": part for name, those in numbered.items() for i, part in enumerate(those)}}


class Resumable:
    """The steps of one training. Given a file, its state is saved there now and then, and at the end."""

    def __init__(self, file: Path | None = None, on_step: OnStep = lambda step, loss: None) -> None:
        self.file = file
        self.show = on_step

    def steps(self, count: int, parts: Mapping[str, Stateful]) -> Iterator[int]:
        """The numbers of the steps that are left; ``parts`` are saved, and restored before the first of them."""
        for step in range(self._restore(parts), count):
            yield step
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == count:
                self._save(step + 1, parts)

    def _restore(self, parts: Mapping[str, Stateful]) -> int:
        if self.file is None or not self.file.exists():
            return 0
        saved = torch.load(self.file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        return int(saved["step"])

    def _save(self, step: int, parts: Mapping[str, Stateful]) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            new = self.file.with_suffix(".new")
            torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, new)
            new.replace(self.file)


class Average:
    """An exponential moving average of parameters, faster in the first steps."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters = parameters
        self._decay = decay
        self._means = [p.detach().clone() for p in parameters]

    def update(self, step: int) -> None:
        decay = min(self._decay, (1 + step) / (10 + step))
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            mean.lerp_(parameter.detach(), 1 - decay)

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        for parameter, mean in zip(self._parameters, self._means, strict=True):
            parameter.copy_(mean)

    def state_dict(self) -> list[Tensor]:
        return self._means

    def load_state_dict(self, state_dict: list[Tensor]) -> None:
        for mean, saved in zip(self._means, state_dict, strict=True):
            mean.copy_(saved)
