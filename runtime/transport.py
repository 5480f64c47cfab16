"""Control channel: one ZeroMQ PULL inbox an owner, PUSH to anybody else's, over ipc sockets in a 0700 folder.

Knows nothing of what messages mean. An Outbox belongs to one thread; addresses carry the generation of
their owner, so a message for a dead replica never reaches its successor.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from runtime import messages
from runtime.messages import AnyMessage, Message

# A peer that has read nothing for this many messages is not coming back; what is sent to it is dropped.
MAX_UNSENT_MESSAGES = 200_000


SERVER_INBOX = "server"


def address_of(directory: Path, name: str) -> str:
    """ipc address of an inbox. Unix socket paths are limited to 107 bytes: keep directory and name short."""
    return f"ipc://{directory / name}"


def remove_inbox(address: str) -> None:
    """Remove the socket file of an owner that is gone: its peers then close their ends."""
    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


class Inbox:
    """Owns one bound PULL socket and its file. Damaged messages are counted and dropped, never raised."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.address = address
        self.num_damaged = 0
        self._unread: deque[AnyMessage] = deque()
        """Of a batch that was begun."""
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)

    def fileno(self) -> int:
        """Edge-triggered: after each wake-up read until `drain` is empty."""
        return int(self._socket.getsockopt(zmq.FD))

    def wait(self, timeout_s: float | None) -> bool:
        """Block until something can be read; False when the time is up. None waits without limit."""
        return bool(self._unread) or bool(
            self._socket.poll(None if timeout_s is None else max(0, round(timeout_s * 1000)))
        )

    def drain(self, limit: int) -> Iterator[AnyMessage]:
        """Messages that are there now, at most `limit`."""
        while limit and (self._unread or self._receive()):
            limit -= 1
            yield self._unread.popleft()

    def _receive(self) -> bool:
        """Take in the next batch; False when there is none now."""
        while True:
            try:
                self._unread.extend(messages.decode_batch(self._socket.recv(zmq.NOBLOCK)))
                return True
            except zmq.Again:
                return False
            except msgspec.MsgspecError:
                self.num_damaged += 1

    def close(self) -> None:
        self._socket.close()
        remove_inbox(self.address)


class Outbox:
    """PUSH sockets by address, opened on first use. Never blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._collected: dict[str, list[Message]] = {}
        self.num_dropped = 0

    def collect(self, address: str, message: Message) -> None:
        """To leave with the next `flush`, in this order: many messages for the price of few.

        What is sent to the same address by `send` in between overtakes them.
        """
        self._collected.setdefault(address, []).append(message)

    def flush(self) -> None:
        """Send what was collected, one transfer an address."""
        collected, self._collected = self._collected, {}
        for address, batch in collected.items():
            socket = self._sockets.get(address) or self._open(address)
            try:
                socket.send(messages.encode_batch(batch), zmq.NOBLOCK)
            except zmq.Again:
                self.num_dropped += len(batch)

    def send(self, address: str, message: Message) -> bool:
        """False when the message was dropped because the peer does not read."""
        socket = self._sockets.get(address) or self._open(address)
        try:
            socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.num_dropped += 1
            return False
        return True

    def _open(self, address: str) -> zmq.Socket[bytes]:
        self._close_gone()
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MAX_UNSENT_MESSAGES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        self._sockets[address] = socket
        return socket

    def _close_gone(self) -> None:
        """The sockets of peers that are gone."""
        for address in [a for a in self._sockets if not self.reaches(a)]:
            self._sockets.pop(address).close()

    def reaches(self, address: str) -> bool:
        """Whether the owner of an inbox is still there."""
        return os.path.exists(address.removeprefix("ipc://"))

    def close(self, linger_s: float = 0.0) -> None:
        for socket in self._sockets.values():
            socket.close(round(linger_s * 1000))
        self._sockets.clear()
