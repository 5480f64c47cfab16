"""Which part of a plan's graph a request runs through. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from runtime.errors import InvalidRequest, NotFound
from runtime.plan import EdgePlan, Modality, Plan


@dataclass(frozen=True, slots=True)
class SubGraph:
    """stages: in topological order; entries: stage -> inputs it takes; finals: modality -> stage that ends it."""

    stages: tuple[str, ...]
    edges: tuple[EdgePlan, ...]
    entries: Mapping[str, tuple[Modality, ...]]
    finals: Mapping[Modality, str]


def select(plan: Plan, task: str, modalities: Collection[Modality], inputs: Collection[Modality]) -> SubGraph:
    """The final stages of the wanted modalities, and upstream of them whatever the present inputs reach.

    InvalidRequest (NotFound for the task) says which modality or input the task does not have.
    """
    task_plan = plan.tasks.get(task)
    if task_plan is None:
        raise NotFound(f"model {plan.name} has no task {task!r}; it has {', '.join(sorted(plan.tasks))}")
    _require("modalities", task, modalities, task_plan.outputs)
    _require("input", task, inputs, task_plan.inputs)
    finals = {m: task_plan.outputs[m] for m in task_plan.outputs if m in modalities}
    entries: dict[str, tuple[Modality, ...]] = {}
    for modality, stage in task_plan.inputs.items():
        if modality in inputs:
            entries[stage] = (*entries.get(stage, ()), modality)
    sources = {s.name: [e.source for e in plan.edges_into(s.name)] for s in plan.stages}
    sinks = {s.name: [e.target for e in plan.edges_from(s.name)] for s in plan.stages}
    chosen = _reach(finals.values(), sources) & _reach(entries, sinks)
    for modality, stage in finals.items():
        if stage not in chosen:
            raise InvalidRequest(
                f"task {task}: {modality} output needs one of the inputs {', '.join(task_plan.inputs)}; "
                f"got {', '.join(inputs) or 'none'}",
                param="modalities",
            )
    return SubGraph(
        stages=tuple(s for s in topological(plan) if s in chosen),
        edges=tuple(e for e in plan.edges if e.source in chosen and e.target in chosen),
        entries={stage: kinds for stage, kinds in entries.items() if stage in chosen},
        finals=finals,
    )


def primary_input(plan: Plan, task: str) -> Modality:
    """The input that a plain request of the task has: text where the task takes text, else its first."""
    inputs = plan.tasks[task].inputs
    return Modality.TEXT if Modality.TEXT in inputs else next(iter(inputs))


def topological(plan: Plan) -> list[str]:
    """Stage names, producers first; the plan was checked to be acyclic when it was made."""
    order: list[str] = []
    waiting = [s.name for s in plan.stages]
    while waiting:
        ready = [s for s in waiting if all(e.source in order for e in plan.edges_into(s))]
        order += ready
        waiting = [s for s in waiting if s not in ready]
        if not ready:
            raise ValueError(f"plan {plan.name}: the stages {waiting} form a cycle")
    return order


def _require(param: str, task: str, given: Collection[Modality], known: Mapping[Modality, str]) -> None:
    if not given:
        raise InvalidRequest(f"task {task}: no {param} given; expected some of {', '.join(known)}", param=param)
    for modality in given:
        if modality not in known:
            raise InvalidRequest(
                f"task {task}: {param} {str(modality)!r} is not served; expected some of {', '.join(known)}",
                param=param,
            )


def _reach(starts: Iterable[str], neighbours: Mapping[str, list[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        stage = waiting.pop()
        if stage not in found:
            found.add(stage)
            waiting += neighbours[stage]
    return found
