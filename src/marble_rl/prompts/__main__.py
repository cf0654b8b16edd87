"""Write generated prompts to the standard output, one JSON object a line.

python -m marble_rl.prompts geneval --count 100 --seed 0 > prompts.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import ValidationError

from marble_rl.errors import InputError
from marble_rl.prompts.generators import generate
from marble_rl.prompts.settings import GenevalPromptsConfig, OcrPromptsConfig
from marble_rl.section import explain

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Write generated prompts, one JSON object a line.")

Count = Annotated[int, typer.Option(help="How many prompts.")]
Seed = Annotated[int, typer.Option(help="Another seed, another order.")]
Part = Annotated[str, typer.Option(help="train, heldout or all. The first two never overlap, whatever the seeds.")]
Exclude = Annotated[Path | None, typer.Option(help="Prompt file: nothing that it asks for is asked for here.")]


@app.command("geneval")
def write_geneval(
    count: Count,
    seed: Seed = 0,
    part: Part = "train",
    exclude: Exclude = None,
    task: Annotated[
        list[str] | None, typer.Option(help="NAME=WEIGHT, as often as needed. Default: flow_grpo's mix.")
    ] = None,
) -> None:
    """GenEval's tasks over COCO's objects."""
    tasks = None if task is None else dict(_weight(text) for text in task)
    _write(GenevalPromptsConfig, count=count, seed=seed, part=part, exclude=exclude, tasks=tasks)


@app.command("ocr")
def write_ocr(
    count: Count,
    seed: Seed = 0,
    part: Part = "train",
    exclude: Exclude = None,
    words: Annotated[tuple[int, int], typer.Option(help="Least and most words to be written.")] = (1, 4),
    numbers: Annotated[float, typer.Option(help="Share of the texts that end with a number.")] = 0.2,
) -> None:
    """Texts to be written on things."""
    _write(OcrPromptsConfig, count=count, seed=seed, part=part, exclude=exclude, words=words, numbers=numbers)


def _weight(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("=")
    try:
        return name, float(weight)
    except ValueError:
        raise InputError(f"--task {text!r}: expected NAME=WEIGHT, for example --task counting=2") from None


def _write(section: type[GenevalPromptsConfig] | type[OcrPromptsConfig], **settings: Any) -> None:
    """Checked by the same schema as a config's `generate`, under the names of the options."""
    (kind,) = get_args(section.model_fields["type"].annotation)
    try:
        config = section.model_validate({"type": kind, **settings})
    except ValidationError as error:
        raise InputError(explain(error, section, {"type": kind, **settings}, "--")[0]) from None
    for text, metadata, _ in generate(config, config.part or "train", kind):
        typer.echo(json.dumps({"prompt": text, **metadata}))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it with the exit code of errors.py where something is wrong."""
    try:
        app(args=arguments)
    except InputError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
