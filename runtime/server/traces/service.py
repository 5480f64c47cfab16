"""The traces that are kept, as documents."""

from __future__ import annotations

from typing import Any

from runtime import waterfall
from runtime.tracing import TraceStore


class TraceService:
    def __init__(self, traces: TraceStore) -> None:
        self._traces = traces

    def all(self) -> dict[str, Any]:
        """A line for each, newest first; those that still run come before those that are over."""
        return {"object": "list", "data": [waterfall.summary(trace) for trace in self._traces.recent()]}

    def one(self, request_id: str) -> dict[str, Any]:
        """NotFound for a request that was not accepted, or so long ago that it is not kept any more."""
        return waterfall.document(self._traces.find(request_id))
