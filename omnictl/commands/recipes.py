"""`omnictl recipes`: what can be served, what is in a recipe, and whether a recipe is sound."""

from __future__ import annotations

import typer

from omnictl import output

app = typer.Typer(help="List, show and validate recipes.", no_args_is_help=True)


@app.command("list")
def list_command() -> None:
    """Every recipe that can be served by name."""
    from omnictl.recipe import find_recipes

    output.print_table(["name"], [[entry.name] for entry in find_recipes()])
