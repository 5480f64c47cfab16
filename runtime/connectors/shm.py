"""Connector `shm`: payloads between processes of one machine through pooled shared memory.

The producer copies a payload once into its arena; consumers look at it in place. There is no file, lock or
waiting per payload: the message that carries the ref wakes the consumer, and the consumer's credit frees the
memory. See `segment` for the format, `arena` for the memory and `runtime.sweep` for what dead owners leave.
"""

from __future__ import annotations

import itertools

from runtime.connectors.arena import Arena, ShmSettings, Slot
from runtime.connectors.attachments import Attachments
from runtime.connectors.base import ConnectorHealth, check_kind, inline_ref
from runtime.connectors.ledger import Ledger
from runtime.messages import Ref
from runtime.payload import Payload, pack, unpack

KIND = "shm"


class ShmConnector:
    """Producer and consumer in one: a process that only gets makes no files."""

    def __init__(self, settings: ShmSettings) -> None:
        self._settings = settings
        self._arena = Arena(settings)
        self._attachments = Attachments(settings.folder)
        self._slots: Ledger[Slot] = Ledger()
        self._tokens = itertools.count(1)

    def put(self, payload: Payload) -> Ref:
        packed = pack(payload)
        if (ref := inline_ref(KIND, packed)) is not None:
            return ref
        slot = self._arena.allocate(packed.size_bytes)
        ref = Ref(KIND, slot.segment.name, next(self._tokens), slot.offset, packed.size_bytes)
        try:
            slot.write(ref.token, packed)
        except BaseException:
            self._arena.free(slot)
            raise
        self._slots.add(payload.request_id, ref, slot)
        return ref

    def get(self, ref: Ref) -> Payload:
        check_kind(KIND, ref)
        if ref.inline is not None:
            return unpack(ref.inline)
        return unpack(self._attachments.find(ref.arena).view(ref))

    def release(self, ref: Ref) -> None:
        """Nothing to do here: the message with the credit tells the owner."""

    def reclaim(self, ref: Ref) -> bool:
        if (slot := self._slots.pop(ref)) is None:
            return False
        self._arena.free(slot)
        return True

    def cleanup(self, request_id: str) -> None:
        for slot in self._slots.pop_request(request_id):
            self._arena.free(slot)

    def trim(self) -> None:
        self._arena.trim()
        self._attachments.trim()

    def health(self) -> ConnectorHealth:
        return ConnectorHealth(
            KIND,
            capacity_bytes=self._settings.capacity_bytes,
            used_bytes=self._arena.used_bytes,
            num_payloads=len(self._slots),
            reserved_bytes=self._arena.reserved_bytes,
            attached_bytes=self._attachments.attached_bytes,
        )

    def close(self) -> None:
        self._arena.close()
        self._attachments.close()
        self._slots.pop_all()
