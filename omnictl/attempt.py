"""A recipe on one of its placements and some hardware: the plan, and everything that keeps it from being served.

Pure. `placement` tries the recipe's placements with it, `remedies` tries changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from omnictl.assembly import assemble
from omnictl.budget import CPU, DeviceBudget, device_budgets
from omnictl.hardware import Hardware
from omnictl.recipe import Recipe
from runtime.plan import Plan


@dataclass(frozen=True, slots=True)
class Attempt:
    placement: str
    plan: Plan
    problems: tuple[str, ...]
    """All of them, those of memory included."""
    short: tuple[DeviceBudget, ...]
    """The devices that have too little free memory."""


def attempt(recipe: Recipe, hardware: Hardware, placement: str) -> Attempt:
    """Put the plan together and sum up."""
    plan, problems = assemble(recipe, placement, hardware)
    problems += _support_problems(recipe, plan, hardware)
    short = tuple(budget for budget in device_budgets(plan, hardware) if budget.shortfall_bytes)
    # sums say little where the placement is for more GPUs
    problems += _number_problems(recipe, placement, hardware) or [budget.describe_shortfall() for budget in short]
    return Attempt(placement, plan, tuple(f"placement {placement}: {problem}" for problem in problems), short)


def _number_problems(recipe: Recipe, placement: str, hardware: Hardware) -> list[str]:
    wanted, found = recipe.placed[placement].values.placements[placement].min_gpus, len(hardware.gpus)
    return [f"for {wanted} GPUs or more; {found} can be used"] if 0 < found < wanted else []


def _support_problems(recipe: Recipe, plan: Plan, hardware: Hardware) -> Iterator[str]:
    devices = {device for process in plan.processes for device in process.devices}
    for kind in sorted({gpu.kind for gpu in hardware.gpus if gpu.device in devices} or {CPU}):
        if recipe.meta.hardware.get(kind) == "unsupported":
            yield f"the recipe is known not to work on {kind} (meta.hardware)"
