"""What would make a recipe fit: the nearest change, tried before it is told. Pure; `placement` calls it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from omnictl.attempt import Attempt, attempt
from omnictl.budget import SHM
from omnictl.hardware import Hardware, limit_gpus
from omnictl.recipe import Recipe
from omnictl.recipe_schema import ArStage
from omnictl.stage_values import least_cache_bytes
from omnictl.units import MIB, format_bytes

Change = tuple[str, Recipe, Hardware, str]
"""What to tell, and the recipe, hardware and placement that it leads to."""


def suggest(recipe: Recipe, hardware: Hardware, gpus: int | None, attempts: Sequence[Attempt]) -> str:
    """The first change after which the recipe fits; else how much memory would have to be free."""
    usable = limit_gpus(hardware, gpus)
    short = [candidate for candidate in attempts if candidate.short]
    for text, changed, machine, placement in (
        *(change for candidate in short for change in _more_gpus(recipe, hardware, gpus, candidate)),
        *(change for candidate in short for change in _smaller_caches(recipe, usable, candidate)),
        *(change for candidate in short for change in _fewer_replicas(recipe, usable, candidate)),
        *_other_placements(recipe, hardware, attempts),
        *_greater_machines(recipe, hardware, short),
    ):
        if not attempt(changed, machine, placement).problems:
            return text
    nearest = min(short, key=lambda candidate: sum(budget.shortfall_bytes for budget in candidate.short))
    return (f"nearest is placement {nearest.placement}: " if len(attempts) > 1 else "") + _free_memory(nearest)


def _other_placements(recipe: Recipe, hardware: Hardware, attempts: Sequence[Attempt]) -> Iterator[Change]:
    tried = {candidate.placement for candidate in attempts}
    for name, placement in recipe.omnictl.placements.items():
        if name not in tried:
            gpus = "" if placement.uses_gpus else " --gpus 0"
            yield f"placement {name} fits: --set placement={name}{gpus}", recipe, hardware, name


def _smaller_caches(recipe: Recipe, hardware: Hardware, candidate: Attempt) -> Iterator[Change]:
    """One stage's cache made smaller by what is short, as long as one request of full length still fits in it."""
    missing_bytes = max(budget.shortfall_bytes for budget in candidate.short)
    for stage_plan in candidate.plan.stages:
        stage = recipe.placed[candidate.placement].values.stages[stage_plan.name]
        if not isinstance(stage, ArStage):
            continue
        cache_bytes = (stage.cache - missing_bytes) // MIB * MIB
        least_bytes = least_cache_bytes(stage, stage_plan.engine_settings)
        if least_bytes is not None and cache_bytes >= least_bytes:
            changed = _with_stages(recipe, candidate.placement, [stage_plan.name], cache=cache_bytes)
            text = f"a smaller cache fits: --set 'stages.{stage_plan.name}.cache={cache_bytes // MIB} MiB'"
            yield text, changed, hardware, candidate.placement


def _fewer_replicas(recipe: Recipe, hardware: Hardware, candidate: Attempt) -> Iterator[Change]:
    """The stages of one process cut to fewer copies, to as many as fit."""
    name = candidate.placement
    values = recipe.placed[name].values
    for process in values.placements[name].processes.values():
        stages = [stage for stage in process.stages if stage in values.stages]
        most = max((values.stages[stage].replicas for stage in stages), default=1)
        fewer = [_with_stages(recipe, name, stages, replicas=count) for count in range(1, most)]
        num_fitting = bisect_right(fewer, False, key=lambda changed: bool(attempt(changed, hardware, name).problems))
        if num_fitting:
            words = " ".join(f"--set stages.{stage}.replicas={num_fitting}" for stage in stages)
            yield f"fewer replicas fit: {words}", fewer[num_fitting - 1], hardware, name


def _more_gpus(recipe: Recipe, hardware: Hardware, gpus: int | None, candidate: Attempt) -> Iterator[Change]:
    """Those that are there and that `--gpus` left out."""
    for count in range((len(hardware.gpus) if gpus is None else gpus) + 1, len(hardware.gpus) + 1):
        yield f"more GPUs fit: --gpus {count}", recipe, limit_gpus(hardware, count), candidate.placement


def _greater_machines(recipe: Recipe, hardware: Hardware, short: Sequence[Attempt]) -> Iterator[Change]:
    """The same GPU more often, as few as will do."""
    for count in (count for count in (2, 4, 8) if hardware.gpus and count > len(hardware.gpus)):
        more = tuple(replace(hardware.gpus[0], index=index) for index in range(count))
        for candidate in short:
            text = f"{count} GPUs like {more[0].name} would fit, with placement {candidate.placement}"
            yield text, recipe, replace(hardware, gpus=more), candidate.placement


def _free_memory(candidate: Attempt) -> str:
    parts = []
    for budget in candidate.short:
        in_use_bytes = budget.total_bytes - budget.free_bytes
        if budget.device == SHM:
            advice = "a larger /dev/shm (in a container: --shm-size), or another OMNICTL_SHM_DIR"
        elif budget.total_bytes >= budget.needed_bytes:
            advice = f"end other programs, which use {format_bytes(in_use_bytes)}"
        else:
            advice = f"there are {format_bytes(budget.total_bytes)} in all; use a larger machine"
        parts.append(f"{budget.device} needs {format_bytes(budget.needed_bytes)} free: {advice}")
    return "; ".join(parts)


def _with_stages(recipe: Recipe, placement: str, names: Sequence[str], **values: Any) -> Recipe:
    """The recipe with values of some stages changed where this placement is used."""
    placed = recipe.placed[placement]
    changes = {name: placed.values.stages[name].model_copy(update=values) for name in names}
    changed = placed.values.model_copy(update={"stages": placed.values.stages | changes})
    return replace(recipe, placed={**recipe.placed, placement: replace(placed, values=changed)})
