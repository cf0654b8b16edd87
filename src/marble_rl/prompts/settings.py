"""Settings of prompt sources and generators."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from marble_rl.section import FilePath, Fraction, Name, Section

WordCount = Annotated[int, Field(ge=1, le=16)]


class GeneratedPromptsConfig(Section):
    """What all generators have in common."""

    count: Annotated[int, Field(ge=1, le=1_000_000)]
    """How many prompts. The first of them are the same whatever the count; no prompt comes twice."""
    seed: int = 0
    """Another seed gives other prompts, or the same ones in another order."""
    part: Literal["train", "heldout", "all"] | None = None
    """A fifth of what can be asked for is held out, the same fifth for every seed. null takes the part named like the
    list that the source is in, so that `prompts.train` and `prompts.heldout` never overlap."""
    exclude: FilePath | None = None
    """Prompt file or dataset folder: nothing that its prompts (in a folder, the test prompts) ask for is asked for
    here, in whatever words. Relative to the config file."""


class GenevalPromptsConfig(GeneratedPromptsConfig):
    """Prompts of GenEval's six tasks over COCO's 80 objects, with the metadata that the `geneval` reward checks."""

    type: Literal["geneval"]
    tasks: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None
    """Weights by task: `single_object`, `two_object`, `counting`, `colors`, `position`, `color_attr`. A task that is
    not named gets none. null takes flow_grpo's training mix: position 7, counting 5, color_attr 3, colors 1,
    two_object 1."""


class OcrPromptsConfig(GeneratedPromptsConfig):
    """Prompts for pictures with writing, with the `target` that the `ocr` and `tesseract` rewards read."""

    type: Literal["ocr"]
    words: tuple[WordCount, WordCount] = (1, 4)
    """Least and most words to be written, up to 16; every number between them is as frequent."""
    numbers: Fraction = 0.2
    """Share of the texts that end with a number, from 1 to 999."""


class PromptSourceConfig(Section):
    """Some prompts. Give exactly one of `file`, `texts` and `generate`."""

    name: Name
    """Name of the source, in logs and tables."""
    file: FilePath | None = None
    """`.txt` (one prompt a line), `.jsonl` (`prompt`, any metadata, optionally `rewards`: the names that apply), `.csv`
    or `.tsv` (a column `prompt`), or a folder with such a file for `train` and one for `test`. Relative to the config
    file."""
    texts: list[str] | None = None
    """The prompts themselves."""
    generate: Annotated[GenevalPromptsConfig | OcrPromptsConfig, Field(discriminator="type")] | None = None
    """Prompts made by rule: `type: geneval` or `type: ocr`."""
    rewards: list[str] | None = None
    """Rewards that apply to these prompts; null leaves it to each reward."""
    share: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Relative number of prompt groups in every rollout."""


class PromptsConfig(Section):
    """What to draw, and what to evaluate on."""

    train: list[PromptSourceConfig]
    """Sources mixed in every rollout."""
    heldout: list[PromptSourceConfig] | None = None
    """Sources for evaluation; null evaluates on the training prompts."""
    validation: list[PromptSourceConfig] | None = None
    """Sources for evaluations during training (`trainer.eval_every`), on which the best checkpoint is chosen
    (docs/runs.md). They may not repeat the held-out prompts; generated ones leave those out by themselves. null
    evaluates on the held-out prompts during training, and chooses no checkpoint."""
