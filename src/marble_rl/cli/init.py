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
    typer.echo(
        f"\nEdit {files[0]}, then:\n\n  marble config check {files[0]}\n  marble rewards check {files[0]}\n"
        f"  marble train {files[0]}"
    )
