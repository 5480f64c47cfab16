"""Connector `inproc`: payloads between stages of one process, handed over by reference and never copied.

Small ones ride in the message as with every connector, so that they need neither bookkeeping nor a credit.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading

from runtime.connectors.base import ConnectorHealth, check_kind, inline_ref
from runtime.connectors.ledger import Ledger
from runtime.errors import ConnectorError
from runtime.messages import Ref
from runtime.payload import Payload, Tensor, pack, unpack

KIND = "inproc"


def _shared(payload: Payload) -> Payload:
    """The same tensors in a payload of one's own: no consumer can change what another one sees."""
    return Payload(
        payload.kind,
        payload.request_id,
        payload.epoch,
        payload.edge,
        payload.sequence,
        payload.last,
        dict(payload.meta),
        {name: _read_only(tensor) for name, tensor in payload.tensors.items()},
    )


def _read_only(tensor: Tensor) -> Tensor:
    view = tensor.view()
    view.flags.writeable = False
    return view


class InprocConnector:
    """Holds payloads until they are reclaimed. Adds no memory, so it has no capacity: the edges' credits bound it."""

    def __init__(self) -> None:
        self._arena = f"inproc-{os.getpid()}-{secrets.token_hex(4)}"
        self._tokens = itertools.count(1)
        self._payloads: Ledger[tuple[Payload, int]] = Ledger()
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._is_closed = False

    def put(self, payload: Payload) -> Ref:
        packed = pack(payload)
        if (ref := inline_ref(KIND, packed)) is not None:
            return ref
        ref = Ref(KIND, self._arena, next(self._tokens), size_bytes=packed.size_bytes)
        with self._lock:
            if self._is_closed:
                raise ConnectorError("connector inproc is closed; expected no put after it")
            self._used_bytes += packed.size_bytes
            self._payloads.add(payload.request_id, ref, (_shared(payload), packed.size_bytes))
        return ref

    def get(self, ref: Ref) -> Payload:
        check_kind(KIND, ref)
        if ref.inline is not None:
            return unpack(ref.inline)
        if ref.arena != self._arena:
            raise ConnectorError(f"payload {ref.token} of {ref.arena!r} is in another process than {self._arena!r}")
        if (found := self._payloads.find(ref)) is None:
            raise ConnectorError(f"payload {ref.token} of {ref.arena!r} is not there: it was reclaimed before this get")
        return _shared(found[0])

    def release(self, ref: Ref) -> None:
        """Nothing to do: references keep what they refer to."""

    def reclaim(self, ref: Ref) -> bool:
        entry = self._payloads.pop(ref)
        self._free([] if entry is None else [entry])
        return entry is not None

    def cleanup(self, request_id: str) -> None:
        self._free(self._payloads.pop_request(request_id))

    def trim(self) -> None:
        """Nothing to do: no memory is kept beyond the payloads."""

    def health(self) -> ConnectorHealth:
        return ConnectorHealth(KIND, capacity_bytes=0, used_bytes=self._used_bytes, num_payloads=len(self._payloads))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._free(self._payloads.pop_all())

    def _free(self, entries: list[tuple[Payload, int]]) -> None:
        with self._lock:
            self._used_bytes -= sum(size_bytes for _, size_bytes in entries)
