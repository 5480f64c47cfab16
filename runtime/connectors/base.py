"""The connector interface: moves payload bytes from a producer to a consumer.

Ownership: `put` makes memory that the producer's connector owns until `reclaim` (the consumer's credit came
back) or `cleanup` (the request is over). `get` gives views where memory is shared; they are valid until
`release`. A read error is an error, never "not there yet".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.messages import Ref
from runtime.payload import Payload

INLINE_BYTES = 16 << 10
"""Packed payloads up to this size ride inside the message."""


@dataclass(frozen=True, slots=True)
class ConnectorHealth:
    kind: str
    capacity_bytes: int
    used_bytes: int
    num_payloads: int


class Connector(Protocol):
    """One instance a process and kind; producers and consumers of the process share it. Thread-safe."""

    def put(self, payload: Payload) -> Ref:
        """Store a payload. ConnectorError, with the bytes needed and free, when there is no room for it."""

    def get(self, ref: Ref) -> Payload:
        """The payload of a ref, as views. ConnectorError when it cannot be read."""

    def release(self, ref: Ref) -> None:
        """Consumer: views of this ref are no longer used."""

    def reclaim(self, ref: Ref) -> None:
        """Producer: the consumer released the ref, its memory can be used again. Idempotent."""

    def cleanup(self, request_id: str) -> None:
        """Producer: free whatever of this request was put and not reclaimed."""

    def health(self) -> ConnectorHealth: ...

    def close(self) -> None:
        """Free everything this process owns, also on disk."""
