"""`marble rewards list`, `check` and `serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marble_rl.cli.shared import (
    AsJson,
    Command,
    ConfigPath,
    Device,
    Group,
    Overrides,
    print_json,
    quiet_libraries,
    serve_extra,
)
from marble_rl.errors import count_of

if TYPE_CHECKING:
    from marble_rl.config.run import RunConfig
    from marble_rl.rewards.core.settings import RewardConfig

app = typer.Typer(cls=Group, help="Rewards that can be trained on.", no_args_is_help=True)


@app.command("list", cls=Command, epilog="Example: marble rewards list")
def rewards_list(as_json: AsJson = False) -> None:
    """List the built-in rewards. Any `package.module:name` works too."""
    from marble_rl.rewards.core.registry import describe_built_in

    described = describe_built_in()
    if as_json:
        print_json(described)
    else:
        for name, text in described.items():
            typer.echo(f"{name:24}{text}")


@app.command("check", cls=Command, epilog="Example: marble rewards check mini --only ocr --image sign.png")
def rewards_check(
    config: ConfigPath,
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Check this reward; may be repeated. Default: all.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Picture to score; may be repeated. Default: built-in test pictures."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Its prompt. Default: the first that a reward applies to.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score different pictures with each reward of CONFIG: scores, latency, memory, finite, deterministic, constant.

    CONFIG may be a run's config, or have a `rewards` section only. Every reward is loaded and called as in training.
    Exit code 1 if one of them fails.
    """
    from dataclasses import asdict

    from marble_rl.config import load_scoring_config

    settings = load_scoring_config(config, overrides or [])
    configs = _chosen_rewards(settings, only)
    quiet_libraries()
    from rich.console import Console

    from marble_rl.devices import pick_device
    from marble_rl.prompts import load_prompts
    from marble_rl.rewards.core.check_command import ChecksFailed, check_reward, print_checks, read_picture
    from marble_rl.rewards.core.registry import build_rewards
    from marble_rl.rewards.core.scoring import Scorer
    from marble_rl.types import Prompt

    given = [] if prompt is None else [Prompt(0, prompt, "given")]
    sources = settings.prompts.train
    known = given or (load_prompts(sources, "prompts.train").prompts if sources else [])
    pictures = [read_picture(path) for path in image or []]
    chosen = pick_device(device, "--device")
    scorer = Scorer(configs, build_rewards(configs))
    with Console(stderr=True).status("checking rewards"):
        checks = [check_reward(scorer[name], chosen, known, pictures) for name in scorer.names]
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        print_checks(checks, {name: scorer[name].traits for name in scorer.names}, Console())
    failed = [check.name for check in checks if check.error is not None]
    if failed:
        raise ChecksFailed(f"{len(failed)} of {count_of(len(checks), 'reward')} failed: {', '.join(failed)}")


@app.command("serve", cls=Command, epilog="Example: marble rewards serve mini --only pickscore --only hpsv2")
def rewards_serve(
    config: ConfigPath,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on. 127.0.0.1: this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Serve this reward; may be repeated. Default: all.")
    ] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request, in MiB.")] = 256,
    max_batch: Annotated[int, typer.Option(min=1, help="Most images in a request.")] = 512,
    device: Device = "auto",
) -> None:
    """Serve the rewards of CONFIG over HTTP, for `type: remote` in another config.

    CONFIG may be a run's config, or have a `rewards` section only. To serve on an address that other machines can
    reach, set MARBLE_REWARDS_TOKEN here and where you train. Ctrl-C and SIGTERM finish open requests first.
    """
    from marble_rl.config import load_scoring_config

    configs = _chosen_rewards(load_scoring_config(config, overrides or []), only)
    from marble_rl.devices import pick_device

    with serve_extra("rewards serve"):
        from marble_rl.rewards.remote.server import Limits, serve

    serve(
        configs,
        host=host,
        port=port,
        limits=Limits(max_body_mb << 20, max_batch),
        device=pick_device(device, "--device"),
        notice=typer.echo,
    )


def _chosen_rewards(settings: RunConfig, only: list[str] | None) -> list[RewardConfig]:
    from marble_rl.errors import require_name

    for name in only or []:
        require_name(name, [entry.name for entry in settings.rewards], "--only")
    return [entry for entry in settings.rewards if not only or entry.name in only]
