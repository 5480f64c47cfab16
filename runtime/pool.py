"""The replicas of one stage as the orchestrator sees them: life, binding, load. No sockets, no processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from runtime.graph import SubGraph
from runtime.messages import StageStats
from runtime.plan import ConnectorKind, Plan, StagePlan


class Life(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"
    FAILED = "failed"
    STOPPED = "stopped"


class Trigger(StrEnum):
    LOADED = "loaded"
    EXITED = "exited"
    RESTART = "restart"
    GIVE_UP = "give_up"
    STOP = "stop"


NEXT: Mapping[tuple[Life, Trigger], Life] = {
    (Life.STARTING, Trigger.LOADED): Life.READY,
    (Life.STARTING, Trigger.EXITED): Life.DOWN,
    (Life.STARTING, Trigger.STOP): Life.DRAINING,
    (Life.READY, Trigger.EXITED): Life.DOWN,
    (Life.READY, Trigger.STOP): Life.DRAINING,
    (Life.DOWN, Trigger.RESTART): Life.STARTING,
    (Life.DOWN, Trigger.GIVE_UP): Life.FAILED,
    (Life.DOWN, Trigger.STOP): Life.STOPPED,
    (Life.FAILED, Trigger.STOP): Life.STOPPED,
    (Life.DRAINING, Trigger.EXITED): Life.STOPPED,
}
"""The whole life of a replica. What is not here does not happen."""


@dataclass(slots=True)
class Replica:
    stage: str
    index: int
    process: str
    state: Life = Life.STARTING
    reason: str = "not started yet"
    generation: int = 0
    address: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    stats: StageStats | None = None
    bound: set[str] = field(default_factory=set)
    """Requests that hold one of the replica's slots."""

    def move(self, trigger: Trigger, reason: str) -> None:
        """KeyError for a step that the table does not have: a bug of ours."""
        self.state, self.reason = NEXT[self.state, trigger], reason


class Pool:
    def __init__(self, stage: StagePlan, replicas: list[Replica]) -> None:
        self.stage, self.replicas = stage, replicas

    @property
    def ready(self) -> list[Replica]:
        return [r for r in self.replicas if r.state is Life.READY]

    def free(self) -> list[Replica]:
        """Ready replicas with a free slot, least outstanding work first."""
        return sorted((r for r in self.ready if len(r.bound) < self.stage.slots), key=lambda r: len(r.bound))

    def why_not_ready(self) -> str:
        """Empty when some replica is ready, else what the most hopeful of them is doing."""
        if self.ready:
            return ""
        order = [Life.STARTING, Life.DOWN, Life.DRAINING, Life.FAILED, Life.STOPPED]
        best = min(self.replicas, key=lambda r: order.index(r.state))
        return f"stage {self.stage.name} is {best.state}: {best.reason}"


class Pools:
    """All pools of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pools = {
            s.name: Pool(s, [Replica(s.name, i, plan.process_of(s.name, i).name) for i in range(s.replicas)])
            for s in plan.stages
        }

    def __getitem__(self, stage: str) -> Pool:
        return self._pools[stage]

    def __iter__(self) -> Any:
        return iter(self._pools.values())

    def replica(self, stage: str, index: int) -> Replica:
        return self._pools[stage].replicas[index]

    def of_process(self, process: str) -> list[Replica]:
        return [r for pool in self for r in pool.replicas if r.process == process]

    def bind(self, graph: SubGraph, request_id: str) -> tuple[dict[str, Replica], list[str]]:
        """One replica a stage, all or none: the bindings, or none of them and the stages that are full.

        A consumer behind an inproc edge is bound to the process of its producer.
        """
        bindings = self._assign(graph, graph.stages, {})
        if bindings is None:
            full = [stage for stage in graph.stages if not self._pools[stage].free()]
            return {}, full or [e.target for e in graph.edges if e.connector is ConnectorKind.INPROC]
        for replica in bindings.values():
            replica.bound.add(request_id)
        return bindings, []

    def _assign(
        self, graph: SubGraph, stages: tuple[str, ...], bindings: dict[str, Replica]
    ) -> dict[str, Replica] | None:
        """The least loaded replica of the first stage with which the others can be bound as well."""
        if not stages:
            return bindings
        stage = stages[0]
        partners = {
            bindings[e.source].process
            for e in graph.edges
            if e.target == stage and e.connector is ConnectorKind.INPROC and e.source in bindings
        }
        for replica in self._pools[stage].free():
            if not partners or {replica.process} == partners:
                found = self._assign(graph, stages[1:], bindings | {stage: replica})
                if found is not None:
                    return found
        return None
