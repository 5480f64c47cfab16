"""`omnictl plan`: what a recipe would become on some hardware, before anything is fetched or started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from omnictl import output

if TYPE_CHECKING:
    from omnictl.hardware import Hardware
    from omnictl.recipe import Recipe
    from runtime.plan import Plan


def command(
    name: Annotated[str, typer.Argument(help="Short name, model id or file of a recipe.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value; may be repeated.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny build with random weights, to rehearse with.")] = False,
    gpus: Annotated[int | None, typer.Option(min=0, help="Use so many GPUs; 0 for the CPU alone.")] = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="Plan for other hardware, such as cpu-2x24 or h100x2.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every value and where it came from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as one JSON document.")] = False,
) -> None:
    """Place a recipe on this machine, or on other hardware, and show the result."""
    from omnictl.hardware import choose_hardware
    from omnictl.placement import make_plan
    from omnictl.recipe import load_recipe

    recipe = load_recipe(name, overrides=set_ or (), tiny=tiny)
    machine = choose_hardware(hardware, gpus)
    for finding in machine.findings:
        output.note(f"{finding.level}: {finding.subject}: {finding.text}")
    plan = make_plan(recipe, machine, gpus=gpus)
    if as_json:
        output.print_json(plan.model_dump(mode="json"))
    elif explain:
        _print_sources(plan)
    else:
        print_plan(recipe, machine, plan)


def _print_sources(plan: Plan) -> None:
    from omnictl.explain import explain

    output.print_table(("key", "value", "source"), explain(plan))


def print_plan(recipe: Recipe, machine: Hardware, plan: Plan) -> None:
    output.print_facts(
        {
            "recipe": f"{recipe.path} (found by {recipe.matched})",
            "hardware": machine.describe(),
            "placement": f"{plan.placement} ({plan.provenance['placement']})",
            "support": _support(recipe, machine, plan),
        }
    )
    for columns, rows in (_stage_table(plan), _edge_table(plan), _device_table(plan, machine)):
        output.write("\n")
        output.print_table(columns, rows)


def _support(recipe: Recipe, machine: Hardware, plan: Plan) -> str:
    devices = {device for process in plan.processes for device in process.devices}
    kinds = sorted({gpu.kind for gpu in machine.gpus if gpu.device in devices} or {"cpu"})
    return ", ".join(f"{kind}: {recipe.meta.hardware.get(kind, 'not tried by anyone yet')}" for kind in kinds)


def _stage_table(plan: Plan) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    from omnictl.units import format_bytes

    columns = ("stage", "engine", "dtype", "process", "devices", "threads", "slots", "weights", "cache", "activation")
    rows: list[tuple[object, ...]] = []
    for process in plan.processes:
        for replica in process.replicas:
            stage = plan.stage(replica.stage)
            memory = (stage.memory.weights_bytes, stage.memory.cache_bytes, stage.memory.activation_bytes)
            rows.append(
                (
                    stage.name if stage.replicas == 1 else f"{stage.name}.{replica.index}",
                    stage.engine,
                    stage.engine_settings.get("dtype", "-"),
                    process.name,
                    " ".join(process.devices),
                    process.num_threads,
                    stage.slots,
                    *map(format_bytes, memory),
                )
            )
    return columns, rows


def _edge_table(plan: Plan) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    from omnictl.units import format_bytes

    rows: list[tuple[object, ...]] = [
        (edge.name, edge.payload, edge.mode, edge.connector, format_bytes(edge.capacity_bytes)) for edge in plan.edges
    ]
    return ("edge", "payload", "mode", "connector", "capacity"), rows


def _device_table(plan: Plan, machine: Hardware) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    from omnictl.budget import device_budgets
    from omnictl.units import format_bytes

    rows: list[tuple[object, ...]] = [
        (
            budget.device,
            format_bytes(budget.needed_bytes),
            format_bytes(budget.free_bytes),
            format_bytes(budget.free_bytes - budget.needed_bytes),
        )
        for budget in device_budgets(plan, machine)
    ]
    return ("device", "needed", "free", "left"), rows
