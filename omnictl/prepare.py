"""Everything about `up` that can be refused before anything is fetched or started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omnictl import installed, ports
from omnictl.api_keys import read_api_keys
from omnictl.launch import Wanted
from omnictl.state import check_name

if TYPE_CHECKING:
    from omnictl.hardware import Hardware
    from omnictl.recipe import Recipe
    from runtime.plan import Plan


@dataclass(frozen=True, slots=True)
class Options:
    """What was typed after `up`."""

    recipe: str
    overrides: Sequence[str]
    tiny: bool
    gpus: int | None
    host: str
    port: int | None
    name: str | None
    api_key_file: Path | None


@dataclass(frozen=True, slots=True)
class Prepared:
    recipe: Recipe
    machine: Hardware
    plan: Plan
    wanted: Wanted


def prepare(options: Options) -> Prepared:
    """Check the recipe, its placement on this machine, the installed packages, the name and the address."""
    from omnictl.hardware import probe
    from omnictl.placement import make_plan
    from omnictl.recipe import load_recipe

    api_keys = read_api_keys(options.api_key_file)
    ports.check_host(options.host, has_api_key=bool(api_keys.keys))
    recipe = load_recipe(options.recipe, overrides=options.overrides, tiny=options.tiny)
    machine = probe()
    plan = make_plan(recipe, machine, gpus=options.gpus)
    installed.require_imports(recipe.name, recipe.omnictl.imports)
    wanted = Wanted(
        name=check_name(options.name or plan.name),
        plan_json=plan.model_dump_json(indent=2),
        model=plan.model_id,
        model_names=plan.served_names,
        host=options.host,
        port=options.port,
        api_keys=api_keys,
    )
    return Prepared(recipe, machine, plan, wanted)
