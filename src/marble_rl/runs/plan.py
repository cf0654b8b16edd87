"""What a config amounts to: which rewards score which prompts, what a step costs, and room on the disk and the device.

Nothing is loaded: of a model on this machine the headers of its files are read. Times are measured ones, of an earlier
run with the same settings; without one there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from marble_rl.balancing.registry import RULES
from marble_rl.config import RunConfig
from marble_rl.devices import pick_device
from marble_rl.errors import InputError, count_of
from marble_rl.gradients.halves import SAMPLED, buffer_numbers
from marble_rl.mini import PIPELINE, embedded
from marble_rl.models import adapter_of
from marble_rl.models.parts import TRANSFORMERS, VAE
from marble_rl.models.precision import BITS, memory_settings
from marble_rl.prompts import PromptSet
from marble_rl.runs.inputs import RunInputs
from marble_rl.runs.prompt_lengths import Reader, reader_of
from marble_rl.runs.speed import seconds_per_step
from marble_rl.types import Prompt

FLOAT = 4
"""Bytes of a float32."""
FEW = 0.5
"""A reward that applies to a smaller share of a source's prompts may do so by accident."""


@dataclass(frozen=True)
class Source:
    """A prompt source, and how many of its prompts each reward applies to."""

    name: str
    split: str
    """train or heldout"""
    prompts: int
    groups: int | None
    """Of a rollout; None for held-out prompts"""
    rewards: dict[str, int]
    images: dict[str, float]
    """Images of a rollout that each reward scores, on average"""
    too_long: int | None
    """Prompts that the model reads only in part; None where that was not checked"""


@dataclass(frozen=True)
class Model:
    """Of a model whose files are on this machine."""

    adapter: int
    """Parameters of one copy of the adapter"""
    checkpoint: int
    """Bytes"""
    disk: int
    """Bytes of the checkpoints that are kept, of one more while it is written, and of the exported LoRA"""
    memory: int
    """Bytes on the device at least: weights, adapters and gradients, without activations, latents and rewards"""


@dataclass(frozen=True)
class Plan:
    """Of a whole run."""

    sources: list[Source]
    text_limit: int | None
    """Tokens of a prompt that the model reads; None where its tokenizer is not on this machine"""
    steps: int
    rollouts: int
    images: int
    """Of a rollout"""
    size: str
    """Of an image, in words"""
    sampling_passes: int
    """Forward passes of one image in a rollout"""
    training_passes: int
    """Of one sample at one noise level, forward and backward, in a step"""
    scores: int
    """Of trained and watched rewards, in a rollout; on average where a reward applies to some prompts only"""
    evaluation_images: int
    """Of all evaluations during training"""
    model: Model | None
    """None where the model's files are not on this machine"""
    seconds: float | None
    """Of a step; None where no earlier run tells"""
    measured_in: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(config: RunConfig, inputs: RunInputs, runs: Path = Path("runs")) -> Plan:
    """``runs``: a folder of earlier runs, for times."""
    c = config.rollout
    images = c.groups * c.group_size
    rollouts = math.ceil(config.trainer.steps / c.steps_each)
    reader = reader_of(config)
    sources = [
        source for name, split in _splits(inputs).items() for source in _sources(config, inputs, split, name, reader)
    ]
    scored = [*config.trained_rewards, *config.watched_rewards]
    levels = max(1, int(config.loss.timestep_fraction * c.steps))
    measured = seconds_per_step(config, runs)
    every, evaluated = config.trainer.eval_every, config.evaluation
    evaluations = config.trainer.steps // every if every else 0
    asked = (inputs.validation or inputs.heldout).sources.values()
    prompts = sum(min(len(source), evaluated.limit or len(source)) for source in asked)
    evaluations += bool(evaluations and inputs.validation)  # of the base model, to choose the best checkpoint
    return Plan(
        sources=sources,
        text_limit=None if reader is None else reader.limit,
        steps=config.trainer.steps,
        rollouts=rollouts,
        images=images,
        size=f"{c.height} x {c.width} pixels" if c.height and c.width else "the model's own size",
        sampling_passes=images * c.steps,
        training_passes=images // c.updates * min(levels, config.loss.timesteps_per_sample or levels),
        scores=round(sum(source.images.get(name, 0.0) for source in sources for name in scored)),
        evaluation_images=evaluations * prompts * evaluated.images_per_prompt,
        model=_model(config),
        seconds=None if measured is None else measured[0],
        measured_in=None if measured is None else str(measured[1]),
    )


def cost(of: Plan) -> list[str]:
    """What a step and the whole run cost, in words."""
    steps_a_rollout = of.steps / of.rollouts
    rollout = "A step" if of.steps == of.rollouts else f"A rollout, for {steps_a_rollout:.3g} steps,"
    lines = [
        f"{rollout} samples {of.images:,} images of {of.size} ({of.sampling_passes:,} forward passes) and has "
        f"{of.scores:,} scores of rewards. A step trains on {of.training_passes:,} noised samples, each a forward "
        "and backward pass.",
        f"In all: {count_of(of.steps, 'step')}, {of.rollouts * of.images:,} images, {of.rollouts * of.scores:,} scores"
        + (f", and {of.evaluation_images:,} images of evaluations." if of.evaluation_images else "."),
    ]
    if of.seconds is not None:
        whole = of.seconds * of.steps
        lines.append(f"{of.seconds:.3g} s a step, {_hours(whole)} in all, as measured in {of.measured_in}.")
    return lines


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"


def _splits(inputs: RunInputs) -> dict[str, PromptSet]:
    """By their name in the config."""
    heldout = {} if inputs.heldout is inputs.train else {"heldout": inputs.heldout}
    validation = {} if inputs.validation is None else {"validation": inputs.validation}
    return {"train": inputs.train, **validation, **heldout}


def prompt_remarks(of: Plan, config: RunConfig, inputs: RunInputs) -> Iterator[str]:
    """Warn of prompts that the model reads in part, of prompts that no trained reward scores, and of rewards that apply
    to a few prompts of a source."""
    p = config.prompts
    named = {"train": p.train, "validation": p.validation or [], "heldout": p.heldout or []}
    for source in of.sources:
        prompts = _splits(inputs)[source.split].sources[source.name]
        where = f"prompts.{source.split} ({source.name})"
        if source.too_long:
            yield (
                f"{where}: {source.too_long:,} of {len(prompts):,} prompts are longer than the {of.text_limit} tokens "
                f"that the model reads, such as {max((p.text for p in prompts), key=len)[:80]!r}; the rest is cut off. "
                "Shorten them, or raise model.text_length if the model was trained with more"
            )
        unscored = [p for p in prompts if not any(inputs.scorer[n].applies_to(p) for n in _scoring(config, source))]
        if unscored:
            what = "trained on" if source.split == "train" else "evaluated"
            yield (
                f"{where}: to {len(unscored):,} of {len(prompts):,} prompts no reward applies that is {what}, such as "
                f"{unscored[0].text[:80]!r}; leave them out"
            )
        (settings,) = (entry for entry in named[source.split] if entry.name == source.name)
        if settings.rewards is None:
            yield from _few(source, prompts, inputs, where)


def _few(source: Source, prompts: tuple[Prompt, ...], inputs: RunInputs, where: str) -> Iterator[str]:
    for name, count in source.rewards.items():
        if 0 < count < FEW * len(prompts):
            example = next(p.text for p in prompts if inputs.scorer[name].applies_to(p))
            others = [other for other, n in source.rewards.items() if other != name and n]
            yield (
                f"{where}: {name} applies to {count:,} of {len(prompts):,} prompts, such as {example[:80]!r}. If that "
                f"is not meant, give the source `rewards: [{', '.join(others)}]`"
            )


def _scoring(config: RunConfig, source: Source) -> list[str]:
    """Rewards that count for a source: in training the trained ones, in evaluations all."""
    return list(config.trained_rewards) if source.split == "train" else [reward.name for reward in config.rewards]


def _sources(
    config: RunConfig, inputs: RunInputs, split: PromptSet, name: str, reader: Reader | None
) -> Iterator[Source]:
    counts = split.counts(config.rollout.groups) if name == "train" else [None] * len(split.sources)
    for (source, prompts), groups in zip(split.sources.items(), counts, strict=True):
        rewards = {r: sum(inputs.scorer[r].applies_to(p) for p in prompts) for r in inputs.scorer.names}
        sampled = (groups or 0) * config.rollout.group_size
        images = {r: sampled * count / len(prompts) for r, count in rewards.items()}
        too_long = None if reader is None else reader.too_long([prompt.text for prompt in prompts])
        yield Source(source, name, len(prompts), groups, rewards, images, too_long)


def _model(config: RunConfig) -> Model | None:
    folder = Path(embedded(config.model.path, PIPELINE))
    try:
        *transformers, vae = (_shapes(folder / part) for part in (*TRANSFORMERS, VAE))
        device = pick_device(config.model.device)
    except (OSError, SafetensorError, InputError):
        return None
    if not transformers[0] or not vae:
        return None
    which = {"both": transformers, "high": transformers[:1], "low": transformers[1:]}[config.lora.experts]
    targets = config.lora.targets or adapter_of(folder / "model_index.json").lora_targets
    ends = tuple(f".{target}.weight" for target in targets)
    named = [item for transformer in which for item in transformer.items()]
    adapted = [shape for name, shape in named if f".{name}".endswith(ends) and len(shape) == 2]
    adapter = sum(config.lora.rank * sum(shape) for shape in adapted)
    memory = memory_settings(config.model, device)
    bits = BITS[memory.quantize] if memory.quantize else 8 * memory.dtype.itemsize
    rule = RULES.part_of(config.balance)
    kept = rule.bytes_per_parameter(config.trained_rewards, list(config.guards))
    columns = len(config.trained_rewards) + 1 if config.uses_gradients else 0
    buffer = buffer_numbers(columns, adapter, SAMPLED if rule.keeps_halves else 0)
    # Three copies of the adapter, and AdamW's two moments.
    checkpoint = adapter * ((3 + 2) * FLOAT + kept)
    weights = int(sum(map(_count, transformers)) * bits / 8) + _count(vae) * memory.vae_dtype.itemsize
    # One is written while the others are kept; the best is one more.
    checkpoints = config.trainer.keep_checkpoints + 1 + (config.prompts.validation is not None)
    return Model(
        adapter=adapter,
        checkpoint=checkpoint,
        disk=checkpoints * checkpoint + adapter * FLOAT,
        memory=weights + checkpoint + buffer * FLOAT,
    )


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes by parameter, from the headers of a part's files."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes.update({name: file.get_slice(name).get_shape() for name in list(file.keys())})  # not a dict
    return shapes


def _count(shapes: dict[str, list[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
