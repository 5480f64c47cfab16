"""One accepted request, seen from the server: its events as Python control flow, and the promise that it does
not outlive its client. Used by every service that asks the orchestrator for something.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

from runtime.errors import Aborted, OmniError, StageError
from runtime.requests import AbortedRequest, Delta, Done, Failed, ModalityEnd, RequestSpec
from runtime.server.ports import Orchestrator, RequestHandle


class Call:
    """An async context manager: leaving it before the terminal came aborts the request."""

    def __init__(self, handle: RequestHandle, fields: Mapping[str, str] | None = None) -> None:
        self._handle = handle
        self._fields = fields or {}
        self._ended = False

    @classmethod
    async def open(cls, orchestrator: Orchestrator, spec: RequestSpec, fields: Mapping[str, str] | None = None) -> Call:
        """Raises what the orchestrator raises for a request that it does not accept.

        fields: what a stage calls its input -> the endpoint's field that it came from, for errors.
        """
        return cls(await orchestrator.submit(spec), fields)

    async def events(self) -> AsyncIterator[Delta | ModalityEnd | Done]:
        """Deltas and modality ends, then one Done. A request that failed or was aborted raises its error."""
        async for event in self._handle:
            self._ended = isinstance(event, Done | Failed | AbortedRequest)
            if isinstance(event, Failed):
                raise self._named(event.error)
            if isinstance(event, AbortedRequest):
                raise Aborted(f"request {self._handle.request_id} was aborted")
            yield event
        if not self._ended:
            raise StageError(f"request {self._handle.request_id} ended without saying how")

    def _named(self, error: OmniError) -> OmniError:
        if error.param is not None:
            error.param = self._fields.get(error.param, error.param)
        return error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self._ended = True
            await asyncio.shield(asyncio.ensure_future(self._handle.abort()))
