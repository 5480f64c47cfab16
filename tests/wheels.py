"""Real wheels with what a test wants in them, and a package index on loopback that misbehaves on request."""

from __future__ import annotations

import hashlib
import socket
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes] = {},
    *,
    requires: Sequence[str] = (),
    extras: Mapping[str, Sequence[str]] = {},
    entry_points: str = "",
) -> Path:
    """A wheel that pip accepts; `files` are archive names and their bytes."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    for extra, wanted in extras.items():
        metadata += [f"Provides-Extra: {extra}", *(f"Requires-Dist: {w}; extra == '{extra}'" for w in wanted)]
    members = {
        **files,
        f"{info}/METADATA": "\n".join(metadata).encode() + b"\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if entry_points:
        members[f"{info}/entry_points.txt"] = entry_points.encode()
    members[f"{info}/RECORD"] = "".join(f"{member},,\n" for member in [*members, f"{info}/RECORD"]).encode()
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for member, data in members.items():
            entry = zipfile.ZipInfo(member)
            entry.external_attr = (0o100755 if ".data/scripts/" in member else 0o100644) << 16
            archive.writestr(entry, data)
    return path


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _metadata(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA")))


@dataclass
class Behaviour:
    """How the index answers for one file. Lists are used up, one entry a request, then it is honest."""

    cut_after: list[int] = field(default_factory=list)
    """Close the connection after so many body bytes."""
    hang_after: list[int] = field(default_factory=list)
    """Send so many body bytes and then nothing, until the index is closed."""
    status: list[int] = field(default_factory=list)
    body: bytes | None = None
    """Served in place of the file, with a matching length."""
    ignores_range: bool = False
    shifts_range: bool = False
    """Continue one byte later than asked."""
    pause_s: float = 0.0
    """Between pieces of 64 KiB."""


@dataclass
class Asked:
    """One request for a file: its Range header and how many body bytes were sent."""

    name: str
    range: str | None
    sent_bytes: int = 0


class Index:
    """`/simple/NAME/` and `/files/FILE` for the wheels of a folder. Also answers as a proxy for any host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.behaviour: dict[str, Behaviour] = {}
        self.asked: list[Asked] = []
        self.proxied: list[str] = []
        """Request lines that came as to a proxy, CONNECT included."""
        self.stop = threading.Event()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"index": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def url(self, name: str) -> str:
        return f"http://{self.address}/files/{name}"

    def sent_bytes(self, name: str) -> int:
        return sum(asked.sent_bytes for asked in self.asked if asked.name == name)

    def close(self) -> None:
        self.stop.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@contextmanager
def serving(folder: Path) -> Iterator[Index]:
    index = Index(folder)
    try:
        yield index
    finally:
        index.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is what many tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index: Index

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_CONNECT(self) -> None:
        self.index.proxied.append(self.requestline)
        self._answer(403, b"no tunnels here")

    def do_GET(self) -> None:
        if self.path.startswith("http://"):
            self.index.proxied.append(self.requestline)
        kind, _, name = urlsplit(self.path).path.strip("/").partition("/")
        if kind == "simple":
            self._listing(name)
        elif kind == "files" and name.endswith(".whl.metadata"):
            self._answer(200, _metadata(self.index.folder / name.removesuffix(".metadata")))
        elif kind == "files" and (self.index.folder / name).is_file():
            self._file(name)
        else:
            self._answer(404, b"not here")

    def _listing(self, name: str) -> None:
        found = [p for p in sorted(self.index.folder.glob("*.whl")) if p.name.startswith(name.replace("-", "_") + "-")]
        # Real indexes state the checksum and offer the metadata apart, so that pip does not fetch the whole file.
        links = "".join(
            f'<a href="/files/{p.name}#sha256={sha256_of(p)}" data-core-metadata="true">{p.name}</a>' for p in found
        )
        self._answer(200 if found else 404, f"<!DOCTYPE html><html><body>{links}</body></html>".encode())

    def _file(self, name: str) -> None:
        behaviour = self.index.behaviour.get(name, Behaviour())
        asked = Asked(name, self.headers.get("Range"))
        self.index.asked.append(asked)
        if behaviour.status:
            return self._answer(behaviour.status.pop(0), b"out of order")
        body = behaviour.body if behaviour.body is not None else (self.index.folder / name).read_bytes()
        start = 0
        if asked.range and not behaviour.ignores_range:
            start = int(asked.range.removeprefix("bytes=").rstrip("-")) + behaviour.shifts_range
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self._body(body[start:], behaviour, asked)
        return None

    def _body(self, body: bytes, behaviour: Behaviour, asked: Asked) -> None:
        cut = behaviour.cut_after.pop(0) if behaviour.cut_after else None
        hang = behaviour.hang_after.pop(0) if behaviour.hang_after else None
        end = min(len(body) if limit is None else limit for limit in (cut, hang))
        for offset in range(0, end, 1 << 16):
            piece = body[offset : min(offset + (1 << 16), end)]
            self.wfile.write(piece)
            asked.sent_bytes += len(piece)
            if behaviour.pause_s:
                self.index.stop.wait(behaviour.pause_s)
        if hang is not None:
            self.index.stop.wait(60)
        if end < len(body):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_WR)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
