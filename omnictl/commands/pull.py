"""`omnictl pull`: the weights of a recipe, fetched and checked before anything is started."""

from __future__ import annotations

from typing import Annotated

import typer

from omnictl import output, settings


def command(
    recipe: Annotated[str, typer.Argument(metavar="NAME", help="Short name, model id or file of a recipe.")],
    tiny: Annotated[bool, typer.Option("--tiny", help="Those of its tiny build, which is made here.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of what is there already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Fetch the weights of a recipe, or what is missing of them; repair what is damaged."""
    from omnictl.recipe import load_recipe
    from omnictl.units import format_bytes
    from omnictl.weights import ensure_weights

    loaded = load_recipe(recipe, tiny=tiny)
    states = ensure_weights(loaded, full=verify)
    if as_json:
        entries = [
            {
                "name": state.name,
                "state": state.state,
                "problem": state.problem,
                "folder": str(state.folder),
                "size_bytes": state.size_bytes,
                "license": state.license,
                "source": state.source,
            }
            for state in states
        ]
        output.print_json({"recipe": loaded.name, "weights_dir": str(settings.weights_dir()), "weights": entries})
        return
    rows = [(s.name, s.state, format_bytes(s.size_bytes), s.license, s.source) for s in states]
    output.print_table(("WEIGHTS", "STATE", "SIZE", "LICENSE", "SOURCE"), rows)
    output.note(f"in {settings.weights_dir()}")
