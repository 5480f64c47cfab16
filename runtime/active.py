"""One request while it is in the orchestrator's hands, and the stream of its events to the client's side."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum

from runtime.graph import SubGraph
from runtime.messages import Ended, Stamps
from runtime.payload import Payload
from runtime.plan import MODALITY_PAYLOAD, Modality
from runtime.pool import Replica
from runtime.requests import TERMINALS, Delta, Event, RequestSpec
from runtime.tracing import RequestTrace


class RequestState(StrEnum):
    RUNNING = "running"
    ABORTING = "aborting"
    """The client gave up; stages have been told and have not all confirmed. Nothing is delivered any more."""
    OVER = "over"


class EventStream:
    """Events of one request, one consumer. Ends after the terminal. Counts what the client has not taken."""

    def __init__(self, trace: RequestTrace) -> None:
        self._trace = trace
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._over = False
        self.unread_bytes = 0

    def put(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Delta):
            self.unread_bytes += event.payload.size_bytes
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self._over:
            while not self._events:
                self._arrived.clear()
                await self._arrived.wait()  # ends: the request's own deadline puts a terminal here
            event = self._events.popleft()
            if isinstance(event, Delta):
                self.unread_bytes -= event.payload.size_bytes
            self._over = isinstance(event, TERMINALS)
            yield event
            if isinstance(event, Delta):
                Stamps.add(self._trace.handled, event.modality, time.monotonic())


@dataclass(slots=True)
class ActiveRequest:
    spec: RequestSpec
    graph: SubGraph
    bindings: dict[str, Replica]
    trace: RequestTrace
    events: EventStream
    epoch: int = 0
    state: RequestState = RequestState.RUNNING
    submitted: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)
    ended: dict[str, Ended] = field(default_factory=dict)
    awaiting: set[str] = field(default_factory=set)
    """Stages that were told to abort and have not confirmed."""
    acknowledged: list[str] = field(default_factory=list)
    next_sequence: int = 0
    fed: dict[str, int] = field(default_factory=dict)
    """Entry stage -> input pieces sent to it."""
    open_inputs: dict[str, set[Modality]] = field(default_factory=dict)
    """Entry stage -> inputs of it that are not complete."""
    held_inputs: dict[str, list[tuple[Modality, Payload, bool]]] = field(default_factory=dict)
    """Entry stage -> input pieces (and whether each is its input's last) for when the stage is submitted."""
    next_update: dict[Modality, int] = field(default_factory=dict)
    """Lowest sequence number that a further piece of a streaming input may have."""
    deadline: asyncio.TimerHandle | None = None
    acks_deadline: asyncio.TimerHandle | None = None
    all_acknowledged: asyncio.Event = field(default_factory=asyncio.Event)
    accepted_s: float = field(default_factory=time.monotonic)
    first_s: dict[Modality, float] = field(default_factory=dict)
    """Modality -> seconds from acceptance to its first delta."""
    audio_s: float = 0.0

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    def modality_of(self, stage: str, payload_kind: str) -> Modality | None:
        """Which wanted modality a client output of a stage is."""
        for modality, final in self.graph.finals.items():
            if final == stage and MODALITY_PAYLOAD[modality] == payload_kind:
                return modality
        return None

    @property
    def unfinished(self) -> list[str]:
        """Stages that were submitted and have not ended."""
        return [s for s in self.graph.stages if s in self.submitted and s not in self.ended]

    @property
    def complete(self) -> bool:
        return all(stage in self.ended for stage in self.graph.finals.values())
