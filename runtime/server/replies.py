"""How an answer leaves: whole, or as a stream, and in both cases only as long as somebody listens. Knows ASGI
and errors, nothing of what is streamed. Used by the routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.errors import Aborted, OmniError
from runtime.server.calls import Call
from runtime.server.errors import internal_error
from runtime.server.settings import ServerSettings

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Pieces = AsyncGenerator[bytes, None]

STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Tell proxies to pass pieces on as they come."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, or Aborted after cancelling it when the client goes away. The body must be read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Aborted("the client closed the connection")
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamReply(Response):
    """A streamed answer: opens the call, waits a moment for the first piece so that an early error still has an
    honest status, sends the headers, then the pieces.

    A failure after the headers: `error_piece(error)` is sent and the body ends, or, without it, the connection
    is cut so that the client sees an incomplete transfer. So it is for a client that stopped reading. Raises
    OmniError only before the headers.
    """

    def __init__(
        self,
        open_call: Callable[[], Awaitable[Call]],
        pieces: Callable[[Call], Pieces],
        content_type: str,
        settings: ServerSettings,
        error_piece: Callable[[OmniError], bytes] | None = None,
        pause_piece: bytes = b"",
    ) -> None:
        super().__init__(None, headers={**STREAM_HEADERS, "Content-Type": content_type})
        del self.headers["content-length"]
        self._open_call = open_call
        self._pieces = pieces
        self._settings = settings
        self._error_piece = error_piece
        self._pause_piece = pause_piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(self.status_code, self.raw_headers, send, self._settings)
        try:
            await until_disconnect(receive, self._stream(body))
        except Aborted:
            if not body.started:
                raise

    async def _stream(self, body: _Body) -> None:
        async with await self._open_call() as call:
            try:
                await self._send_pieces(call, body)
            except Exception as exc:
                if not body.started:
                    raise
                await self._fail(exc, body)
            else:
                await body.finish()

    async def _send_pieces(self, call: Call, body: _Body) -> None:
        filler = asyncio.ensure_future(body.fill_silence(self._pause_piece))
        try:
            async with aclosing(self._pieces(call)) as pieces:
                async for piece in pieces:
                    await body.send(piece)
        finally:
            filler.cancel()
            await asyncio.gather(filler, return_exceptions=True)

    async def _fail(self, exc: Exception, body: _Body) -> None:
        if not isinstance(exc, OmniError):
            log.error("a stream failed", exc_info=exc)
        if self._error_piece is not None and not body.stalled:
            await body.send(self._error_piece(exc if isinstance(exc, OmniError) else internal_error()))
            await body.finish()


class _Body:
    """The status line with the first piece, then pieces; nothing more is sent unless asked for."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], send: Send, settings: ServerSettings) -> None:
        self.started = False
        self.stalled = False
        self._start_message = {"type": "http.response.start", "status": status, "headers": headers}
        self._send = send
        self._settings = settings
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._sent_s = self._clock()

    async def send(self, piece: bytes) -> None:
        """Aborted when the client does not read what it was sent."""
        try:
            async with self._lock, asyncio.timeout(self._settings.write_timeout_s):
                self._sent_s = self._clock()
                if not self.started:
                    await self._send(self._start_message)
                    self.started = True
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            self.stalled = True
            raise Aborted(f"the client read nothing for {self._settings.write_timeout_s:g} s") from None

    async def finish(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fill_silence(self, piece: bytes) -> None:
        """Send `piece`, with the headers if they wait, whenever nothing was sent for too long; until cancelled."""
        while True:
            patience_s = self._settings.keepalive_s if self.started else self._settings.headers_after_s
            left_s = self._sent_s + patience_s - self._clock()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self.send(piece)
