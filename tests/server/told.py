"""The server's other side, told beforehand: a request with its events, and an orchestrator that keeps what it gets."""

from __future__ import annotations

from collections.abc import AsyncIterator

from runtime.requests import AbortedRequest, Done, Event, RequestSpec


class Told:
    """A request whose events are told beforehand."""

    request_id = "r"

    def __init__(self, *events: Event) -> None:
        self._events = events
        self.num_aborts = 0

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self._events:
            yield event

    async def abort(self) -> AbortedRequest:
        self.num_aborts += 1
        return AbortedRequest("r")


class Submitted:
    """Keeps what is submitted."""

    def __init__(self) -> None:
        self.specs: list[RequestSpec] = []

    async def submit(self, spec: RequestSpec) -> Told:
        self.specs.append(spec)
        return Told(Done("r", {}))
