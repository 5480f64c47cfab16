"""Settings of the HTTP edge that belong to a deployment rather than to a plan. Made by the process that
starts the server, read once by `create_app`, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from runtime.errors import ConfigError

MEDIA_PREFIX = "OMNICTL_MEDIA_"


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Bounds of what the messages of a chat may carry, in the request or behind an address. Each is set by the
    variable OMNICTL_MEDIA_<NAME>, which is also what errors call it. All media of a request together have the plan's
    `max_body_bytes`, wherever they come from.

    fetch: whether http and https addresses are fetched at all. private_hosts: names of hosts that may be fetched from
    although their address is not a public one. fetch_timeout_s: of one address, with all redirects.
    """

    max_bytes: int = 24 << 20
    max_audios: int = 16
    max_images: int = 16
    max_videos: int = 4
    fetch: bool = True
    fetch_timeout_s: float = 15.0
    private_hosts: tuple[str, ...] = ()


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
    media: MediaSettings = MediaSettings()


def media_settings(environment: Mapping[str, str]) -> MediaSettings:
    """From the variables that are set. ConfigError names the one that holds no such value."""
    given: dict[str, Any] = {}
    for field in fields(MediaSettings):
        variable = MEDIA_PREFIX + field.name.upper()
        if text := environment.get(variable, "").strip():
            parse, expected = _PARSERS[type(field.default)]
            try:
                given[field.name] = parse(text)
            except ValueError:
                raise ConfigError(f"{variable}: {text!r}; expected {expected}") from None
    return MediaSettings(**given)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise ValueError
    return value


def _switch(text: str) -> bool:
    try:
        return {"on": True, "1": True, "off": False, "0": False}[text.lower()]
    except KeyError:
        raise ValueError from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip().lower() for name in text.split(",") if name.strip())


_PARSERS: Mapping[type, tuple[Callable[[str], Any], str]] = {
    int: (_count, "a whole number"),
    float: (_seconds, "a number of seconds above 0"),
    bool: (_switch, "on or off"),
    tuple: (_names, "names of hosts, separated by commas"),
}
