"""`marble evaluate`: one or several sets of weights on the same prompts and seeds, as a table, JSON and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from marble_rl.bootstrap import Difference, paired_difference
from marble_rl.config import RunConfig
from marble_rl.distributed import World, check_same_rewards
from marble_rl.errors import InputError
from marble_rl.evaluate import Evaluation, evaluate, evaluated_prompts
from marble_rl.images import Card, Picture, comparison, save_image, save_small
from marble_rl.inference import open_target
from marble_rl.inputs import check_inputs, check_prompts
from marble_rl.models.base import PromptCache
from marble_rl.prompts import read_prompt_file
from marble_rl.storage import storage_errors, write_json

GRID_PROMPTS = 4
"""Of each prompt source, evenly spaced."""


@dataclass(frozen=True)
class EvaluationReport:
    """Evaluations by name of the weights, in the order asked for."""

    results: dict[str, Evaluation]
    step: int | None
    held_out: frozenset[str]
    out: Path
    shown: list[dict[str, Any]] = field(default_factory=list)
    """Pictures kept as files: the place of each in the lists of images, and its file under each weights"""

    @property
    def differences(self) -> dict[str, Difference]:
        """For each reward, the last weights against the first; empty where there is only one."""
        first, *_, last = [*self.results.values(), *self.results.values()]
        if first is last:
            return {}
        pairs = {name: (first.per_prompt(name), last.per_prompt(name)) for name in first.means}
        both = {name: before.isfinite() & after.isfinite() for name, (before, after) in pairs.items()}
        return {name: paired_difference(b[both[name]], a[both[name]]) for name, (b, a) in pairs.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "held_out_rewards": sorted(self.held_out),
            "differences": {name: asdict(difference) for name, difference in self.differences.items()},
            "pictures": self.shown,
            "weights": {name: result.to_json() for name, result in self.results.items()},
        }

    def print(self) -> None:
        first, *others = self.results.values()
        differences = self.differences
        table = Table(title=f"{len(first.prompts)} prompts x {first.images_per_prompt} images", box=SIMPLE_HEAD)
        table.add_column("reward")
        for name in self.results:
            table.add_column(name, justify="right")
        if others:
            table.add_column("difference", justify="right")
            table.add_column("95 % interval", justify="right")
            table.add_column("")
        for reward, mean in first.means.items():
            cells = [f"{m:.4f}" for m in (mean, *(other.means[reward] for other in others))]
            if others:
                found = differences[reward]
                verdict = "" if not found.significant else "[green]up" if found.mean > 0 else "[red]down"
                cells += [f"{found.mean:+.4f}", f"{found.low:+.4f} .. {found.high:+.4f}", verdict]
            table.add_row(reward + ("*" if reward in self.held_out else ""), *cells)
        console = Console()
        console.print(table)
        if self.held_out:
            console.print("* held out: never trained on", style="dim")
        if others:
            console.print("intervals: bootstrap over prompts; up and down where zero lies outside", style="dim")
        console.print(f"scores and pictures: {self.out}", markup=False, soft_wrap=True)


def evaluate_target(
    target: str,
    settings: RunConfig,
    weights: Sequence[Any],
    *,
    prompts_file: Path | None,
    model_path: str | None,
    step: int | None,
    device: str,
    out: Path,
    world: World,
) -> EvaluationReport:
    """Evaluate each of the weights; the first process writes scores.json, a grid with one column per weights, and its
    pictures."""
    inputs = check_inputs(settings)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: cannot write to {out}: {error.strerror}; give another folder") from error
    console = Console(stderr=True, quiet=not world.first)
    prompts = inputs.heldout
    if prompts_file is not None:
        prompts = read_prompt_file(prompts_file)
        check_prompts(prompts, inputs.scorer)
    own_device = str(world.pick_device(device))
    opened = open_target(target, model_path=model_path, step=step, device=own_device)
    for remark in inputs.scorer.load(opened.model.device):
        console.print(remark, markup=False, soft_wrap=True)
    check_same_rewards(world, inputs.scorer.names)
    inputs.scorer.check_media(opened.model.media())
    cache = PromptCache(opened.model)
    total = len(evaluated_prompts(prompts, settings.evaluation)) * settings.evaluation.images_per_prompt / world.size
    results = {}
    with Progress(console=console, transient=True) as progress:
        for role in weights:
            task = progress.add_task(f"evaluating {role}", total=total)
            with opened.acting_as(role):
                results[str(role)] = evaluate(
                    opened.model,
                    cache,
                    inputs.scorer,
                    prompts,
                    settings.evaluation,
                    settings.rollout,
                    on_images=lambda done, task=task: progress.advance(task, done),  # type: ignore[misc]
                    world=world,
                )
    held_out = frozenset(reward.name for reward in settings.rewards if reward.held_out)
    if not world.first:
        return EvaluationReport(results, opened.step, held_out, out)
    columns = _shown_prompts(results)
    shown = _save_pictures(results, [i for column in columns for i in column], out)
    report = EvaluationReport(results, opened.step, held_out, out, shown)
    with storage_errors(str(out)):
        write_json(out / "scores.json", report.to_json())
    save_image(comparison([[_card(results, i) for i in column] for column in columns]), out / "grid.png")
    return report


def _shown_prompts(results: dict[str, Evaluation]) -> list[list[int]]:
    """Positions of the prompts whose first image is shown; a list per prompt source."""
    sources: dict[str, list[int]] = {}
    for i, prompt in enumerate(next(iter(results.values())).prompts):
        sources.setdefault(prompt.source, []).append(i)
    strides = {name: max(1, len(rows) // GRID_PROMPTS) for name, rows in sources.items()}
    return [rows[:: strides[name]][:GRID_PROMPTS] for name, rows in sources.items()]


def _save_pictures(results: dict[str, Evaluation], prompts: Sequence[int], out: Path) -> list[dict[str, Any]]:
    """Write the first image of each prompt under each weights to images/, in place of those of an earlier evaluation.

    `row` is the picture's place in every `weights.<name>.images` list.
    """
    folder = out / "images"
    for old in folder.glob("*.webp"):
        old.unlink()
    entries = []
    for row in (i * next(iter(results.values())).images_per_prompt for i in prompts):
        files = {name: f"images/{row}-{name}.webp" for name in results}
        for name, result in results.items():
            save_small(result.images[row], out / files[name])
        entries.append({"row": row, "files": files})
    return entries


def _card(results: dict[str, Evaluation], prompt: int) -> Card:
    first = next(iter(results.values()))
    rows = {name: prompt * result.images_per_prompt for name, result in results.items()}
    pictures = tuple(
        Picture(name, result.images[rows[name]], result.scores(rows[name])) for name, result in results.items()
    )
    return Card(first.prompts[prompt].text, pictures)
