"""`marble init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Name of a recipe. Without it: list them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path(),
) -> None:
    """Start from a recipe: write its config, its prompts and an example of a reward, ready to edit.

    `marble train RECIPE` trains one as it is, without copying it.
    """
    from marble_rl.config.recipes import copy_recipe, recipes

    if recipe is None:
        for known in recipes().values():
            typer.echo(f"{known.name:17}  {known.trains} (card: {known.card}; hub: {known.hub})")
        typer.echo("\nmarble init RECIPE writes one into this folder. All cards are estimates: docs/recipes.md")
        return
    files = copy_recipe(recipe, out)
    for file in files:
        typer.echo(file)
    name = files[0].name
    there = [f"cd {out}"] if out != Path() else []  # rewards of your own are imported from the current folder
    commands = [*there, f"marble config check {name}", f"marble rewards check {name}", f"marble train {name}"]
    typer.echo("\n  ".join([f"\nEdit {files[0]}, then:\n", *commands]))
