"""`marble rate prepare`: every picture of a study, sampled once. A second call makes those that are still missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import Progress

from marble_rl.config.run import EvaluationConfig, RunConfig
from marble_rl.errors import InputError, text_of
from marble_rl.inference.opening import choose_weights, open_target, sample_images
from marble_rl.models.base import PromptCache
from marble_rl.models.settings import ModelConfig
from marble_rl.rating.study import PICTURE, VIDEO, RatedModel, Sampling, Study, StudyFolder
from marble_rl.rating.targets import picture_files, settings_for
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.images import save_file, save_sample
from marble_rl.runs.layout import checkpoint_steps
from marble_rl.runs.media import opened_frames, png, webp
from marble_rl.storage import output_folder, storage_errors

AGAIN = "prepare again: pictures that are there are kept"
Place = tuple[int, int]
"""Index of a prompt, and of its picture"""


def default_sampling(models: Sequence[RatedModel], seed: int) -> Sampling:
    """As the first run among the models is evaluated, otherwise as `marble sample` does."""
    configs = run_configs(models)
    steps = configs[0].evaluation if configs else EvaluationConfig()
    size = configs[0].rollout if configs else RolloutConfig()
    return Sampling(
        seed=seed,
        steps=steps.steps,
        solver=steps.solver,
        height=size.height,
        width=size.width,
        frames=size.frames,
        fps=configs[0].logging.fps if configs else None,
    )


def run_configs(models: Sequence[RatedModel]) -> list[RunConfig]:
    return [RunFolder(Path(model.target)).load_config() for model in models if model.kind == "run"]


def prepare(study: Study, folder: StudyFolder, base_model: str | None, device: str, console: Console) -> None:
    """Write the plan and every picture that is missing."""
    pinned = _pinned(study, folder)
    copied = {model.name: _checked_files(model, pinned) for model in pinned.models if model.kind == "pictures"}
    with output_folder(folder.path):
        with storage_errors(str(folder.plan), AGAIN):
            pinned.write(folder.plan)
        with _progress(console, pinned) as progress:
            for model in pinned.models:
                places = _missing(model, pinned, folder)
                if model.kind == "pictures":
                    pictures = _copied(model, copied[model.name], places, pinned, folder)
                else:
                    pictures = _sampled(model, places, pinned, folder, base_model, device)
                task = progress.add_task(model.name, total=len(places))
                for _ in pictures:
                    progress.advance(task)
    folder.check_complete(pinned)


def _pinned(study: Study, folder: StudyFolder) -> Study:
    """The study with the checkpoints of the earlier call, if there was one; refuses another study in the folder."""
    if not folder.plan.exists():
        if folder.path.is_dir() and any(folder.path.iterdir()):
            raise InputError(f"--out: {folder.path} is not empty and not a rating study; give another folder")
        return study
    before = folder.read()
    steps = {model.target: model.step for model in before.models}
    models = [model.model_copy(update={"step": steps.get(model.target, model.step)}) for model in study.models]
    pinned = study.model_copy(update={"models": models})
    for key in ("ask", "images", "sampling", "models", "prompts"):
        if getattr(pinned, key) != getattr(before, key):
            raise InputError(
                f"--out: {folder.path} holds a study with other {key}; give what `prepare` was given first, or another "
                "folder"
            )
    for model in pinned.models:
        available = checkpoint_steps(RunFolder(Path(model.target)).checkpoints) if model.kind == "run" else []
        if model.kind == "run" and model.step not in available and _missing(model, pinned, folder):
            raise InputError(
                f"{model.target}: the study began with its checkpoint of step {model.step}, which is gone (there are "
                f"{available}); prepare the study in another folder"
            )
    return pinned


def _missing(model: RatedModel, study: Study, folder: StudyFolder) -> list[Place]:
    places = [(i, j) for i in range(len(study.prompts)) for j in range(study.images)]
    return [place for place in places if folder.picture(model.name, *place) is None]


def _sampled(
    model: RatedModel, places: Sequence[Place], study: Study, folder: StudyFolder, base_model: str | None, device: str
) -> Iterator[Path]:
    """Sample and write pictures, one after the other. The model is loaded only if one is missing."""
    if not places:
        return
    runs: list[ModelConfig] = [config.model for config in run_configs(study.models)]
    base = base_model if model.kind == "LoRA" else None
    settings = settings_for(model.target, base_model, runs)
    opened = open_target(model.target, model_path=base, step=model.step, device=device, settings=settings)
    cache = PromptCache(opened.model)
    cache.prepare([study.prompts[i] for i, _ in places])
    how = study.sampling.model_dump(exclude={"seed", "fps"})
    with opened.acting_as(choose_weights(model.target)):
        for i, j in places:
            seed = study.sampling.seed + i * study.images + j
            (picture,) = sample_images(opened, study.prompts[i], seed=seed, images=1, prompt_cache=cache, **how)
            yield save_sample(picture, folder.stem(model.name, i, j), AGAIN, study.sampling.fps)


def _checked_files(model: RatedModel, study: Study) -> list[Path]:
    """One picture for each prompt and image, all readable."""
    files = picture_files(model.target)
    wanted = len(study.prompts) * study.images
    if len(files) != wanted:
        raise InputError(
            f"{model.target}: {len(files)} pictures, but {len(study.prompts)} prompts with {study.images} each need "
            f"{wanted}, in the order of the numbers in their names"
        )
    for file in files:
        try:
            with Image.open(file) as picture:
                picture.verify()
        except Exception as error:  # of many kinds, according to what is wrong with the file
            raise InputError(f"{file} is not a picture that can be read ({text_of(error)}); replace it") from None
    return files


def _copied(
    model: RatedModel, files: Sequence[Path], places: Sequence[Place], study: Study, folder: StudyFolder
) -> Iterator[Path]:
    """Written anew: neither format nor metadata shall tell where they come from. A video keeps its frame rate, unless
    the study has one."""
    for i, j in places:
        stem = folder.stem(model.name, i, j)
        with Image.open(files[i * study.images + j]) as picture:
            if getattr(picture, "is_animated", False):
                frames, own = opened_frames(picture)
                data, suffix = webp(frames, study.sampling.fps or own, whole=True), VIDEO
            else:
                data, suffix = png(ImageOps.exif_transpose(picture).convert("RGB")), PICTURE
        save_file(data, stem.with_name(f"{stem.name}{suffix}"), AGAIN)
        yield stem


@contextmanager
def _progress(console: Console, study: Study) -> Iterator[Progress]:
    about = f"{', '.join(study.names)}: {len(study.prompts)} prompts, pictures of each: {study.images}"
    if any(model.kind != "pictures" for model in study.models):
        about += f", seed {study.sampling.seed}, {study.sampling.steps} steps of {study.sampling.solver}"
    console.print(about, markup=False, soft_wrap=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        yield progress
