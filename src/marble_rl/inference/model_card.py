"""README.md of an export: a model card for the hub, from the run's config and its evaluation."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Literal

import yaml

from marble_rl.config import RunConfig
from marble_rl.errors import count_of
from marble_rl.mini import PIPELINE, embedded
from marble_rl.models.base import DiffusionModel
from marble_rl.models.experts import LOADED_WITH, adapted_parts
from marble_rl.models.lora_files import lora_name
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.history import History
from marble_rl.runs.scores import SCORES, Scores

ExportKind = Literal["merged", "diffusers", "comfyui", "kohya"]
"""A merged pipeline, or the format of a LoRA."""
BASE = "base"
MARKUP = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)")
"""What Markdown would not show as it is; an underscore within a word is."""


def read_evaluation(run: RunFolder, weights: str, step: int | None) -> tuple[Scores | None, list[str]]:
    """The run's last evaluation if it is of these weights and this step; otherwise None and a remark that says why."""
    file = run.evaluation / SCORES
    advice = f"`marble evaluate {run.path}`, then export again, puts scores into the model card"
    if not file.exists():
        return None, [f"no evaluation in {run.path}: {advice}"]
    scores = Scores.read(file)
    if scores.step != step:
        return None, [f"{file} is of step {scores.step}, not {step}: left out of the model card. {advice}"]
    missing = [name for name in (BASE, weights) if name not in scores.weights]
    if missing:
        return None, [f"{file} has no scores of the weights {missing[0]}: left out of the model card. {advice}"]
    return scores, []


def model_card(
    model: DiffusionModel,
    config: RunConfig,
    step: int | None,
    weights: str,
    *,
    evaluation: Scores | None = None,
    picture: str | None = None,
    kind: ExportKind = "diffusers",
    history: History | None = None,
) -> str:
    """The text of the file. ``picture``: name of an image in the same folder."""
    name = _text(Path(config.model.path).name)
    sections = [
        _front_matter(model, config, kind),
        f"# {name}, fine-tuned on {count_of(len(config.trained_rewards), 'reward')}",
        f"{'The whole pipeline' if kind == 'merged' else f'A LoRA for {name}'}, trained with marble "
        f"({_code(f'balance: {config.balance.type}')}, {count_of(step or 0, 'step')}, {weights} weights).",
        *([f"![before and after, same prompts and seeds]({picture})"] if picture else []),
        "## Use",
        *_use(model, config, kind),
        "## Rewards",
        "\n".join(f"- {_reward(reward)}" for reward in config.rewards),
        *(["## Scores", scores_table(evaluation, weights)] if evaluation else []),
        "## Training",
        "\n".join([_training(config), *([] if history is None else [f"- {_text(history.software)}"])]),
        *_changes(history),
        "Prompts:",
        "\n".join(f"- {_source(source)}" for source in config.prompts.train),
        "Every setting is in `training_config.yaml`; paths in it are those of the machine it was trained on.",
    ]
    return "\n\n".join(sections) + "\n"


def _text(value: str) -> str:
    """A name as Markdown shows it. Names of folders and files may hold anything, HTML and lines of their own too."""
    return html.escape(MARKUP.sub(r"\\\g<0>", " ".join(value.split())), quote=False)


def _code(value: str) -> str:
    """A name between backticks, within which nothing can be escaped."""
    return f"`{' '.join(value.replace('`', ' ').split())}`"


def _literal(value: str) -> str:
    """A string of Python, on one line."""
    return json.dumps(value, ensure_ascii=False)


def _changes(history: History | None) -> list[str]:
    if history is None or not history.changes:
        return []
    return [
        "The settings above are those of the last start. The run was resumed with other settings than before:",
        "\n".join(f"- {_text(change)}" for change in history.changes),
    ]


def _front_matter(model: DiffusionModel, config: RunConfig, kind: ExportKind) -> str:
    merged = kind == "merged"
    library = "diffusers" if merged else kind
    on_hub = config.model.path.count("/") == 1
    task = "text-to-video" if model.makes_videos else "text-to-image"
    facts = {
        "base_model": config.model.path if on_hub else Path(config.model.path).name,
        "base_model_relation": "finetune" if merged else "adapter",
        **({"library_name": library} if library == "diffusers" else {}),
        "pipeline_tag": task,
        "tags": [task, library, *([] if merged else ["lora"]), "reinforcement-learning", "multi-reward", "marble"],
    }
    to_do = ["# license: yours to choose; it has to go with that of the base model"]
    if not on_hub:
        to_do.append("# base_model: trained from a folder; put the hub id of the model here")
    return "\n".join(["---", yaml.safe_dump(facts, sort_keys=False).rstrip(), *to_do, "---"])


def _use(model: DiffusionModel, config: RunConfig, kind: ExportKind) -> list[str]:
    strength = "at strength 1. Leave classifier-free guidance off (cfg 1): the model was trained without it."
    parts = list(adapted_parts(model.transformer, config.lora.experts))
    files = " and ".join(f"`{lora_name(part)}`" for part in parts)
    loaded = "it" if parts == [""] else "each onto the model of its name,"
    if kind == "comfyui":
        return [f"Copy {files} into ComfyUI's `models/loras`, and load {loaded} with `LoraLoaderModelOnly` {strength}"]
    if kind == "kohya":
        return [f"Names as in kohya's scripts, with alpha tensors: {files}. Load {loaded} {strength}"]
    code = _plain_code(model, config, None if kind == "merged" else parts)
    return ["Call it as it was trained, without classifier-free guidance:", f"```python\n{code}```"]


def _plain_code(model: DiffusionModel, config: RunConfig, adapted: list[str] | None) -> str:
    """``adapted``: the parts of the transformer that have a LoRA; None for a merged pipeline."""
    pipeline, arguments = model.plain_call()
    size = {"height": config.rollout.height, "width": config.rollout.width, "num_frames": config.rollout.frames}
    given = {"num_inference_steps": config.evaluation.steps, **arguments}
    given |= {name: value for name, value in size.items() if value is not None}
    call = ", ".join(['"a prompt"', *(f"{name}={value}" for name, value in given.items())])
    sample, samples = ("video", "frames") if model.makes_videos else ("image", "images")
    folder = '"THIS_FOLDER"'
    source = folder if adapted is None else _literal(embedded(config.model.path, PIPELINE))
    # Not float16, in which many autoencoders overflow; training keeps them in float32.
    dtype = "float32" if config.model.dtype == "float32" else "bfloat16"
    lines = [
        "import torch",
        f"from diffusers import {pipeline}",
        "",
        'device = "cuda" if torch.cuda.is_available() else "cpu"  # or "mps", "xpu", ...',
        f"pipe = {pipeline}.from_pretrained({source}, dtype=torch.{dtype})",
        "pipe.to(device)",
        *(f"pipe.load_lora_weights({_loading(folder, part)})" for part in adapted or []),
    ]
    return "\n".join([*lines, f"{sample} = pipe({call}).{samples}[0]"]) + "\n"


def _loading(folder: str, part: str) -> str:
    """Arguments of `load_lora_weights`."""
    given = {"weight_name": lora_name(part), **LOADED_WITH.get(part, {})} if part else {}
    named = [f"{name}={_literal(value) if isinstance(value, str) else value}" for name, value in given.items()]
    return ", ".join([folder, *named])


def _reward(reward: RewardConfig) -> str:
    inner = reward.params.get("reward")
    of = f" of {_text(str(inner['type']))}" if isinstance(inner, dict) and "type" in inner else ""
    return f"{reward.name} ({_code(reward.type)}{of})" + (
        ", evaluation-only: never trained on" if reward.held_out else ""
    )


def scores_table(scores: Scores, weights: str) -> str:
    """Table of mean scores before and after; with intervals if the evaluation compared exactly these two."""
    before, after = (scores.weights[name].means for name in (BASE, weights))
    differences = scores.differences if (scores.before, scores.after) == (BASE, weights) else {}
    rows = ["| reward | before | after | difference | 95 % interval |", "|---|---|---|---|---|"]
    for name in {**before, **after}:
        compared = differences.get(name)
        interval = f"{compared.low:+.4f} to {compared.high:+.4f}" if compared else ""
        mark = "*" if name in scores.held_out_rewards else ""
        difference = f"{after[name] - before[name]:+.4f}" if name in before and name in after else ""
        means = [f"{of[name]:.4f}" if name in of else "" for of in (before, after)]
        rows.append(f"| {_text(name)}{mark} | {means[0]} | {means[1]} | {difference} | {interval} |")
    count = f"{count_of(len(scores.images), 'sample')} of {count_of(scores.prompts, 'prompt')}"
    rows += ["", f"Mean over {count}, with the same seeds before and after."]
    rows += ["", "\\* evaluation-only: never trained on"] if scores.held_out_rewards else []
    return "\n".join(rows)


def _training(config: RunConfig) -> str:
    rollout, size = config.rollout, [config.rollout.width, config.rollout.height]
    shape = f", {size[0]} x {size[1]} pixels" if None not in size else ""
    shape += f", {count_of(rollout.frames, 'frame')}" if rollout.frames else ""
    started = f", started from {_text(config.lora.init.name)}" if config.lora.init else ""
    only = "" if config.lora.experts == "both" else f" of the {config.lora.experts}-noise transformer only"
    return "\n".join(
        [
            f"- LoRA{only} of rank {config.lora.rank}, alpha {config.lora.alpha:g}{started}",
            f"- {count_of(rollout.groups, 'prompt')} x {rollout.group_size} samples a rollout{shape}, "
            f"{count_of(rollout.steps, 'sampling step')} ({rollout.solver})",
            f"- AdamW, learning rate {config.optimizer.lr:g}, KL weight {config.loss.kl_weight:g}, "
            f"seed {config.trainer.seed}",
        ]
    )


def _source(source: PromptSourceConfig) -> str:
    if source.generate is not None:
        origin = f"{count_of(source.generate.count, 'generated prompt')} (`type: {source.generate.type}`)"
    elif source.file is not None:
        origin = _code(source.file.name)
    else:
        origin = f"{count_of(len(source.texts or []), 'prompt')} of the config"
    return f"{source.name}: {origin}, share {source.share:g}"
