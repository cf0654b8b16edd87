"""`marble config show` and `check`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marble_rl.cli.shared import AsJson, ConfigPath, Overrides, print_json, quiet_libraries
from marble_rl.errors import InputError, count_of

if TYPE_CHECKING:
    from marble_rl.config.run import RunConfig

app = typer.Typer(help="Look at a config before running it.", no_args_is_help=True)


@app.command("show", epilog="Example: marble config show configs/mini-demo.yaml --set trainer.steps=5")
def config_show(
    config: ConfigPath,
    overrides: Overrides = None,
    estimate: Annotated[
        bool | None,
        typer.Option(help="Memory that the run needs, from the model's configs. Default: yes, with --json no."),
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="Estimate for this device: cpu or cuda. Default: the config's.")
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


@app.command("check", epilog="Example: marble config check configs/mini-demo.yaml")
def config_check(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a config, its prompts and its rewards, without loading a model."""
    from marble_rl.config import load_config

    run = load_config(config, overrides or [])
    from marble_rl.runs.inputs import check_inputs
    from marble_rl.runs.trackers import check_trackers

    inputs = check_inputs(run)
    check_trackers(run.logging.trackers)
    images = run.rollout.groups * run.rollout.group_size
    sizes = {name: len(prompts) for name, prompts in inputs.train.sources.items()}
    facts = {
        "rewards": list(run.trained_rewards),
        "balance": run.balance.type,
        "prompts": sizes,
        "images_per_rollout": images,
        "steps": run.trainer.steps,
        "remarks": list(inputs.remarks),
    }
    if as_json:
        print_json(facts)
    else:
        sources = ", ".join(f"{name} ({count})" for name, count in sizes.items())
        typer.echo(
            f"{config}: ok. {run.balance.type} on {', '.join(run.trained_rewards)}; prompts: {sources}; "
            f"{count_of(images, 'image')} a rollout, {count_of(run.trainer.steps, 'step')}"
        )
        for remark in inputs.remarks:
            typer.echo(f"warning: {remark}")
