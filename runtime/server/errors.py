"""Maps an error to the OpenAI error JSON and its status: the only place of the server that does.

Knows nothing of endpoints. Called by the exception handlers (app.py), by the ASGI guards, and by the
event writer for errors that come after the status line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from runtime.errors import OmniError, Overloaded, Unavailable

DEFAULT_RETRY_AFTER_S = 1.0
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def error_body(error: OmniError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}; the hint is the end of the message."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: OmniError, more: Mapping[str, Any] | None = None) -> Response:
    """`more` are further keys of the body beside `error`."""
    return json_response({**error_body(error), **(more or {})}, error.status, _headers(error))


def internal_error() -> OmniError:
    """What a client is told of a fault of ours; the log has the rest."""
    return OmniError("the server failed on this request", hint="the server's log has the reason")


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Any JSON-able value as a response; quick also for megabytes of base64."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), media_type="application/json")


def _headers(error: OmniError) -> dict[str, str]:
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None or isinstance(error, Overloaded | Unavailable):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s or DEFAULT_RETRY_AFTER_S))
    return headers
