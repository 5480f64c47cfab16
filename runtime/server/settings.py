"""Settings of the HTTP edge that belong to a deployment rather than to a plan. Made by the process that
starts the server, read once by `create_app`, never changed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """api_keys: when there are any, one of them opens every route but the health probes.

    headers_after_s: how long the status line of a streamed answer waits for the first piece of it, so that
    an early failure still gets an honest status; after that the headers go out and the stream stays open.
    keepalive_s: silence in an event stream after which a comment is sent, for proxies that count seconds.
    body_idle_timeout_s: how long an upload may stand still. write_timeout_s: how long the client of a stream may
    leave what it was sent unread.
    """

    api_keys: tuple[str, ...] = ()
    headers_after_s: float = 2.0
    keepalive_s: float = 15.0
    body_idle_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
