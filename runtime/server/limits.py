"""The body cap: counts a request's bytes while they arrive and stops at the plan's limit, whatever the
Content-Length says; gives up on an upload that stands still. A pure ASGI layer.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import PayloadTooLarge, RequestTimeout
from runtime.server.errors import error_response


class BodyLimit:
    """413 beyond `max_bytes`, 408 after `idle_timeout_s` without a byte of an unfinished body."""

    def __init__(self, app: ASGIApp, max_bytes: int, idle_timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._idle_timeout_s = idle_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if int(declared) > self._max_bytes:
            await error_response(self._too_large(f"{declared} bytes"))(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        num_bytes, complete = 0, False

        async def receive_counted() -> Message:
            nonlocal num_bytes, complete
            if complete:  # what follows is the wait for a disconnect: no limit of ours
                return await receive()
            message = await self._receive_in_time(receive)
            num_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise self._too_large("more")
            return message

        return receive_counted

    async def _receive_in_time(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await receive()
        except TimeoutError:
            raise RequestTimeout(f"body: nothing came for {self._idle_timeout_s:g} s before its end") from None

    def _too_large(self, size: str) -> PayloadTooLarge:
        return PayloadTooLarge(f"body: {size}; at most {self._max_bytes} bytes (limit max_body_bytes)")
