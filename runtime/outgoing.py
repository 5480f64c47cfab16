"""What a replica sends: payloads to consumers, in order per edge, within each edge's credit.

Belongs to one stage loop and its thread. A payload that does not fit its edge's capacity waits here, and with
it everything behind it on that edge; the engine makes nothing more of these requests meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.connectors.base import INLINE_BYTES
from runtime.connectors.credits import EdgeCredits
from runtime.errors import ConnectorError
from runtime.exchange import Exchange
from runtime.messages import Message, Output, Piece, Ref, Target
from runtime.payload import Payload
from runtime.transport import Outbox

CLIENT_EDGE = "client"
"""Edge name of outputs that go to the server for the client."""


@dataclass(slots=True)
class _Channel:
    """Everything to one consumer of one edge. An entry is a payload or a message that must come after it."""

    credits: EdgeCredits
    waiting: deque[tuple[str, Target, Payload | Message]] = field(default_factory=deque)


@dataclass(slots=True)
class Held:
    """A request with output that waits for room: since when, and how many entries."""

    since_s: float
    num_entries: int = 0


class Outgoing:
    """Collects in the outbox, whose owner flushes it. `failed(request_id, error)` is called when a payload could not be
    stored; `released(request_id, seconds)` when nothing of a request waits any more."""

    def __init__(
        self,
        *,
        stage: str,
        reply: str,
        outbox: Outbox,
        exchange: Exchange,
        failed: Callable[[str, ConnectorError], None],
        released: Callable[[str, float], None],
    ) -> None:
        self._stage, self._reply = stage, reply
        self._outbox, self._exchange = outbox, exchange
        self._failed, self._released = failed, released
        self._channels: dict[tuple[str, str], _Channel] = {}
        self._in_flight: dict[tuple[str, str, int], tuple[str, _Channel, int]] = {}
        """(connector, arena, token) -> request, channel and credited bytes of payloads not yet released."""
        self.held: dict[str, Held] = {}
        """Requests whose output waits here."""
        self.edge_bytes: dict[str, int] = {}

    def post(self, target: Target, payload: Payload) -> None:
        """Send a payload, now or when its edge has room. The header must be final."""
        self._enqueue(payload.request_id, target, payload)

    def post_message(self, request_id: str, target: Target, message: Message) -> None:
        """Send a control message behind the payloads that wait for the same consumer."""
        self._enqueue(request_id, target, message)

    def credit(self, ref: Ref) -> None:
        """A consumer is done with a payload."""
        self._exchange.reclaim(ref)
        entry = self._in_flight.pop((ref.connector, ref.arena, ref.token), None)
        if entry is not None:
            _, channel, size_bytes = entry
            channel.credits.give(size_bytes)
            self._flush(channel)

    def forget(self, request_id: str) -> None:
        """Drop what waits for a request and free what is stored for it."""
        for channel in self._channels.values():
            if any(entry[0] == request_id for entry in channel.waiting):
                channel.waiting = deque(entry for entry in channel.waiting if entry[0] != request_id)
        self.held.pop(request_id, None)
        for key in [k for k, entry in self._in_flight.items() if entry[0] == request_id]:
            _, channel, size_bytes = self._in_flight.pop(key)
            channel.credits.give(size_bytes)
        self._exchange.cleanup(request_id)
        for channel in list(self._channels.values()):
            self._flush(channel)

    def _enqueue(self, request_id: str, target: Target, item: Payload | Message) -> None:
        key = (target.edge, target.address)
        channel = self._channels.get(key)
        if channel is None:
            self._drop_gone()
            channel = self._channels[key] = _Channel(EdgeCredits(target.capacity_bytes))
        if channel.waiting or not self._take(channel, item):
            channel.waiting.append((request_id, target, item))
            self.held.setdefault(request_id, Held(time.monotonic())).num_entries += 1
        else:
            self._send(channel, target, item)

    def _drop_gone(self) -> None:
        """Consumers that were replaced have a new address; nothing waits for the old one any more."""
        gone = [key for key, c in self._channels.items() if not c.waiting and not self._outbox.reaches(key[1])]
        for key in gone:
            del self._channels[key]

    def _flush(self, channel: _Channel) -> None:
        while channel.waiting:
            request_id, target, item = channel.waiting[0]
            if not self._take(channel, item):
                return
            channel.waiting.popleft()
            held = self.held[request_id]
            held.num_entries -= 1
            if not held.num_entries:
                del self.held[request_id]
                self._released(request_id, time.monotonic() - held.since_s)
            self._send(channel, target, item)

    @staticmethod
    def _take(channel: _Channel, item: Payload | Message) -> bool:
        return isinstance(item, Message) or channel.credits.take(_credited_bytes(item))

    def _send(self, channel: _Channel, target: Target, item: Payload | Message) -> None:
        if isinstance(item, Message):
            self._outbox.collect(target.address, item)
        else:
            self._send_payload(channel, target, item)

    def _send_payload(self, channel: _Channel, target: Target, payload: Payload) -> None:
        size_bytes = _credited_bytes(payload)
        try:
            ref = self._exchange.put(target.connector, payload)
        except ConnectorError as exc:
            channel.credits.give(size_bytes)
            self._failed(payload.request_id, exc)
            return
        if ref.inline is None:
            self._in_flight[ref.connector, ref.arena, ref.token] = (payload.request_id, channel, size_bytes)
        self.edge_bytes[target.edge] = self.edge_bytes.get(target.edge, 0) + ref.size_bytes
        reply = "" if ref.inline is not None else self._reply
        message: Message
        if target.edge == CLIENT_EDGE:
            message = Output(payload.request_id, payload.epoch, self._stage, payload.sequence, ref, reply)
        else:
            message = Piece(payload.request_id, payload.epoch, payload.edge, payload.sequence, payload.last, ref, reply)
        self._outbox.collect(target.address, message)


def _credited_bytes(payload: Payload) -> int:
    """What a payload takes of its edge's capacity: nothing when it rides in the message."""
    return payload.size_bytes if payload.size_bytes > INLINE_BYTES else 0
