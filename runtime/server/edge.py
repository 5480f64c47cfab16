"""The outermost ASGI layer: gives every request its id and returns it as `x-request-id`, and turns whatever
nobody caught into one error answer and one log entry. A fault after the status line cuts the answer short.
"""

from __future__ import annotations

import logging

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.requests import new_request_id
from runtime.server.errors import error_response, internal_error
from runtime.tracing import TraceStore

log = logging.getLogger(__name__)


class Edge:
    """`scope["state"]["request_id"]` is the id; the orchestrator gets the same one."""

    def __init__(self, app: ASGIApp, traces: TraceStore) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        self._traces.received(request_id)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last:  # whoever has read the answer finds its trace complete
                self._traces.answered(request_id)
            await send(message)
            if is_last:
                self._traces.answered(request_id)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if not started:
                await error_response(internal_error())(scope, receive, send_with_id)
        finally:
            self._traces.gone(request_id)
