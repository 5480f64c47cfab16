"""`omnictl recipes`: what can be served, what is in a recipe, and whether recipes are sound."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from omnictl import output
from runtime.errors import ConfigError, OmniError

app = typer.Typer(help="List, show and validate recipes.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]


@app.command("list")
def list_command(as_json: Json = False) -> None:
    """Every recipe that can be served by name, the user's own first."""
    from omnictl.recipe import find_recipes

    rows = [_summary(str(entry.path)) | {"model_id": entry.model_id} for entry in find_recipes()]
    if as_json:
        output.print_json(rows)
        return
    columns = ("name", "model_id", "title", "tasks", "placements", "problem")
    shown = [column for column in columns if column != "problem" or any(row["problem"] for row in rows)]
    cells = [[" ".join(row[c]) if isinstance(row[c], list) else row[c] for c in shown] for row in rows]
    output.print_table([column.replace("_", " ") for column in shown], cells)


def _summary(path: str) -> dict[str, Any]:
    """One row of the list. A file that cannot be used is shown with its problem instead of hiding the others."""
    from omnictl.recipe import load_recipe

    row: dict[str, Any] = {"name": None, "model_id": None, "title": None, "tasks": [], "placements": []}
    row |= {"path": path, "problem": None}
    try:
        recipe = load_recipe(path)
    except OmniError as error:
        return row | {"problem": error.message}
    values = recipe.omnictl
    return row | {
        "name": recipe.name,
        "title": recipe.meta.title,
        "tasks": list(values.tasks),
        "placements": list(values.placements),
    }


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="Short name, model id or file of a recipe.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value.")] = None,
    as_json: Json = False,
) -> None:
    """A recipe with all overrides and defaults filled in, as YAML."""
    from omnictl.recipe import load_recipe
    from omnictl.yaml_file import dump_yaml

    recipe = load_recipe(name, overrides=set_ or ())
    data = {
        "meta": recipe.meta.model_dump(mode="json"),
        "model": recipe.model.model_dump(mode="json"),
        "omnictl": recipe.omnictl.model_dump(mode="json"),
    }
    if as_json:
        output.print_json(data)
    else:
        output.write(dump_yaml(data))


@app.command("validate")
def validate_command(
    names: Annotated[list[str] | None, typer.Argument(help="Names or files; all recipes when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Check recipes: their schema, their graph and their placements. Fails with every problem found."""
    from omnictl.recipe import find_recipes

    results = {name: _problems(name) for name in names or [str(entry.path) for entry in find_recipes()]}
    if as_json:
        output.print_json([{"recipe": name, "problems": problems} for name, problems in results.items()])
    else:
        for name, problems in results.items():
            output.write(f"{name}: {_verdict(len(problems))}\n")
    found = [problem for problems in results.values() for problem in problems]
    if found:
        raise ConfigError("recipes are not sound", problems=tuple(found))


def _verdict(num_problems: int) -> str:
    if num_problems == 0:
        return "ok"
    return "1 problem" if num_problems == 1 else f"{num_problems} problems"


def _problems(name: str, *, tiny: bool = False) -> list[str]:
    from omnictl.graph import find_problems
    from omnictl.recipe import load_recipe

    try:
        recipe = load_recipe(name, tiny=tiny)
    except OmniError as error:
        return list(error.problems or (error.message,))
    problems = [f"{recipe.path}: {problem}" for problem in find_problems(recipe)]
    if recipe.omnictl.tiny is not None:
        problems += [f"{problem} (--tiny)" for problem in _problems(name, tiny=True) if problem not in problems]
    return problems
