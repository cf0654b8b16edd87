"""`marble evaluate`: one or several sets of weights on the same prompts and seeds, as a table, JSON and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from marble_rl.config import RunConfig
from marble_rl.distributed.world import World, check_same_rewards
from marble_rl.evaluation.evaluate import Evaluation, evaluate, evaluated_prompts
from marble_rl.inference.opening import Opened, Weights, model_config, open_target
from marble_rl.intervals import FEWEST, Difference, paired_difference
from marble_rl.models.base import PromptCache
from marble_rl.prompts import PromptSet, read_prompt_file
from marble_rl.runs.images import Card, Picture, comparison, save_image, save_small
from marble_rl.runs.inputs import RunInputs, check_inputs, check_prompts
from marble_rl.storage import output_folder, storage_errors, write_json
from marble_rl.types import Prompt

GRID_PROMPTS = 4
"""Of each prompt source, evenly spaced."""
SCORES = "scores.json"
IMAGES, SUFFIX = "images", ".webp"
"""Where the pictures of the grid lie, each a file."""
AGAIN = "evaluate again"
"""What helps where a file could not be written."""
LINES = 10
"""Of each weights, where no bar can be shown."""


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
    def rewards(self) -> list[str]:
        """Those with a score under any of the weights: a reward may have nothing to say about all images of one."""
        means = [result.means for result in self.results.values()]
        return [name for name in self._first.table.names if any(name in known for known in means)]

    @property
    def differences(self) -> dict[str, Difference]:
        """For each reward, the last weights against the first; empty where there is only one. A reward with fewer than
        two prompts that have a score under both is left out: nothing can be told from one."""
        first, last = self._first, self._last
        if first is last:
            return {}
        found = {}
        for name in self.rewards:
            before, after = first.per_prompt(name), last.per_prompt(name)
            both = before.isfinite() & after.isfinite()
            if both.sum() >= FEWEST:
                found[name] = paired_difference(before[both], after[both])
        return found

    @property
    def _first(self) -> Evaluation:
        return next(iter(self.results.values()))

    @property
    def _last(self) -> Evaluation:
        return list(self.results.values())[-1]

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "held_out_rewards": sorted(self.held_out),
            "differences": {name: asdict(difference) for name, difference in self.differences.items()},
            "pictures": self.shown,
            "weights": {name: result.to_json() for name, result in self.results.items()},
        }

    def print(self) -> None:
        first, differences = self._first, self.differences
        compared = len(self.results) > 1
        table = Table(title=f"{len(first.prompts)} prompts x {first.images_per_prompt} images", box=SIMPLE_HEAD)
        table.add_column("reward")
        for name in self.results:
            table.add_column(name, justify="right")
        if compared:
            table.add_column("difference", justify="right")
            table.add_column("95 % interval", justify="right")
            table.add_column("")
        for reward in self.rewards:
            means = [result.means.get(reward) for result in self.results.values()]
            cells = ["" if mean is None else f"{mean:.4f}" for mean in means]
            if compared:
                cells += _difference_cells(means[0], means[-1], differences.get(reward))
            table.add_row(reward + ("*" if reward in self.held_out else ""), *cells)
        console = Console()
        console.print(table)
        if self.held_out:
            console.print("* held out: never trained on", style="dim")
        if differences:
            console.print("intervals: bootstrap over prompts; up and down where zero lies outside", style="dim")
        if compared and len(differences) < len(self.rewards):
            console.print(f"no interval: fewer than {FEWEST} prompts have both scores", style="dim")
        console.print(f"scores and pictures: {self.out}", markup=False, soft_wrap=True)


def _difference_cells(before: float | None, after: float | None, found: Difference | None) -> list[str]:
    """Difference, interval and verdict, as far as they are known."""
    if found is not None:
        verdict = "" if not found.significant else "[green]up" if found.mean > 0 else "[red]down"
        return [f"{found.mean:+.4f}", f"{found.low:+.4f} .. {found.high:+.4f}", verdict]
    return ["" if before is None or after is None else f"{after - before:+.4f}", "", ""]


def evaluate_target(
    target: str,
    settings: RunConfig,
    weights: Sequence[Weights],
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
    model = model_config(target, model_path, settings.model)
    inputs = check_inputs(settings.model_copy(update={"model": model.model_copy(update={"device": device})}))
    prompts = inputs.heldout
    if prompts_file is not None:
        prompts = read_prompt_file(prompts_file)
        check_prompts(prompts, inputs.scorer)
    columns = _shown_prompts(evaluated_prompts(prompts, settings.evaluation))
    with output_folder(out) if world.first else nullcontext():
        own_device = str(world.pick_device(device, "--device"))
        opened = open_target(target, model_path=model_path, step=step, device=own_device, settings=model)
        opened.check_weights(weights)
        results = _evaluations(opened, weights, settings, inputs, prompts, columns, world)
        held_out = frozenset(reward.name for reward in settings.rewards if reward.held_out)
        report = EvaluationReport(results, opened.step, held_out, out)
        return _written(report, columns) if world.first else report


def _evaluations(
    opened: Opened,
    weights: Sequence[Weights],
    settings: RunConfig,
    inputs: RunInputs,
    prompts: PromptSet,
    columns: Sequence[Sequence[int]],
    world: World,
) -> dict[str, Evaluation]:
    """By name of the weights, with the pictures of the prompts in ``columns``."""
    console = Console(stderr=True, quiet=not world.first)
    for remark in inputs.scorer.load(opened.model.device):
        console.print(remark, markup=False, soft_wrap=True)
    check_same_rewards(world, inputs.scorer.names)
    inputs.scorer.check_media(opened.model.media())
    cache = PromptCache(opened.model)
    each = settings.evaluation.images_per_prompt
    images = len(evaluated_prompts(prompts, settings.evaluation)) * each
    results: dict[str, Evaluation] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for role in weights:
            with opened.acting_as(role):
                results[role] = evaluate(
                    opened.model,
                    cache,
                    inputs.scorer,
                    prompts,
                    settings.evaluation,
                    settings.rollout,
                    on_images=_teller(progress, role, images, world.size),
                    world=world,
                    pictures=[i * each for column in columns for i in column],
                )
    return results


def _teller(progress: Progress, role: str, images: int, processes: int) -> Callable[[int], None]:
    """Counts the images of one of ``processes`` on a bar, or in plain lines where there is no terminal."""
    task = progress.add_task(f"evaluating {role}", total=images / processes)
    own = told = 0

    def on_images(done: int) -> None:
        nonlocal own, told
        own += done
        progress.advance(task, done)
        tenths = min(LINES, LINES * own * processes // images)  # shares are whole batches, so not quite equal
        if tenths > told and not progress.console.is_terminal:
            told = tenths
            progress.console.print(f"evaluating {role}: {100 * tenths // LINES} % of {images} images", markup=False)

    return on_images


def _shown_prompts(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Positions of the prompts whose first image is shown; a list per prompt source."""
    sources: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        sources.setdefault(prompt.source, []).append(i)
    strides = {name: max(1, len(rows) // GRID_PROMPTS) for name, rows in sources.items()}
    return [rows[:: strides[name]][:GRID_PROMPTS] for name, rows in sources.items()]


def _written(report: EvaluationReport, columns: Sequence[Sequence[int]]) -> EvaluationReport:
    """Write all files, in place of those of an earlier evaluation; scores.json after the pictures that it lists."""
    out, before = report.out, _listed_pictures(report.out)
    shown = _save_pictures(report.results, [i for column in columns for i in column], out)
    cards = [[_card(report.results, i) for i in column] for column in columns]
    save_image(comparison(cards), out / "grid.png", AGAIN)
    report = replace(report, shown=shown)
    with storage_errors(str(out), AGAIN):
        write_json(out / SCORES, report.to_json())
        for old in before - _listed_pictures(out):
            old.unlink(missing_ok=True)
    return report


def _listed_pictures(out: Path) -> set[Path]:
    """Of the evaluation in the folder. Whatever else lies beside them is not ours."""
    try:
        entries = json.loads((out / SCORES).read_text(encoding="utf-8"))["pictures"]
        files = [Path(file) for entry in entries for file in entry["files"].values()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()
    return {out / IMAGES / file.name for file in files if file.suffix == SUFFIX}  # whatever folder it names


def _save_pictures(results: dict[str, Evaluation], prompts: Sequence[int], out: Path) -> list[dict[str, Any]]:
    """Write the first image of each prompt under each weights to images/.

    `row` is the picture's place in every `weights.<name>.images` list.
    """
    entries = []
    for row in (i * next(iter(results.values())).images_per_prompt for i in prompts):
        files = {name: f"{IMAGES}/{row}-{name}{SUFFIX}" for name in results}
        for name, result in results.items():
            save_small(result.pictures[row], out / files[name], AGAIN)
        entries.append({"row": row, "files": files})
    return entries


def _card(results: dict[str, Evaluation], prompt: int) -> Card:
    first = next(iter(results.values()))
    rows = {name: prompt * result.images_per_prompt for name, result in results.items()}
    pictures = tuple(
        Picture(name, result.pictures[rows[name]], result.scores(rows[name])) for name, result in results.items()
    )
    return Card(first.prompts[prompt].text, pictures)
