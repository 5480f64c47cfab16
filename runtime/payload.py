"""Payloads: what travels on an edge. A small header and named tensors; packed without pickle.

Packed form: 4 bytes little-endian header length, msgpack header, zero padding to 64 bytes, then each
tensor's bytes in C order, each start aligned to 64 bytes. Unpacking makes views into the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.errors import ConnectorError

ALIGNMENT = 64
SMALL_BYTES = 4096
"""Tensors up to this size are copied the way that costs least to begin with."""
Tensor = npt.NDArray[Any]

_PORTABLE = "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16"
DTYPES = {d.str: d for code in _PORTABLE.split() for order in "<>" for d in [np.dtype(code).newbyteorder(order)]}  # type: ignore[arg-type]
"""What a tensor may hold, by numpy's name: plain numbers whose bytes mean the same everywhere."""


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
    """A payload laid out but not yet copied: ask `size_bytes`, then `write_into` a buffer of that size.

    Holds the payload's tensors, not copies of them. ConnectorError when a dtype or a meta value cannot travel.
    """

    __slots__ = ("_header", "_tensors", "size_bytes")

    def __init__(self, payload: Payload) -> None:
        self._tensors: list[tuple[int, Tensor]] = []
        headers, offset = [], 0
        for name, tensor in payload.tensors.items():
            if tensor.dtype.str not in DTYPES:
                raise ConnectorError(
                    f"{_label(payload)}: tensor {name!r} has dtype {tensor.dtype}; expected one of {', '.join(DTYPES)}",
                    hint="send other number formats as a view of unsigned integers",
                )
            headers.append(_TensorHeader(name, tensor.dtype.str, tensor.shape, offset, tensor.nbytes))
            self._tensors.append((offset, tensor))
            offset = _align(offset + tensor.nbytes)
        header = _packed_header(payload, headers)
        self._header = len(header).to_bytes(4, "little") + header
        self.size_bytes = _align(len(self._header)) + offset

    def write_into(self, buffer: memoryview | bytearray) -> None:
        buffer[: len(self._header)] = self._header
        base = _align(len(self._header))
        for offset, tensor in self._tensors:
            if tensor.nbytes <= SMALL_BYTES:
                start = base + offset
                buffer[start : start + tensor.nbytes] = tensor.tobytes()
            else:
                target = np.frombuffer(buffer, tensor.dtype, tensor.size, base + offset).reshape(tensor.shape)
                # numpy releases the interpreter lock while it copies; assigning to a memoryview does not
                np.copyto(target, tensor)

    def to_bytes(self) -> bytes:
        out = bytearray(self.size_bytes)
        self.write_into(out)
        return bytes(out)


def _label(payload: Payload) -> str:
    return f"payload {payload.kind!r} of request {payload.request_id} on edge {payload.edge!r}"


def _packed_header(payload: Payload, tensors: list[_TensorHeader]) -> bytes:
    p = payload
    header = _Header(p.kind, p.request_id, p.epoch, p.edge, p.sequence, p.last, p.meta, tensors)
    try:
        return _encode_header(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ConnectorError(f"{_label(payload)}: header or meta cannot be packed: {exc}") from exc


def pack(payload: Payload) -> Packed:
    return Packed(payload)


def unpack(buffer: bytes | memoryview) -> Payload:
    """Read-only views into a read-only `buffer`, which they keep alive. ConnectorError when it holds no payload."""
    view = memoryview(buffer)
    try:
        length = int.from_bytes(view[:4], "little")
        if 4 + length > len(view):
            raise ValueError(f"its header would have {length} bytes")
        header = _decode_header(view[4 : 4 + length])
        base = _align(4 + length)
        tensors = {t.name: _view(view, base, t) for t in header.tensors}
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as exc:
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
    dtype = DTYPES.get(t.dtype)
    if dtype is None:
        raise ValueError(f"tensor {t.name!r} has the unknown dtype {t.dtype!r}")
    if min(t.shape, default=0) < 0 or math.prod(t.shape) * dtype.itemsize != t.size_bytes:
        raise ValueError(f"tensor {t.name!r} of shape {t.shape} cannot have {t.size_bytes} bytes")
    if t.offset < 0 or (t.size_bytes and base + t.offset + t.size_bytes > len(view)):
        raise ValueError(f"tensor {t.name!r} ends outside of it")
    raw = view[base + t.offset : base + t.offset + t.size_bytes]
    return np.frombuffer(raw, dtype=dtype).reshape(t.shape)


def join_text(pieces: Iterable[Payload]) -> str:
    """The text of `text` payloads in order."""
    return "".join(p.meta.get("text", "") for p in pieces)
