"""Payloads: what travels on an edge. A small header and named tensors; packed without pickle.

Packed form: 4 bytes little-endian header length, msgpack header, zero padding to 64 bytes, then each
tensor's bytes in C order, each start aligned to 64 bytes. Unpacking makes views into the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.errors import ConnectorError

ALIGNMENT = 64
Tensor = npt.NDArray[Any]


class Payload(msgspec.Struct):
    """Typed data of one request on one edge.

    tensors: name -> array of any shape with a plain numeric dtype. meta: small msgpack-able facts
    (text, sample rate). sequence counts pieces of this request on this edge from 0; `last` is set on
    exactly one piece, after which nothing follows. An empty last piece is legal.
    """

    kind: str
    request_id: str
    epoch: int = 0
    edge: str = ""
    sequence: int = 0
    last: bool = False
    meta: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


class _TensorHeader(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class _Header(msgspec.Struct, array_like=True):
    kind: str
    request_id: str
    epoch: int
    edge: str
    sequence: int
    last: bool
    meta: dict[str, Any]
    tensors: list[_TensorHeader]


_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(_Header).decode


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Packed:
    """A payload laid out but not yet copied: ask `size_bytes`, then `write_into` a buffer of that size."""

    __slots__ = ("_arrays", "_header", "size_bytes")

    def __init__(self, payload: Payload) -> None:
        self._arrays: list[tuple[int, Tensor]] = []
        headers, offset = [], 0
        for name, tensor in payload.tensors.items():
            array = np.ascontiguousarray(tensor)
            if array.dtype.hasobject or array.dtype.kind in "OV":
                raise ConnectorError(f"payload {payload.edge}: tensor {name!r} has dtype {array.dtype}; expected a number")
            headers.append(_TensorHeader(name, array.dtype.str, tensor.shape, offset, array.nbytes))
            self._arrays.append((offset, array))
            offset = _align(offset + array.nbytes)
        header = _encode_header(
            _Header(
                payload.kind,
                payload.request_id,
                payload.epoch,
                payload.edge,
                payload.sequence,
                payload.last,
                payload.meta,
                headers,
            )
        )
        self._header = len(header).to_bytes(4, "little") + header
        self.size_bytes = _align(len(self._header)) + offset

    def write_into(self, buffer: memoryview) -> None:
        buffer[: len(self._header)] = self._header
        base = _align(len(self._header))
        for offset, array in self._arrays:
            if array.nbytes:
                start = base + offset
                buffer[start : start + array.nbytes] = memoryview(array.reshape(-1).view(np.uint8))

    def to_bytes(self) -> bytes:
        out = bytearray(self.size_bytes)
        self.write_into(memoryview(out))
        return bytes(out)


def pack(payload: Payload) -> Packed:
    return Packed(payload)


def unpack(buffer: bytes | memoryview) -> Payload:
    """Views into `buffer`, which must outlive the payload. ConnectorError when the bytes are not a payload."""
    view = memoryview(buffer)
    try:
        length = int.from_bytes(view[:4], "little")
        header = _decode_header(view[4 : 4 + length])
        base = _align(4 + length)
        tensors = {t.name: _view(view, base, t) for t in header.tensors}
    except (msgspec.MsgspecError, ValueError, TypeError) as exc:
        raise ConnectorError(f"damaged payload of {len(view)} bytes: {exc}") from exc
    return Payload(
        header.kind,
        header.request_id,
        header.epoch,
        header.edge,
        header.sequence,
        header.last,
        header.meta,
        tensors,
    )


def _view(view: memoryview, base: int, t: _TensorHeader) -> Tensor:
    raw = view[base + t.offset : base + t.offset + t.size_bytes]
    return np.frombuffer(raw, dtype=np.dtype(t.dtype)).reshape(t.shape)


def join_text(pieces: Iterable[Payload]) -> str:
    """The text of `text` payloads in order."""
    return "".join(p.meta.get("text", "") for p in pieces)
