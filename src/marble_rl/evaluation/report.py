"""`marble evaluate`: one or several sets of weights on the same prompts and seeds, as a table, JSON and pictures."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from marble_rl.config import RunConfig
from marble_rl.distributed.world import World, check_same_rewards
from marble_rl.errors import InputError, count_of
from marble_rl.evaluation.evaluate import Evaluation, evaluate, evaluated_prompts
from marble_rl.inference.opening import Opened, Weights, model_config, open_target
from marble_rl.intervals import FEWEST, Interval, paired_difference
from marble_rl.models.base import PromptCache
from marble_rl.prompts import PromptSet, read_prompt_file
from marble_rl.runs.images import Card, Picture, comparison, save_file, save_sheet
from marble_rl.runs.inputs import RunInputs, check_inputs, check_prompts
from marble_rl.runs.media import decoded
from marble_rl.runs.scores import GRID, IMAGES, SCORES, KeptPicture, Scores
from marble_rl.storage import output_folder, storage_errors
from marble_rl.types import Prompt

GRID_PROMPTS = 4
"""Of each prompt source, evenly spaced."""
SUFFIX = ".webp"
"""Of the pictures that are kept, each a file."""
DIGITS = 12
OWN_NAME = re.compile(rf"\d+-[a-z]+-[0-9a-f]{{{DIGITS}}}{re.escape(SUFFIX)}")
"""Row, weights and digest of a picture."""
AGAIN = "evaluate again"
"""What helps where a file could not be written."""
LINES = 10
"""Lines of progress for each of the weights, where no bar can be shown."""


def score_record(
    results: dict[str, Evaluation],
    step: int | None,
    held_out: Iterable[str],
    pictures: Sequence[KeptPicture] = (),
    settings: RunConfig | None = None,
) -> Scores:
    """scores.json of evaluations by name of their weights, in the order asked for. ``settings``: made with these."""
    return Scores(
        step=step,
        held_out_rewards=sorted(held_out),
        differences=_differences(list(results.values())),
        pictures=list(pictures),
        weights={name: result.record() for name, result in results.items()},
        made_with={} if settings is None else _made_with(settings),
    )


def _made_with(settings: RunConfig) -> dict[str, Any]:
    return {
        **settings.evaluation.model_dump(include={"seed", "steps", "solver", "images_per_prompt"}),
        **settings.rollout.model_dump(include={"height", "width", "frames"}),
    }


def _differences(results: Sequence[Evaluation]) -> dict[str, Interval]:
    """By reward, the last weights against the first, over the prompts that have a score under both. A reward with fewer
    than two such prompts is left out."""
    first, last = results[0], results[-1]
    differences: dict[str, Interval] = {}
    if first is last:
        return differences
    for name in first.table.names:
        before, after = first.per_prompt(name), last.per_prompt(name)
        both = before.isfinite() & after.isfinite()
        if both.sum() >= FEWEST:
            differences[name] = paired_difference(before[both], after[both])
    return differences


def print_scores(scores: Scores, out: Path) -> None:
    """The table of means, with differences where several sets of weights were evaluated."""
    compared = len(scores.weights) > 1
    each = len(scores.images) // scores.prompts
    table = Table(title=f"{count_of(scores.prompts, 'prompt')} x {count_of(each, 'image')}", box=SIMPLE_HEAD)
    table.add_column("reward")
    for name in scores.weights:
        table.add_column(name, justify="right")
    if compared:
        table.add_column("difference", justify="right")
        table.add_column("95 % interval", justify="right")
        table.add_column("")
    for reward in scores.rewards:
        means = [of.means.get(reward) for of in scores.weights.values()]
        cells = ["" if mean is None else f"{mean:.4f}" for mean in means]
        if compared:
            cells += _difference_cells(means[0], means[-1], scores.differences.get(reward))
        table.add_row(reward + ("*" if reward in scores.held_out_rewards else ""), *cells)
    console = Console()
    console.print(table)
    if scores.held_out_rewards:
        console.print("* evaluation only: never trained on", style="dim")
    if scores.differences:
        console.print("intervals: bootstrap over prompts; up and down where zero lies outside", style="dim")
    if compared and len(scores.differences) < len(scores.rewards):
        console.print(f"no interval: fewer than {FEWEST} prompts have both scores", style="dim")
    console.print(f"scores and pictures: {out}", markup=False, soft_wrap=True)


def _difference_cells(before: float | None, after: float | None, difference: Interval | None) -> list[str]:
    """Difference, interval and verdict, as far as they are known."""
    if difference is not None:
        verdict = "" if not difference.significant else "[green]up" if difference.sign > 0 else "[red]down"
        return [f"{difference.mean:+.4f}", f"{difference.low:+.4f} .. {difference.high:+.4f}", verdict]
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
    save_images: bool = False,
) -> Scores:
    """Evaluate each of the weights; the first rank writes scores.json, a grid with one column per weights, and its
    pictures; with ``save_images`` those of all prompts."""
    model = model_config(target, model_path, settings.model)
    inputs = check_inputs(settings.model_copy(update={"model": model.model_copy(update={"device": device})}))
    if world.size > 1:
        inputs.scorer.check_devices(world.size)
    prompts = inputs.heldout
    if prompts_file is not None:
        prompts = read_prompt_file(prompts_file)
        check_prompts(prompts, inputs.scorer)
    evaluated = evaluated_prompts(prompts, settings.evaluation)
    columns = _shown_prompts(evaluated)
    kept = range(len(evaluated)) if save_images else [i for column in columns for i in column]
    with output_folder(out) if world.first else nullcontext():
        own_device = str(world.pick_device(device, "--device"))
        opened = open_target(target, model_path=model_path, step=step, device=own_device, settings=model)
        opened.check_weights(weights)
        results = _evaluations(opened, weights, settings, inputs, prompts, kept, world)
        held_out = frozenset(reward.name for reward in settings.rewards if reward.held_out)
        if not world.first:
            return score_record(results, opened.step, held_out, settings=settings)
        return _write(results, opened.step, held_out, columns, out, settings)


def _evaluations(
    opened: Opened,
    weights: Sequence[Weights],
    settings: RunConfig,
    inputs: RunInputs,
    prompts: PromptSet,
    kept: Sequence[int],
    world: World,
) -> dict[str, Evaluation]:
    """By name of the weights, with the first picture of each of the prompts in ``kept``."""
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
                    on_images=_progress_counter(progress, role, images, world.size),
                    world=world,
                    pictures=[i * each for i in kept],
                    fps=settings.logging.fps,
                )
    return results


def _progress_counter(progress: Progress, role: str, images: int, ranks: int) -> Callable[[int], None]:
    """Counts the images of one of ``ranks`` on a bar, or in plain lines where there is no terminal."""
    task = progress.add_task(f"evaluating {role}", total=images / ranks)
    own = printed = 0

    def on_images(done: int) -> None:
        nonlocal own, printed
        own += done
        progress.advance(task, done)
        tenths = min(LINES, LINES * own * ranks // images)  # shares are whole batches, so not quite equal
        if tenths > printed and not progress.console.is_terminal:
            printed = tenths
            progress.console.print(
                f"evaluating {role}: {100 * tenths // LINES} % of {count_of(images, 'image')}", markup=False
            )

    return on_images


def _shown_prompts(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Positions of the prompts whose first image is shown; a list per prompt source."""
    sources: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        sources.setdefault(prompt.source, []).append(i)
    strides = {name: max(1, len(rows) // GRID_PROMPTS) for name, rows in sources.items()}
    return [rows[:: strides[name]][:GRID_PROMPTS] for name, rows in sources.items()]


def _write(
    results: dict[str, Evaluation],
    step: int | None,
    held_out: Iterable[str],
    columns: Sequence[Sequence[int]],
    out: Path,
    settings: RunConfig,
) -> Scores:
    """Write all files, in place of those of an earlier evaluation; scores.json after the pictures that it lists."""
    before = _listed_pictures(out)
    pictures = _save_pictures(results, out)
    cards = [[_card(results, i) for i in column] for column in columns]
    save_sheet(comparison(cards), out / GRID, AGAIN, settings.logging.fps)
    scores = score_record(results, step, held_out, pictures, settings)
    with storage_errors(str(out), AGAIN):
        scores.write(out / SCORES)
        for old in (before | _own_pictures(out)) - _listed_pictures(out):
            old.unlink(missing_ok=True)
    return scores


def _listed_pictures(out: Path) -> set[Path]:
    """Of the evaluation in the folder. Other files beside them are not ours to delete."""
    try:
        pictures = Scores.read(out / SCORES).pictures
    except InputError:
        return set()
    files = [Path(file) for picture in pictures for file in picture.files.values()]
    return {out / IMAGES / file.name for file in files if file.suffix == SUFFIX}  # whatever folder it names


def _own_pictures(out: Path) -> set[Path]:
    """Also those of an evaluation that was killed before its scores were written."""
    return {file for file in (out / IMAGES).glob(f"*{SUFFIX}") if OWN_NAME.fullmatch(file.name)}


def _save_pictures(results: dict[str, Evaluation], out: Path) -> list[KeptPicture]:
    """Write the pictures that were kept under each weights to images/. A name holds a digest of its picture, so that
    the scores of one evaluation never list a picture of another."""
    pictures = []
    for row in sorted(next(iter(results.values())).pictures):
        kept = {name: result.pictures[row] for name, result in results.items()}
        digests = {name: hashlib.sha256(image.data).hexdigest()[:DIGITS] for name, image in kept.items()}
        files = {name: f"{IMAGES}/{row}-{name}-{digest}{SUFFIX}" for name, digest in digests.items()}
        for name, image in kept.items():
            save_file(image.data, out / files[name], AGAIN)
        notes = {name: dict(image.notes) for name, image in kept.items() if image.notes}
        pictures.append(KeptPicture(row, files, notes))
    return pictures


def _card(results: dict[str, Evaluation], prompt: int) -> Card[Tensor]:
    first = next(iter(results.values()))
    row = prompt * first.images_per_prompt
    pictures = tuple(
        Picture(name, decoded(result.pictures[row].data), result.scores(row)) for name, result in results.items()
    )
    return Card(first.prompts[prompt].text, pictures)
