"""How long stages in lockstep need when nothing but their steps takes time: the shipped `sim` engines, driven on a
clock of their own. What a request waits for there is a dependency or a busy stage, so this is its critical path.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import msgspec

from runtime.engines.base import StageOutput, StageWork
from runtime.engines.sim import LockstepSimEngine, SimSettings
from runtime.graph import select
from runtime.payload import Payload
from runtime.plan import MODALITY_PAYLOAD, REQUEST_INPUT, EdgeMode, Modality, Plan, StagePlan


class TimedEngine(LockstepSimEngine):
    """Says how long a step takes instead of taking it."""

    step_took_s = 0.0

    def step(self) -> list[StageOutput]:
        self.step_took_s = 0.0
        return super().step()

    def _take(self, seconds: float) -> None:
        self.step_took_s = seconds


@dataclass
class _Replica:
    engine: TimedEngine
    free_s: float = 0.0
    """When its step in progress is over."""


class IdealRun:
    """`num_requests` of a chat with text and audio out, all asked for at time 0. `plan`: lockstep `sim` stages."""

    def __init__(self, plan: Plan, num_requests: int) -> None:
        self._graph = select(plan, "chat", (Modality.TEXT, Modality.AUDIO), (Modality.TEXT,))
        self._replicas = {name: _replicas(plan.stage(name)) for name in self._graph.stages}
        self._num_requests = num_requests
        self._now_s = 0.0
        self._held: dict[tuple[str, str], list[Payload]] = {}
        """(request, edge) -> pieces that wait for their producer's end."""
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, str, list[StageOutput]]] = []
        """When a step ends, whose it is, and what it made."""

    def makespan_s(self) -> float:
        for number in range(self._num_requests):
            self._submit(str(number))
        self._start_idle()
        while self._events:
            self._now_s = self._events[0][0]
            while self._events and self._events[0][0] == self._now_s:
                _, _, stage, outputs = heapq.heappop(self._events)
                for output in outputs:
                    self._deliver(stage, output)
            self._start_idle()
        return self._now_s

    def _engine(self, stage: str, request_id: str) -> TimedEngine:
        replicas = self._replicas[stage]
        return replicas[int(request_id) % len(replicas)].engine

    def _submit(self, request_id: str) -> None:
        graph = self._graph
        for stage in graph.stages:
            inputs = {edge.name for edge in graph.edges if edge.target == stage}
            inputs |= {REQUEST_INPUT} if stage in graph.entries else set()
            wants = {edge.payload for edge in graph.edges if edge.source == stage}
            wants |= {MODALITY_PAYLOAD[m] for m, final in graph.finals.items() if final == stage}
            self._engine(stage, request_id).submit(
                StageWork(request_id, 0, {}, frozenset(inputs), frozenset(map(str, wants)))
            )
        for stage in graph.entries:
            self._feed(stage, Payload("text", request_id, edge=REQUEST_INPUT, last=True, meta={"text": "hi"}))

    def _feed(self, stage: str, payload: Payload) -> None:
        self._engine(stage, payload.request_id).feed(payload.request_id, payload)

    def _deliver(self, stage: str, output: StageOutput) -> None:
        for edge in (edge for edge in self._graph.edges if edge.source == stage):
            held = self._held.setdefault((output.request_id, edge.name), [])
            if output.payload is not None and output.payload.kind == edge.payload:
                held.append(msgspec.structs.replace(output.payload, edge=edge.name))
            if output.end is not None:
                held.append(Payload(edge.payload, output.request_id, edge=edge.name, last=True))
            if edge.mode is EdgeMode.CHUNKED or output.end is not None:
                for payload in held:
                    self._feed(edge.target, payload)
                held.clear()

    def _start_idle(self) -> None:
        for replica in itertools.chain.from_iterable(self._replicas.values()):
            while replica.free_s <= self._now_s and replica.engine.next_step_s() is not None:
                outputs = replica.engine.step()
                replica.free_s = self._now_s + replica.engine.step_took_s
                heapq.heappush(self._events, (replica.free_s, next(self._numbers), replica.engine.name, outputs))


def _replicas(stage: StagePlan) -> list[_Replica]:
    settings = msgspec.convert(stage.engine_settings, SimSettings)
    return [_Replica(TimedEngine(settings, stage.name)) for _ in range(stage.replicas)]
