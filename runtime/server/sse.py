"""The only writer of server-sent events: JSON data frames, the error frame, the end mark, and the reply that
carries them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from runtime.errors import OmniError
from runtime.server.calls import Call
from runtime.server.errors import error_body
from runtime.server.replies import Pieces, StreamReply
from runtime.server.settings import ServerSettings

DONE = b"data: [DONE]\n\n"
"""Sent after a chat stream that went well, and only then."""
_KEEPALIVE = b": keep-alive\n\n"


def frame(data: dict[str, Any]) -> bytes:
    """One event. JSON has no raw line breaks, so one `data:` line holds it."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _error_frame(error: OmniError) -> bytes:
    return frame({"type": "error", **error_body(error)})


def event_stream(
    open_call: Callable[[], Awaitable[Call]],
    frames: Callable[[Call], Pieces],
    settings: ServerSettings,
) -> StreamReply:
    """A reply of events; a failure in the middle is an error event, after which the stream ends without DONE."""
    return StreamReply(
        open_call,
        frames,
        "text/event-stream; charset=utf-8",
        settings,
        error_piece=_error_frame,
        pause_piece=_KEEPALIVE,
    )
