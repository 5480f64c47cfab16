"""All connectors of one process behind one face: picks the connector by the edge's kind or the ref's.

Used by stage loops and by the server. Knows nothing of requests beyond their ids.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.connectors.base import Connector, ConnectorHealth
from runtime.errors import ConnectorError
from runtime.messages import Ref
from runtime.payload import Payload


class Exchange:
    def __init__(self, connectors: Mapping[str, Connector]) -> None:
        self._connectors = dict(connectors)

    def put(self, kind: str, payload: Payload) -> Ref:
        return self._of(kind).put(payload)

    def take(self, ref: Ref) -> Payload:
        """The payload in memory that belongs to the caller; the ref is released.

        Copies where the connector shares memory with its producer, so that a producer's memory is free as
        soon as its consumer has taken the data and no engine can ever read memory that was given away.
        """
        connector = self._of(ref.connector)
        payload = connector.get(ref)
        if ref.inline is None and ref.connector != "inproc":
            payload.tensors = {name: tensor.copy() for name, tensor in payload.tensors.items()}
        connector.release(ref)
        return payload

    def reclaim(self, ref: Ref) -> None:
        self._of(ref.connector).reclaim(ref)

    def cleanup(self, request_id: str) -> None:
        for connector in self._connectors.values():
            connector.cleanup(request_id)

    def trim(self) -> None:
        """Give idle memory back; called with each beat."""
        for connector in self._connectors.values():
            connector.trim()

    def health(self) -> list[ConnectorHealth]:
        return [connector.health() for connector in self._connectors.values()]

    @property
    def used_bytes(self) -> int:
        """Of the payloads that were put and not reclaimed yet."""
        return sum(health.used_bytes for health in self.health())

    def close(self) -> None:
        for connector in self._connectors.values():
            connector.close()

    def _of(self, kind: str) -> Connector:
        try:
            return self._connectors[kind]
        except KeyError:
            raise ConnectorError(f"connector {kind!r} is not open here; open: {', '.join(self._connectors)}") from None
