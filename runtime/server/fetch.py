"""Files behind addresses that a client names, fetched so that the client reaches through us nobody whom it could not
reach itself: the host of every hop is resolved here, its addresses must be public, and the connection goes to an
address that was looked at, not to a name that may mean something else by then. Called by chat/media.py.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpcore
import httpx

from runtime.errors import InvalidRequest, PayloadTooLarge, UnsupportedValue
from runtime.server.settings import MEDIA_PREFIX, MediaSettings
from runtime.server.wire import shown

SCHEMES = ("http", "https")
MAX_REDIRECTS = 5
MAX_URL_CHARS = 8192
CONNECT_TIMEOUT_S = 5.0
"""To one of a host's addresses, after which the next one is tried."""
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.ip_network("64:ff9b::/96")
HEADERS: dict[bytes | str, bytes | str] = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "omnictl"}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Fetched:
    """content_type is the answer's, "" when it has none."""

    data: bytes
    content_type: str


class Budget:
    """What all media of a request may have together, wherever they come from: as much as its body."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left_bytes = max_bytes

    def take(self, num_bytes: int) -> None:
        """PayloadTooLarge when there is not so much left."""
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            limit = f"{self._max_bytes} bytes together (limit max_body_bytes)"
            raise PayloadTooLarge(f"messages: their media have more than {limit}", param="messages")


class Fetcher:
    """Knows what may be fetched; keeps no connections."""

    def __init__(self, settings: MediaSettings) -> None:
        self._settings = settings

    async def fetch(self, url: str, param: str, budget: Budget) -> Fetched:
        """The file at an http or https address. InvalidRequest, UnsupportedValue or PayloadTooLarge name `param`."""
        if not self._settings.fetch:
            raise UnsupportedValue(
                f"{param}: this server fetches nothing ({MEDIA_PREFIX}FETCH is off)",
                hint="send the file itself, as data:<type>;base64,<data>",
                param=param,
            )
        timeout_s = self._settings.fetch_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._follow(url, param, budget)
        except TimeoutError:
            reason = f"did not come within {timeout_s:g} s (limit {MEDIA_PREFIX}FETCH_TIMEOUT_S)"
        # a host name that cannot be encoded is a UnicodeError of the resolver
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError, UnicodeError) as exc:
            reason = f"could not be fetched ({type(exc).__name__})"
        raise InvalidRequest(f"{param}: {shown(url)} {reason}", param=param)

    async def _follow(self, url: str, param: str, budget: Budget) -> Fetched:
        hop = _parsed(url, param)
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(hop, param, budget)
            if isinstance(found, Fetched):
                return found
            hop = _parsed(found, param, base=hop)
        raise InvalidRequest(f"{param}: {shown(url)} leads to more than {MAX_REDIRECTS} redirects", param=param)

    async def _get(self, url: httpx.URL, param: str, budget: Budget) -> Fetched | str:
        """The file, or where it is said to be instead."""
        backend = _PublicOnly(self._settings.private_hosts, param)
        context = await asyncio.to_thread(lambda: self._ssl_context) if url.scheme == "https" else None
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        async with (
            httpcore.AsyncConnectionPool(ssl_context=context, network_backend=backend) as pool,
            pool.stream("GET", target, headers=HEADERS) as response,
        ):
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in REDIRECTS and "location" in headers:
                return headers["location"]
            if response.status != 200:
                raise InvalidRequest(f"{param}: {shown(str(url))} answered {response.status}", param=param)
            if (encoding := headers.get("content-encoding", "identity")) != "identity":
                raise InvalidRequest(f"{param}: {shown(str(url))} came encoded as {encoding}", param=param)
            announced, limit = headers.get("content-length", ""), self._settings.max_bytes
            if announced.isdecimal() and int(announced) > limit:
                raise too_large(f"{announced} bytes", limit, param)
            return Fetched(await self._body(response, param, budget), headers.get("content-type", ""))

    async def _body(self, response: httpcore.Response, param: str, budget: Budget) -> bytes:
        """Counted as it comes, whatever was announced."""
        limit, data = self._settings.max_bytes, bytearray()
        async for piece in response.aiter_stream():
            data += piece
            budget.take(len(piece))
            if len(data) > limit:
                raise too_large("more", limit, param)
        return bytes(data)

    @cached_property
    def _ssl_context(self) -> ssl.SSLContext:
        return ssl.create_default_context()


class _PublicOnly(httpcore.AsyncNetworkBackend):
    """Connects to addresses that it has looked at, and refuses those that the wide world cannot reach."""

    def __init__(self, private_hosts: Iterable[str], param: str) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._private_hosts, self._param = frozenset(private_hosts), param

    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        addresses = await self._addresses(host, port)
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout=CONNECT_TIMEOUT_S)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(addresses[-1], port, timeout=CONNECT_TIMEOUT_S)

    async def _addresses(self, host: str, port: int) -> list[str]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if host.lower() not in self._private_hosts and not all(map(is_public, addresses)):
            raise UnsupportedValue(
                f"{self._param}: the address of host {shown(host)} is not a public one",
                hint=f"the operator can allow a host by name in {MEDIA_PREFIX}PRIVATE_HOSTS",
                param=self._param,
            )
        return addresses

    async def connect_unix_socket(self, path: str, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        raise OSError("not a network address")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def is_public(text: str) -> bool:
    """Whether an address is one of the public internet, also behind the ways to write an IPv4 address as IPv6."""
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        address = inner or address
    if getattr(address, "is_site_local", False):
        return False
    return bool(address.is_global and not address.is_multicast and not address.is_reserved)


def too_large(size: str, limit: int, param: str) -> PayloadTooLarge:
    """`size` says how much there is."""
    return PayloadTooLarge(f"{param}: {size}; at most {limit} bytes (limit {MEDIA_PREFIX}MAX_BYTES)", param=param)


def _parsed(url: str, param: str, base: httpx.URL | None = None) -> httpx.URL:
    """`url` may be relative to `base`."""
    if len(url) > MAX_URL_CHARS:
        raise InvalidRequest(f"{param}: {len(url)} characters; an address has at most {MAX_URL_CHARS}", param=param)
    try:
        parsed = httpx.URL(url) if base is None else base.join(url)
        host = parsed.host
    except (httpx.InvalidURL, UnicodeError) as exc:
        raise InvalidRequest(f"{param}: {shown(url)} is no address: {exc}", param=param) from None
    if parsed.scheme not in SCHEMES:
        raise UnsupportedValue(
            f"{param}: {shown(url)}; expected an address with {' or '.join(SCHEMES)}, or data:<type>;base64,<data>",
            param=param,
        )
    if not host or parsed.userinfo:
        raise InvalidRequest(
            f"{param}: {shown(url)}; expected an address of a host, without a user's name", param=param
        )
    return parsed
