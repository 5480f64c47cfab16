"""Puts a plan together from a recipe's values on one placement: final stages, processes on devices, edges, and where
every value came from. Pure. `placement` chooses the placement and judges the memory of the result.

Works on an inconsistent recipe too, leaving out what has no meaning, so that all problems can be told at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from omnictl.budget import CPU
from omnictl.hardware import Hardware
from omnictl.recipe import DEFAULT, FROM_RECIPE, Placed, Recipe
from omnictl.recipe_schema import Edge, Process
from omnictl.stage_values import resolve_stage
from runtime.plan import ConnectorKind, EdgePlan, Plan, ProcessPlan, ReplicaPlan, StagePlan, TaskPlan

COPIED_SECTIONS = ("stages", "edges", "tasks", "voices", "limits", "restarts")
PLAN_KEYS = {"cache": "memory.cache_bytes", "activation": "memory.activation_bytes", "capacity": "capacity_bytes"}
"""What a key of a stage or edge is called in the plan, where the names differ."""
PROCESS_KEYS = {"stages": "replicas", "gpus": "devices", "reserve": "reserve_bytes"}
PLANNING_KEYS = ("parameters", "bytes_per_parameter", "cache_elements_per_token")
"""Keys of a stage that the plan's memory is computed from; its source names them."""


@dataclass(slots=True)
class Assembly:
    """A plan in the making."""

    recipe: Recipe
    placed: Placed
    placement: str
    hardware: Hardware
    stages: dict[str, StagePlan] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A process of the plan: the recipe's process, and which replica of its stages it runs."""

    name: str
    origin: str
    spec: Process
    index: int


def assemble(recipe: Recipe, placement: str, hardware: Hardware) -> tuple[Plan, list[str]]:
    """The plan on one placement of the recipe, and what is wrong with it but for the memory of its devices."""
    build = Assembly(recipe, recipe.placed[placement], placement, hardware)
    values = build.placed.values
    build.sources |= _copied_sources(build.placed)
    _resolve_stages(build)
    processes = _place_processes(build)
    edges = [_plan_edge(build, edge) for edge in values.edges if {edge.source, edge.target} <= set(build.stages)]
    plan = Plan(
        name=recipe.name,
        model_id=recipe.model.model_id,
        served_names=(*values.short_names, recipe.model.model_id),
        placement=placement,
        stages=tuple(build.stages.values()),
        edges=tuple(edges),
        processes=tuple(processes),
        tasks={kind: TaskPlan(inputs=task.inputs, outputs=task.outputs) for kind, task in values.tasks.items()},
        voices=values.voices,
        limits=values.limits,
        restarts=values.restarts,
        provenance=dict(sorted(build.sources.items())),
    )
    return plan, build.problems


def _copied_sources(placed: Placed) -> dict[str, str]:
    """The sources of what the plan takes over from the recipe, by the plan's own paths. No entry means default."""
    sources = dict.fromkeys(("name", "model_id", "served_names"), FROM_RECIPE)
    for path, source in placed.sources.items():
        section, *keys = path.split(".")
        if section not in COPIED_SECTIONS or source == DEFAULT or (len(keys) > 1 and keys[1] in PLANNING_KEYS):
            continue
        if section == "edges" and len(keys) > 1:
            keys[0] = placed.values.edges[int(keys[0])].name
        if section in ("stages", "edges") and len(keys) > 1:
            keys[1] = PLAN_KEYS.get(keys[1], keys[1])
        sources[".".join((section, *keys))] = source
    return sources


# ---- stages -------------------------------------------------------------------------------------------------


def _resolve_stages(build: Assembly) -> None:
    processes = build.placed.values.placements[build.placement].processes
    on_gpu = {stage for process in processes.values() if process.gpus for stage in process.stages}
    for name in build.placed.values.stages:
        use_gpu = name in on_gpu and bool(build.hardware.gpus)
        values = resolve_stage(build.recipe, build.placed, name, use_gpu, build.hardware)
        build.stages[name] = values.plan
        build.sources |= {f"stages.{name}.{key}": reason for key, reason in values.reasons.items()}
        build.problems += values.problems


# ---- processes ----------------------------------------------------------------------------------------------


def _place_processes(build: Assembly) -> list[ProcessPlan]:
    """One process a copy, in the recipe's order."""
    copies = list(_copies(build))
    devices = _assign_gpus(build, copies)
    num_cores = build.hardware.cpu.num_cores
    threads = split_cores(num_cores, [copy.spec.num_threads for copy in copies])
    processes = []
    for copy, num_threads in zip(copies, threads, strict=True):
        _note_process(build, copy, f"{num_cores} cores over {len(copies)} processes")
        processes.append(
            ProcessPlan(
                name=copy.name,
                replicas=tuple(ReplicaPlan(stage=s, index=copy.index) for s in copy.spec.stages if s in build.stages),
                devices=devices.get(copy.name, (CPU,)),
                num_threads=num_threads,
                reserve_bytes=copy.spec.reserve,
                environment=copy.spec.environment,
            )
        )
    return processes


def _copies(build: Assembly) -> Iterator[_Copy]:
    for name, process in build.placed.values.placements[build.placement].processes.items():
        stages = [build.stages[stage] for stage in process.stages if stage in build.stages]
        replicas = max((stage.replicas for stage in stages), default=1)
        for index in range(replicas):
            yield _Copy(name if replicas == 1 else f"{name}-{index}", name, process, index)
        if process.gpus and not build.hardware.gpus:
            build.problems.append(f"process {name} needs a GPU; {build.hardware.name} has none that can be used")


def _note_process(build: Assembly, copy: _Copy, share: str) -> None:
    base = f"placements.{build.placement}.processes.{copy.origin}."
    placement = f"placement {build.placement}"
    build.sources[f"processes.{copy.name}.devices"] = placement
    for path, source in build.placed.sources.items():
        if path.startswith(base) and source != DEFAULT:
            key, *rest = path.removeprefix(base).split(".")
            place = ".".join(("processes", copy.name, PROCESS_KEYS.get(key, key), *rest))
            build.sources[place] = placement if source == FROM_RECIPE else source
    if copy.spec.num_threads is None:
        build.sources[f"processes.{copy.name}.num_threads"] = share


def _assign_gpus(build: Assembly, copies: Sequence[_Copy]) -> dict[str, tuple[str, ...]]:
    """The greatest process chooses first, each where most is free. Whether it all fits is the budget's to say."""
    sizes = {copy.name: _size_bytes(build, copy) for copy in copies if copy.spec.gpus}
    free = {gpu.device: gpu.free_bytes for gpu in build.hardware.gpus}
    assigned: dict[str, tuple[str, ...]] = dict.fromkeys(sizes, ())
    for name in sorted(sizes, key=lambda name: -sizes[name]) if free else ():
        freest = max(free, key=lambda device: free[device])
        assigned[name] = (freest,)
        free[freest] -= sizes[name]
    return assigned


def _size_bytes(build: Assembly, copy: _Copy) -> int:
    stages = (build.stages[stage] for stage in copy.spec.stages if stage in build.stages)
    return copy.spec.reserve + sum(stage.memory.total_bytes for stage in stages)


def split_cores(num_cores: int, wanted: Sequence[int | None]) -> list[int]:
    """Threads for each process: what it asked for, or an even share of the cores that are left, at least one."""
    unset = [index for index, num_threads in enumerate(wanted) if num_threads is None]
    left = max(0, num_cores - sum(num_threads or 0 for num_threads in wanted))
    share, extra = divmod(left, max(1, len(unset)))
    shares = {index: max(1, share + (position < extra)) for position, index in enumerate(unset)}
    return [num_threads or shares[index] for index, num_threads in enumerate(wanted)]


# ---- edges --------------------------------------------------------------------------------------------------


def _plan_edge(build: Assembly, edge: Edge) -> EdgePlan:
    """In one process payloads go by reference. Replicas are bound independently, so copies need shared memory."""
    homes = _homes(build.placed.values.placements[build.placement].processes)
    source, target = homes.get(edge.source), homes.get(edge.target)
    together = source == target and build.stages[edge.source].replicas == 1
    if edge.connector == "auto":
        connector = ConnectorKind.INPROC if together else ConnectorKind.SHM
        reason = f"both ends in process {source}" if together else f"from process {source} to process {target}"
        build.sources[f"edges.{edge.name}.connector"] = f"auto: {reason}"
    else:
        connector = ConnectorKind(edge.connector)
        if connector is ConnectorKind.INPROC and not together:
            build.problems.append(f"edge {edge.name}: connector inproc needs both ends in one process without copies")
    return EdgePlan(
        source=edge.source,
        target=edge.target,
        payload=edge.payload,
        mode=edge.mode,
        connector=connector,
        capacity_bytes=edge.capacity,
    )


def _homes(processes: Mapping[str, Process]) -> dict[str, str]:
    return {stage: name for name, process in processes.items() for stage in process.stages}
