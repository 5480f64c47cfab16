"""Places a recipe on hardware: `make_plan` computes the plan with every value final, or says all that is in the way.

Pure: no probing, no files, no clock. What `auto` stands for is decided below here (`assembly`, `stage_values`) and is
visible in the plan, never inside an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omnictl import graph
from omnictl.attempt import Attempt, attempt
from omnictl.budget import CPU
from omnictl.hardware import Hardware, limit_gpus
from omnictl.recipe import Recipe
from omnictl.remedies import suggest
from omnictl.schema import nearest
from runtime.errors import PlanError
from runtime.plan import Plan


def make_plan(recipe: Recipe, hardware: Hardware, *, gpus: int | None = None) -> Plan:
    """Place a recipe. `gpus`: how many GPUs to use, 0 for none; unset for whatever fits.

    Raises PlanError with every problem, and in its hint the nearest change that fits.
    """
    problems = graph.find_problems(recipe)
    names, found = choose_placements(recipe, hardware, gpus)
    attempts = [attempt(recipe, limit_gpus(hardware, gpus), name) for name in names]
    problems += [*found, *_idle_gpus(attempts, gpus)]
    for candidate in attempts:
        if not problems and not candidate.problems:
            reason = _why(recipe, hardware, candidate.placement)
            if candidate is not attempts[0]:
                reason += f"; {attempts[0].problems[0]}"
            plan = candidate.plan
            return plan.model_copy(update={"provenance": {"placement": reason, **plan.provenance}})
    if not all(candidate.problems for candidate in attempts):
        raise PlanError(f"recipe {recipe.name} cannot be planned", problems=tuple(problems))
    problems += [problem for candidate in attempts for problem in candidate.problems]
    if any(candidate.short for candidate in attempts):
        hint = suggest(recipe, hardware, gpus, attempts)
        raise PlanError(f"recipe {recipe.name} does not fit {hardware.name}", problems=tuple(problems), hint=hint)
    raise PlanError(f"recipe {recipe.name} cannot be planned", problems=tuple(problems))


def choose_placements(recipe: Recipe, hardware: Hardware, gpus: int | None) -> tuple[list[str], list[str]]:
    """Names of the placements to try in order, those with GPUs first, and what is wrong with the wishes."""
    placements, problems = recipe.omnictl.placements, []
    if gpus is not None and gpus > len(hardware.gpus):
        problems.append(f"--gpus {gpus}: {hardware.name} has {len(hardware.gpus)} that can be used")
    wanted = recipe.omnictl.placement
    if wanted is not None and wanted not in placements:
        return [], [*problems, f"placement: unknown placement {wanted!r}{nearest(wanted, placements)}"]
    names = [wanted] if wanted is not None else sorted(placements, key=lambda name: not placements[name].uses_gpus)
    if gpus is not None:
        names = [name for name in names if placements[name].uses_gpus == (gpus > 0)]
    elif wanted is None and not hardware.gpus:
        names = [name for name in names if not placements[name].uses_gpus]
    if not names and gpus is None:
        problems.append(f"every placement needs a GPU; {hardware.name} has none that can be used")
    elif not names:
        known = ", ".join(f"{name} ({'GPU' if p.uses_gpus else 'CPU'})" for name, p in placements.items())
        where = f"placement {wanted}" if wanted is not None else "the recipe"
        problems.append(f"--gpus {gpus}: {where} cannot honour it; placements: {known}")
    return names, problems


def _idle_gpus(attempts: Sequence[Attempt], gpus: int | None) -> Iterator[str]:
    """A wish for more GPUs than any placement can use is not honoured in silence."""
    used = [{d for process in a.plan.processes for d in process.devices if d != CPU} for a in attempts]
    most = max(map(len, used), default=0)
    if attempts and gpus and most < gpus:
        yield f"--gpus {gpus}: the recipe's processes use {most} at most; ask for {most}, or for more replicas"


def _why(recipe: Recipe, hardware: Hardware, chosen: str) -> str:
    """Where the choice of the placement came from, and that GPUs stay unused when they do."""
    if recipe.omnictl.placement is not None:
        reason = recipe.placed[chosen].source("placement")
    else:
        reason = "the only one" if len(recipe.omnictl.placements) == 1 else "the first that fits"
    unused = hardware.gpus and not recipe.omnictl.placements[chosen].uses_gpus
    return f"{reason}; it uses no GPU" if unused else reason
