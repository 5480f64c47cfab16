"""What happened to a request, and when: the server's stamps and those that its stages sent with their ends.

All times are seconds of CLOCK_MONOTONIC, which is one clock for all processes of a machine. Written by the
orchestrator and by the HTTP edge; `waterfall` makes something to look at of it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.errors import NotFound
from runtime.graph import SubGraph
from runtime.messages import StageTrace, Stamps


@dataclass(slots=True)
class RequestTrace:
    """One accepted request. What has not happened is None or missing."""

    request_id: str
    task: str
    graph: SubGraph
    asked_s: float
    """When an endpoint asked the orchestrator for it."""
    admitted_s: float = field(default_factory=time.monotonic)
    received_s: float | None = None
    sent_s: float | None = None
    """When its HTTP request came in, and when the last byte of the answer went out."""
    began_at: float = field(default_factory=time.time)
    """Seconds since 1970 at the admission."""
    fed: dict[str, Stamps] = field(default_factory=dict)
    """Entry stage -> input pieces sent to it."""
    stages: dict[str, StageTrace] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)
    """Stage -> when the server heard of its end."""
    arrived: dict[str, Stamps] = field(default_factory=dict)
    handled: dict[str, Stamps] = field(default_factory=dict)
    """Modality -> pieces that arrived for the client, and those that the endpoint was through with."""
    state: str = "running"
    over_s: float | None = None
    """When its terminal was put."""

    def ended(self, stage: str, trace: StageTrace | None) -> None:
        """A stage is through with the request, and says what it did of it unless it never had it."""
        self.heard[stage] = time.monotonic()
        if trace is not None:
            self.stages[stage] = trace

    def over(self, state: str) -> None:
        self.state, self.over_s = state, time.monotonic()


class TraceStore:
    """The open requests, and the newest `limit` that are over."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._received: dict[str, float] = {}
        """HTTP requests that are being answered; few of them become requests for a model."""
        self._open: OrderedDict[str, RequestTrace] = OrderedDict()
        self._finished: OrderedDict[str, RequestTrace] = OrderedDict()

    def received(self, request_id: str) -> None:
        """An HTTP request came in; `gone` follows."""
        self._received[request_id] = time.monotonic()

    def answered(self, request_id: str) -> None:
        """The end of an answer goes out; a later call counts."""
        trace = self._open.get(request_id) or self._finished.get(request_id)
        if trace is not None:
            trace.sent_s = time.monotonic()

    def gone(self, request_id: str) -> None:
        self._received.pop(request_id, None)

    def open(self, trace: RequestTrace) -> None:
        trace.received_s = self._received.get(trace.request_id)
        self._open[trace.request_id] = trace

    def close(self, request_id: str) -> None:
        """Nothing more of the request happens in any stage."""
        self._finished[request_id] = self._open.pop(request_id)
        self._finished.move_to_end(request_id)
        while len(self._finished) > self._limit:
            self._finished.popitem(last=False)

    def find(self, name: str) -> RequestTrace:
        """By the request's id, or by an id that ends with it, as that of a chat completion. NotFound."""
        request_id = name.rpartition("-")[2]
        trace = self._open.get(request_id) or self._finished.get(request_id)
        if trace is None:
            raise NotFound(
                f"there is no trace of request {name!r}: it was not accepted, or {self._limit} newer ones have ended "
                "(limit kept_traces)",
                hint="see those that are kept: omnictl trace",
            )
        return trace

    def recent(self) -> Iterator[RequestTrace]:
        """Newest first; those that still run before those that are over."""
        yield from reversed(self._open.values())
        yield from reversed(self._finished.values())
