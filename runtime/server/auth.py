"""The key guard: a pure ASGI layer in front of every route, HTTP and WebSocket alike. A key is taken from the
Authorization header only, never from the address, where logs would keep it.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import Unauthorized
from runtime.server.errors import error_response

OPEN_PATHS = frozenset({"/health", "/livez", "/ready", "/startupz"})
"""Probes: they tell no more than whether the server works, and orchestrators send no keys."""

WEBSOCKET_UNAUTHORIZED = 4401


class KeyGuard:
    """401 (or a refused handshake) unless `Authorization: Bearer <one of keys>` is sent."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": WEBSOCKET_UNAUTHORIZED, "reason": "invalid API key"})
        else:
            await error_response(_refusal(scope))(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # the very bytes that were sent
        # every key is compared, each in constant time, so that the time tells nothing
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def _refusal(scope: Scope) -> Unauthorized:
    if "authorization" in Headers(scope=scope):
        return Unauthorized("the API key in the Authorization header is not one of this server's")
    return Unauthorized("no API key", hint="send the header 'Authorization: Bearer KEY'")
