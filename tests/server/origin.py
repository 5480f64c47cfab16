"""A web server of the kind that addresses in requests lead to: good and bad files, redirects, bodies without an end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

IMAGE = b"\x89PNG and so on"


def answer(status: str, body: bytes = b"", **headers: object) -> bytes:
    lines = [f"HTTP/1.1 {status}", "connection: close", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def image(content_type: str = "image/png", **headers: object) -> bytes:
    return answer("200 OK", IMAGE, content_type=content_type, **headers)


ANSWERS = {
    "/image": image(content_length=len(IMAGE)),
    "/empty": answer("200 OK", content_type="image/png", content_length=0),
    "/packed": image(content_encoding="gzip"),
    "/announced": image(content_length=10**12),
    "/cut": image(content_length=1000),
    "/nonsense": b"220 this is no web server\r\n",
    "/loop": answer("302 Found", location="/loop"),
    "/missing": answer("404 Not Found"),
}


class Origin:
    """`paths`: what was asked for, in order. /redirect?TARGET, /typed?TYPE, and two bodies that never end."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.paths: list[str] = []

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        self.paths.append(path)
        kind, _, value = path.partition("?")
        match kind:
            case "/redirect":
                writer.write(answer("302 Found", location=value))
            case "/typed":
                writer.write(image(value))
            case "/endless" | "/drip":
                writer.write(image())
                while True:
                    writer.write(b"x" * (65536 if kind == "/endless" else 1))
                    await writer.drain()
                    await asyncio.sleep(0.01 if kind == "/drip" else 0)
            case _:
                writer.write(ANSWERS[path])


@contextlib.asynccontextmanager
async def serving_origin() -> AsyncIterator[Origin]:
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        try:
            await origin.answer(request.split()[1].decode(), writer)
            await writer.drain()
        finally:
            writer.close()
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.create_task(handle(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    origin = Origin(server.sockets[0].getsockname()[1])
    try:
        yield origin
    finally:
        server.close()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)  # a client that had enough has cut some of them off
