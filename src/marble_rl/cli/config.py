"""`marble config show` and `check`."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marble_rl.cli.shared import AsJson, Command, ConfigPath, Group, Overrides, print_json, quiet_libraries, size_text
from marble_rl.errors import InputError, count_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from marble_rl.config.run import RunConfig
    from marble_rl.runs.plan import Plan, Source

app = typer.Typer(cls=Group, help="Look at a config before running it.", no_args_is_help=True)


@app.command("show", cls=Command, epilog="Example: marble config show mini-demo --set trainer.steps=5")
def config_show(
    config: ConfigPath,
    overrides: Overrides = None,
    estimate: Annotated[
        bool | None,
        typer.Option(help="Memory that the run needs, from the model's configs. Default: yes, with --json no."),
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="Estimate for this device: cpu, cuda, ... Default: the config's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the resolved config, defaults included, and an estimate of its memory as comments at the end."""
    from marble_rl.config import dump_config, load_config, to_yaml

    run = load_config(config, overrides or [])
    if not as_json:
        typer.echo(to_yaml(run), nl=False)
        if estimate is not False:
            for line in _estimated(run, on)[1]:
                typer.echo(f"# {line}".rstrip())
    elif estimate:
        print_json({"config": json.loads(dump_config(run)), "estimate": _estimated(run, on)[0]})
    else:
        typer.echo(dump_config(run), nl=False)


def _estimated(run: RunConfig, on: str | None) -> tuple[dict[str, Any] | None, list[str]]:
    """The estimate as JSON and as lines of text; a model that cannot be reached is not an error."""
    quiet_libraries()
    from marble_rl.devices import parse_device, pick_device
    from marble_rl.memory.estimate import describe, estimate_run

    asked = None if on in (None, "auto") else parse_device(on, "--on")
    try:
        device = asked or pick_device(run.model.device)
        estimated = estimate_run(run, device)
    except InputError as error:
        return None, [f"Memory: no estimate. {error}"]
    return estimated.to_json(), describe(estimated, run, device)


@app.command("check", cls=Command, epilog="Example: marble config check mini-demo")
def config_check(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a config, its prompts and its rewards, without loading a model."""
    from marble_rl.config import load_config

    run = load_config(config, overrides or [])
    from marble_rl.runs.inputs import check_inputs
    from marble_rl.runs.plan import plan, prompt_remarks
    from marble_rl.runs.trackers import check_trackers

    inputs = check_inputs(run)
    check_trackers(run.logging.trackers)
    planned = plan(run, inputs)
    remarks = [*inputs.remarks, *prompt_remarks(planned, run, inputs)]
    if as_json:
        facts = {
            "rewards": list(run.trained_rewards),
            "balance": run.balance.type,
            "prompts": {name: len(prompts) for name, prompts in inputs.train.sources.items()},
            "images_per_rollout": planned.images,
            "steps": run.trainer.steps,
            "plan": planned.to_json(),
            "remarks": remarks,
        }
        print_json(facts)
    else:
        typer.echo(f"{config}: ok. {run.balance.type} on {', '.join(run.trained_rewards)}")
        print_plan(planned, run, config)
        for remark in remarks:
            typer.echo(f"warning: {remark}")


def print_plan(planned: Plan, run: RunConfig, config: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from marble_rl.runs.plan import cost

    splits = list(dict.fromkeys(source.split for source in planned.sources))
    names = list(dict.fromkeys(source.name for source in planned.sources))
    by_place = {(source.name, source.split): source for source in planned.sources}

    def row(label: str, shown: Callable[[Source], str]) -> None:
        """One cell for each source: of its training prompts / of its held-out prompts."""
        cells = [
            [shown(by_place[name, split]) if (name, split) in by_place else "" for split in splits] for name in names
        ]
        table.add_row(label, *(one[0] if len(set(one)) == 1 else " / ".join(one) for one in cells))

    table = Table(box=SIMPLE_HEAD)
    table.add_column("train / held out" if len(splits) > 1 else "", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    row("prompts", lambda source: f"{source.prompts:,}")
    row("groups a rollout", lambda source: _count(source.groups))
    if planned.text_limit is not None:
        row(f"over {planned.text_limit} tokens", lambda source: _count(source.too_long))
    table.add_section()
    for reward in run.rewards:
        label = f"{reward.name}*" if reward.held_out else reward.name
        row(label, partial(_applies, reward.name))
    Console().print(table)
    typer.echo("Prompts that each reward applies to. * evaluation only")
    if planned.text_limit is None:
        typer.echo(f"Prompts: not checked for their length; the tokenizer of {run.model.path} is not on this machine.")
    for line in cost(planned):
        typer.echo(line)
    if planned.seconds is None:
        typer.echo("Time: no run in runs/ has these settings; the first steps of a run will tell.")
    if planned.model is None:
        typer.echo(
            f"Disk and memory: the model is not on this machine; marble config show {config} fetches its configs."
        )
    else:
        typer.echo(
            f"Disk: {size_text(planned.model.disk)} for {count_of(run.trainer.keep_checkpoints, 'checkpoint')} and the "
            f"LoRA. Memory: at least {size_text(planned.model.memory)} for weights, adapters and gradients; marble "
            f"config show {config} estimates all of it."
        )


def _count(count: int | None) -> str:
    return f"{count:,}" if count else "-"


def _applies(reward: str, source: Source) -> str:
    count = source.rewards.get(reward, 0)
    return "all" if count == source.prompts else _count(count)
