"""Payloads survive packing whatever their tensors look like, and damaged bytes are refused, never guessed."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ConnectorError
from runtime.payload import ALIGNMENT, DTYPES, Payload, join_text, pack, unpack

LAYOUTS = {
    "contiguous": lambda array: array,
    "transposed": lambda array: array.T,
    "fortran": np.asfortranarray,
    "every second": lambda array: np.repeat(array, 2, axis=0)[::2] if array.ndim else array,
    "reversed": lambda array: array[::-1] if array.ndim else array,
    "broadcast": lambda array: np.broadcast_to(array, (3, *array.shape)),
}

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8)
)
metas = st.dictionaries(
    st.text(max_size=8),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)),
    max_size=4,
)


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Any numbers, given by their bytes, so NaNs of every kind are among them."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    count = int(np.prod(shape, dtype=np.int64))
    data = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(count * dtype.itemsize)
    array = np.frombuffer(data, dtype).reshape(shape)
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](array)


payloads = st.builds(
    Payload,
    kind=st.text(max_size=8),
    request_id=st.text(max_size=8),
    epoch=st.integers(0, 2**40),
    edge=st.text(max_size=8),
    sequence=st.integers(0, 2**40),
    last=st.booleans(),
    meta=metas,
    tensors=st.dictionaries(st.text(max_size=8), tensors(), max_size=2),
)


def facts(payload: Payload) -> dict[str, Any]:
    """Comparable form, tensors by their bytes."""
    fields = {f: getattr(payload, f) for f in payload.__struct_fields__}
    fields["tensors"] = {n: (t.dtype.str, t.shape, t.tobytes()) for n, t in payload.tensors.items()}
    return fields


def example() -> Payload:
    return Payload(
        "latents",
        "request-1",
        2,
        "talker->code2wav",
        7,
        True,
        {"text": "so be it", "segment": 3},
        {
            "latents": np.arange(26, dtype="<f4").reshape(13, 2),
            "f0": np.full(5, 220.0),
            "none": np.zeros((0, 4), "<i2"),
        },
    )


@settings(max_examples=120, deadline=None)
@given(payloads)
def test_a_payload_survives_packing(payload: Payload) -> None:
    packed = pack(payload)
    data = packed.to_bytes()
    assert len(data) == packed.size_bytes
    restored = unpack(data)
    assert facts(restored) == facts(payload)
    assert restored.size_bytes == payload.size_bytes


def test_writing_needs_exactly_the_announced_bytes() -> None:
    packed = pack(example())
    buffer = bytearray(b"\xaa" * (packed.size_bytes + 64))
    packed.write_into(memoryview(buffer)[: packed.size_bytes])
    assert buffer[packed.size_bytes :] == b"\xaa" * 64
    assert facts(unpack(bytes(buffer[: packed.size_bytes]))) == facts(example())


def test_unpacked_tensors_are_aligned_read_only_views() -> None:
    whole = np.zeros(pack(example()).size_bytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    buffer = memoryview(whole)[start : start + pack(example()).size_bytes]
    pack(example()).write_into(buffer)
    for tensor in unpack(buffer.toreadonly()).tensors.values():
        assert not tensor.flags.writeable
        assert tensor.size == 0 or np.shares_memory(tensor, whole)
        assert tensor.size == 0 or tensor.ctypes.data % ALIGNMENT == 0
        assert not tensor.flags.owndata


@pytest.mark.parametrize(
    "tensor",
    [
        np.array([{}], dtype=object),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array(["2026-01-01"], dtype="M8[s]"),
        np.zeros(2, dtype=[("a", "<f4")]),
        np.zeros(2, dtype="V2"),
        np.zeros(2, dtype=np.longdouble),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_what_is_not_a_plain_number_is_refused(tensor: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ConnectorError, match=r"edge 'a->b': tensor 'x' has dtype .*; expected one of"):
        pack(Payload("latents", "r", edge="a->b", tensors={"x": tensor}))


@pytest.mark.parametrize("value", [object(), np.float32(1), 2**64, "\ud800"], ids=lambda value: type(value).__name__)
def test_meta_that_cannot_travel_is_refused(value: object) -> None:
    with pytest.raises(ConnectorError, match="edge 'a->b': header or meta cannot be packed"):
        pack(Payload("text", "r", edge="a->b", meta={"value": value}))


def test_meta_that_holds_itself_is_refused() -> None:
    meta: dict[str, Any] = {}
    meta["again"] = meta
    with pytest.raises(ConnectorError, match="cannot be packed"):
        pack(Payload("text", "r", meta=meta))


def test_every_truncation_is_refused() -> None:
    data = pack(example()).to_bytes()
    end = max(i for i, byte in enumerate(data) if byte) + 1  # what follows is padding
    for length in range(end):
        with pytest.raises(ConnectorError, match=f"damaged payload of {length} bytes"):
            unpack(data[:length])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bytes_give_a_payload_or_a_connector_error(data: st.DataObject) -> None:
    packed = bytearray(pack(example()).to_bytes())
    for position in data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=4)):
        packed[position] = data.draw(st.integers(0, 255))
    try:
        restored = unpack(bytes(packed))
    except ConnectorError:
        return
    assert isinstance(restored, Payload)
    assert restored.size_bytes <= len(packed) * len(restored.tensors)


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ConnectorError, match="damaged payload"):
        unpack(data)


def damaged_header(name: str, dtype: str, shape: list[int], offset: int, size_bytes: int) -> bytes:
    header = msgspec.msgpack.encode(["k", "r", 0, "", 0, False, {}, [[name, dtype, shape, offset, size_bytes]]])
    return len(header).to_bytes(4, "little") + header.ljust(200, b"\0")


@pytest.mark.parametrize(
    "tensor",
    [
        ("x", "|O", [1], 0, 8),
        ("x", "<f4,<f4", [1], 0, 8),
        ("x", "nonsense", [1], 0, 8),
        ("x", "<f4", [2], 0, 4),
        ("x", "<f4", [-1], 0, 4),
        ("x", "<f4", [-1, -1], 0, 4),
        ("x", "<f4", [1], -64, 4),
        ("x", "<f4", [1], 1 << 40, 4),
        ("x", "<f4", [1 << 62, 1 << 62], 0, 4),
        ("x", "<f4", [0, 1 << 63], 0, 0),
        ("x", "<f4", [1] * 100, 0, 4),
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(tensor: tuple[str, str, list[int], int, int]) -> None:
    with pytest.raises(ConnectorError, match="damaged payload"):
        unpack(damaged_header(*tensor))


def test_an_honest_header_made_the_same_way_is_accepted() -> None:
    assert unpack(damaged_header("x", "<f4", [2], 0, 8)).tensors["x"].shape == (2,)


def test_a_header_that_nests_without_end_is_refused() -> None:
    header = b"\x98\xa1k\xa1r\x00\xa0\x00\xc2\x81\xa1a" + b"\x91" * 100_000
    with pytest.raises(ConnectorError, match="damaged payload"):
        unpack(len(header).to_bytes(4, "little") + header)


def test_text_pieces_are_joined_in_order() -> None:
    pieces = [
        Payload("text", "r", meta={"text": "to "}),
        Payload("text", "r", meta={"text": "be"}),
        Payload("text", "r"),
    ]
    assert join_text(pieces) == "to be"
