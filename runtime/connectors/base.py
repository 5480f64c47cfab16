"""The connector interface: moves payload bytes from a producer to a consumer.

Ownership: `put` makes memory that the producer's connector owns until `reclaim` (the consumer's credit came
back) or `cleanup` (the request is over). After `put` nobody changes the payload's tensors: they may have been
handed over by reference. `get` gives read-only views where memory is shared; they are valid until `release`.
A read error is an error at once, never "not there yet": the ref is the news that the payload is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.errors import ConnectorError
from runtime.messages import Ref
from runtime.payload import Packed, Payload

INLINE_BYTES = 16 << 10
"""Packed payloads up to this size ride inside the message."""


@dataclass(frozen=True, slots=True)
class ConnectorHealth:
    kind: str
    capacity_bytes: int
    """Most bytes that may be put and not reclaimed; 0 when the connector adds no memory of its own."""
    used_bytes: int
    num_payloads: int
    """Put by this process and not reclaimed. Inline payloads do not count."""
    reserved_bytes: int = 0
    """Shared memory that this process holds, used or not."""
    attached_bytes: int = 0
    """Shared memory of other processes that this process has mapped."""


class Connector(Protocol):
    """One instance a process and kind; producers and consumers of the process share it. Thread-safe."""

    def put(self, payload: Payload) -> Ref:
        """Store a payload. ConnectorError, with the bytes needed and free, when there is no room for it."""

    def get(self, ref: Ref) -> Payload:
        """The payload of a ref, as views. ConnectorError when it cannot be read."""

    def release(self, ref: Ref) -> None:
        """Consumer: views of this ref are no longer used."""

    def reclaim(self, ref: Ref) -> bool:
        """Producer: the consumer released the ref, its memory can be used again.

        False when it was free already, or is not ours: a late or doubled credit does no harm.
        """

    def cleanup(self, request_id: str) -> None:
        """Producer: free whatever of this request was put and not reclaimed.

        Called when no consumer works on the request any more: the memory is used again at once.
        """

    def trim(self) -> None:
        """Give back memory that has been idle, and let go of what other owners have given back.

        Called now and then, for instance with each beat; a process without traffic does it in no other way.
        """

    def health(self) -> ConnectorHealth: ...

    def close(self) -> None:
        """Free everything this process owns, also on disk."""


def inline_ref(kind: str, packed: Packed) -> Ref | None:
    """The ref that carries a payload small enough to ride in the message; None for larger ones."""
    if packed.size_bytes > INLINE_BYTES:
        return None
    return Ref(kind, size_bytes=packed.size_bytes, inline=packed.to_bytes())


def check_kind(kind: str, ref: Ref) -> None:
    if ref.connector != kind:
        raise ConnectorError(f"a ref of connector {ref.connector!r} was given to {kind!r}")
