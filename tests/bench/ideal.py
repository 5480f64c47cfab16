"""How long stages in lockstep need when nothing but their steps takes time: the shipped `sim` engines, driven on a
clock of their own. What a request waits for there is a dependency or a busy stage, so this is its critical path.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import msgspec

from runtime.engines.base import StageOutput, StageWork
from runtime.engines.sim import LockstepSimEngine, SimSettings
from runtime.payload import Payload
from runtime.plan import MODALITY_PAYLOAD, REQUEST_INPUT, EdgeMode, EdgePlan, Modality, Plan


class _TimedEngine(LockstepSimEngine):
    """Says how long a step takes instead of taking it."""

    step_took_s = 0.0

    def step(self) -> list[StageOutput]:
        self.step_took_s = 0.0
        return super().step()

    def _take(self, seconds: float) -> None:
        self.step_took_s = seconds


@dataclass
class _Replica:
    stage: str
    engine: _TimedEngine
    free_s: float = 0.0
    """When its step in progress is over."""


@dataclass
class IdealRun:
    """`num_requests` of a chat with text and audio, asked for at time 0. `plan`: lockstep `sim` stages."""

    plan: Plan
    num_requests: int
    now_s: float = 0.0
    held: dict[tuple[str, str], list[Payload]] = field(default_factory=dict)
    """(request, whole edge) -> pieces until the producer's end."""

    def makespan_s(self) -> float:
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, _Replica, list[StageOutput]]] = []
        self._replicas = {stage.name: self._make(stage.name, stage.replicas) for stage in self.plan.stages}
        finals = self.plan.tasks["chat"].outputs
        self._edges = [e for e in self.plan.edges if e.source in finals.values() or e.target in finals.values()]
        self._edges = [e for e in self._edges if e.source != "ear"]
        for number in range(self.num_requests):
            self._submit(f"{number}")
        self._start_idle()
        while self._events:
            self.now_s, _, replica, outputs = heapq.heappop(self._events)
            for output in outputs:
                self._deliver(replica.stage, output)
            self._start_idle()
        return self.now_s

    def _make(self, name: str, num_replicas: int) -> list[_Replica]:
        settings = msgspec.convert(self.plan.stage(name).engine_settings, SimSettings)
        return [_Replica(name, _TimedEngine(settings, name)) for _ in range(num_replicas)]

    def _bound(self, stage: str, request_id: str) -> _Replica:
        replicas = self._replicas[stage]
        return replicas[int(request_id) % len(replicas)]

    def _submit(self, request_id: str) -> None:
        task = self.plan.tasks["chat"]
        entry = task.inputs[Modality.TEXT]
        for stage in {entry, *(edge.target for edge in self._edges)}:
            inputs = {e.name for e in self._edges if e.target == stage} | ({REQUEST_INPUT} if stage == entry else set())
            wants = {e.payload for e in self._edges if e.source == stage}
            wants |= {MODALITY_PAYLOAD[m] for m, final in task.outputs.items() if final == stage}
            work = StageWork(request_id, 0, {}, frozenset(inputs), frozenset(map(str, wants)))
            self._bound(stage, request_id).engine.submit(work)
        self._feed(entry, request_id, Payload("text", request_id, edge=REQUEST_INPUT, last=True, meta={"text": "hi"}))

    def _feed(self, stage: str, request_id: str, payload: Payload) -> None:
        self._bound(stage, request_id).engine.feed(request_id, payload)

    def _deliver(self, stage: str, output: StageOutput) -> None:
        for edge in (e for e in self._edges if e.source == stage):
            held = self.held.setdefault((output.request_id, edge.name), [])
            if output.payload is not None and output.payload.kind == edge.payload:
                held.append(msgspec.structs.replace(output.payload, edge=edge.name))
            if edge.mode is EdgeMode.CHUNKED or output.end is not None:
                self._pass_on(edge, output.request_id, held)
            if output.end is not None:
                self._feed(
                    edge.target, output.request_id, Payload(edge.payload, output.request_id, edge=edge.name, last=True)
                )

    def _pass_on(self, edge: EdgePlan, request_id: str, held: list[Payload]) -> None:
        for payload in held:
            self._feed(edge.target, request_id, payload)
        held.clear()

    def _start_idle(self) -> None:
        for replica in itertools.chain.from_iterable(self._replicas.values()):
            while replica.free_s <= self.now_s and replica.engine.next_step_s() is not None:
                outputs = replica.engine.step()
                replica.free_s = self.now_s + replica.engine.step_took_s
                heapq.heappush(self._events, (replica.free_s, next(self._numbers), replica, outputs))
