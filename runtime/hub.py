"""The server's end of the control channel, on its event loop. Takes messages in bounded bursts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import zmq

from runtime.messages import AnyMessage, Message
from runtime.transport import SERVER_INBOX, Inbox, Outbox, address_of

log = logging.getLogger(__name__)

MAX_BURST = 512
"""Messages handled before the event loop gets its turn."""


class Hub:
    def __init__(self, directory: Path, handle: Callable[[AnyMessage], None]) -> None:
        self._handle = handle
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = Inbox(self._context, address_of(directory, SERVER_INBOX))
        self._outbox = Outbox(self._context)
        self._loop = asyncio.get_running_loop()
        self._fileno = self._inbox.fileno()
        self._loop.add_reader(self._fileno, self._read)
        self._loop.call_soon(self._read)
        self._closed = False

    @property
    def address(self) -> str:
        return self._inbox.address

    def send(self, address: str, message: Message) -> None:
        self._outbox.send(address, message)

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._fileno)
        self._inbox.close()
        self._outbox.close()
        self._context.term()

    def _read(self) -> None:
        """The descriptor is edge-triggered, so a burst that was cut short is continued without a new edge."""
        if self._closed:
            return
        count = 0
        for message in self._inbox.drain(MAX_BURST):
            count += 1
            try:
                self._handle(message)
            except Exception:
                # one bad message must not take the orchestrator, and with it everybody's requests, along
                log.exception("message %s was not handled", type(message).__name__)
        if count == MAX_BURST:
            self._loop.call_soon(self._read)
