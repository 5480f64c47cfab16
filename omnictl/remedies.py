"""What would make a recipe fit: the nearest change, tried before it is told. Pure; `placement` calls it."""

from __future__ import annotations

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
        *_other_placements(recipe, hardware, attempts),
        *(change for candidate in short for change in _smaller_caches(recipe, usable, candidate)),
        *(change for candidate in short for change in _fewer_replicas(recipe, usable, candidate)),
        *(change for candidate in short for change in _more_gpus(recipe, hardware, gpus, candidate)),
    ):
        if not attempt(changed, machine, placement).problems:
            return text
    return _free_memory(short[0])


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
        num_devices = len(_devices_of(candidate, stage_plan.name))
        cache_bytes = (stage.cache - missing_bytes * num_devices) // MIB * MIB
        least_bytes = least_cache_bytes(stage, stage_plan.engine_settings)
        if least_bytes is not None and cache_bytes >= least_bytes:
            size = format_bytes(cache_bytes)
            changed = _with_stage(recipe, candidate.placement, stage_plan.name, cache=cache_bytes)
            text = f"a smaller cache fits: --set 'stages.{stage_plan.name}.cache={size}'"
            yield text, changed, hardware, candidate.placement


def _devices_of(candidate: Attempt, stage: str) -> tuple[str, ...]:
    processes = (p for p in candidate.plan.processes if any(replica.stage == stage for replica in p.replicas))
    return next((process.devices for process in processes), ())


def _fewer_replicas(recipe: Recipe, hardware: Hardware, candidate: Attempt) -> Iterator[Change]:
    """The stages of one process cut to fewer copies, the most that fit first."""
    values = recipe.placed[candidate.placement].values
    for process in values.placements[candidate.placement].processes.values():
        stages = [stage for stage in process.stages if stage in values.stages]
        most = max((values.stages[stage].replicas for stage in stages), default=1)
        for replicas in range(most - 1, 0, -1):
            changed = recipe
            for stage in stages:
                changed = _with_stage(changed, candidate.placement, stage, replicas=replicas)
            words = " ".join(f"--set stages.{stage}.replicas={replicas}" for stage in stages)
            yield f"fewer replicas fit: {words}", changed, hardware, candidate.placement


def _more_gpus(recipe: Recipe, hardware: Hardware, gpus: int | None, candidate: Attempt) -> Iterator[Change]:
    if not recipe.omnictl.placements[candidate.placement].uses_gpus or not hardware.gpus:
        return
    used = len(limit_gpus(hardware, gpus).gpus)
    for count in range(used + 1, len(hardware.gpus) + 1):
        yield f"more GPUs fit: --gpus {count}", recipe, limit_gpus(hardware, count), candidate.placement
    like = hardware.gpus[0]
    for count in (count for count in (2, 4, 8) if count > len(hardware.gpus)):
        more = tuple(replace(like, index=index) for index in range(count))
        text = f"{count} GPUs like {like.name} would fit"
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


def _with_stage(recipe: Recipe, placement: str, stage: str, **values: Any) -> Recipe:
    """The recipe with values of one stage changed where this placement is used."""
    placed = recipe.placed[placement]
    stages = placed.values.stages | {stage: placed.values.stages[stage].model_copy(update=values)}
    changed = replace(placed, values=placed.values.model_copy(update={"stages": stages}))
    return replace(recipe, placed={**recipe.placed, placement: changed})
