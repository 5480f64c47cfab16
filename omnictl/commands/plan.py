"""`omnictl plan`: what a recipe would become on some hardware, before anything is fetched or started."""

from __future__ import annotations

from typing import Annotated

import typer

from omnictl import output


def command(
    name: Annotated[str, typer.Argument(help="Short name, model id or file of a recipe.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="Use so many GPUs; 0 for the CPU alone.")] = None,
    hardware: Annotated[str | None, typer.Option(metavar="PROFILE", help="Plan for other hardware.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say where every value came from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as one JSON document.")] = False,
) -> None:
    """Place a recipe on this machine's hardware, or on a named profile, and show the result."""
    from omnictl.hardware import choose_hardware
    from omnictl.placement import make_plan
    from omnictl.recipe import load_recipe

    recipe = load_recipe(name, overrides=set_ or ())
    machine = choose_hardware(hardware, gpus)
    plan = make_plan(recipe, machine, gpus=gpus)
    output.print_json(plan.model_dump(mode="json"))
