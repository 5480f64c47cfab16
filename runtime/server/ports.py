"""What the HTTP server needs of the orchestrator, and nothing more. The server is written against these
protocols; runtime/deployment.py satisfies them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from runtime.plan import Modality
from runtime.requests import AbortedRequest, Event, RequestSpec
from runtime.tracing import TraceStore


class Availability(Protocol):
    """Whether a modality of a task can be asked for now; `reason` says why not."""

    @property
    def ready(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class RequestHandle(Protocol):
    """One accepted request. Iterating gives its events, the last of which is its only terminal."""

    @property
    def request_id(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def abort(self) -> AbortedRequest:
        """Give up. Idempotent; returns when the stages confirmed or their time to do so is over."""


class Orchestrator(Protocol):
    """`submit` raises InvalidRequest, Overloaded, Unavailable or DeadlineExceeded for what it does not accept.

    `status` is JSON-able: phase (starting, warming, ready, degraded, failed, draining), failure, a row a stage
    replica under `stages`, and what the requests do.
    """

    @property
    def metrics(self) -> CollectorRegistry: ...

    @property
    def traces(self) -> TraceStore: ...

    async def submit(self, spec: RequestSpec) -> RequestHandle: ...

    def availability(self) -> Mapping[str, Mapping[Modality, Availability]]: ...

    def status(self) -> dict[str, Any]: ...
