"""What a replica sends: payloads to consumers, in order per edge, within each edge's credit.

Belongs to one stage loop and its thread. A payload that does not fit its edge's capacity waits here, and with
it everything behind it on that edge; the loop does not step its engine meanwhile.
"""

from __future__ import annotations

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


class Outgoing:
    """`failed(request_id, error)` is called when a payload could not be stored."""

    def __init__(
        self,
        *,
        stage: str,
        reply: str,
        outbox: Outbox,
        exchange: Exchange,
        failed: Callable[[str, ConnectorError], None],
    ) -> None:
        self._stage, self._reply = stage, reply
        self._outbox, self._exchange, self._failed = outbox, exchange, failed
        self._channels: dict[tuple[str, str], _Channel] = {}
        self._in_flight: dict[tuple[str, str, int], tuple[str, _Channel, int]] = {}
        """(connector, arena, token) -> request, channel and credited bytes of payloads not yet released."""
        self.edge_bytes: dict[str, int] = {}

    @property
    def blocked(self) -> bool:
        return any(channel.waiting for channel in self._channels.values())

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
        channel.waiting.append((request_id, target, item))
        self._flush(channel)

    def _drop_gone(self) -> None:
        """Consumers that were replaced have a new address; nothing waits for the old one any more."""
        gone = [key for key, c in self._channels.items() if not c.waiting and not self._outbox.reaches(key[1])]
        for key in gone:
            del self._channels[key]

    def _flush(self, channel: _Channel) -> None:
        while channel.waiting:
            request_id, target, item = channel.waiting[0]
            if isinstance(item, Message):
                channel.waiting.popleft()
                self._outbox.send(target.address, item)
                continue
            size_bytes = item.size_bytes if item.size_bytes > INLINE_BYTES else 0
            if size_bytes and not channel.credits.take(size_bytes):
                return
            channel.waiting.popleft()
            self._send(channel, target, item, size_bytes)

    def _send(self, channel: _Channel, target: Target, payload: Payload, size_bytes: int) -> None:
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
        self._outbox.send(target.address, message)
