"""Every control message survives the wire, and what is not one of ours is refused with one kind of error."""

from __future__ import annotations

import contextlib
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.messages import AnyMessage, Message, Ref, StageStats, Submit, Target, decode, encode

MESSAGES: tuple[type[Message], ...] = typing.get_args(AnyMessage)

numbers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
texts = st.text(max_size=8)
values = st.recursive(
    st.none() | st.booleans() | numbers | floats | texts | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)

STRATEGIES: dict[Any, st.SearchStrategy[Any]] = {
    str: texts,
    int: numbers,
    float: floats,
    bool: st.booleans(),
    bytes: st.binary(max_size=32),
    dict[str, Any]: st.dictionaries(texts, values, max_size=3),
    dict[str, float]: st.dictionaries(texts, floats, max_size=3),
    dict[str, int]: st.dictionaries(texts, numbers, max_size=3),
    list[str]: st.lists(texts, max_size=3),
}


def of_type(wanted: Any) -> st.SearchStrategy[Any]:
    if wanted in STRATEGIES:
        return STRATEGIES[wanted]
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        hints = typing.get_type_hints(wanted)
        return st.builds(wanted, **{f: of_type(hints[f]) for f in wanted.__struct_fields__})
    if type(None) in (members := typing.get_args(wanted)):
        return st.none() | of_type(next(m for m in members if m is not type(None)))
    if typing.get_origin(wanted) is dict:
        return st.dictionaries(texts, of_type(members[1]), max_size=2)
    (member,) = members
    return st.lists(of_type(member), max_size=2)


messages = st.one_of([of_type(cls) for cls in MESSAGES])


def a_submit() -> Submit:
    target = Target("thinker->talker", "text", "chunked", "shm", "ipc:///tmp/inbox", 1 << 20)
    return Submit("request-1", 3, {"max_tokens": 5, "stop": ["."]}, ["request"], [target])


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_message_survives_the_wire(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(of_type(cls))
    restored = decode(encode(message))
    assert type(restored) is cls
    assert restored == message


def test_every_message_class_can_be_decoded() -> None:
    assert set(Message.__subclasses__()) == set(MESSAGES)
    tags = [cls.__struct_config__.tag for cls in MESSAGES]
    assert len(set(tags)) == len(tags)


def test_messages_and_refs_cannot_be_changed() -> None:
    for cls in (*MESSAGES, Ref, Target, StageStats):
        assert cls.__struct_config__.frozen, cls


def test_every_truncation_is_refused() -> None:
    data = encode(a_submit())
    for length in range(len(data)):
        with pytest.raises(msgspec.MsgspecError):
            decode(data[:length])


@settings(max_examples=200, deadline=None)
@given(messages, st.data())
def test_damaged_bytes_give_a_message_or_a_msgspec_error(message: Message, data: st.DataObject) -> None:
    encoded = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(msgspec.MsgspecError):
        assert isinstance(decode(bytes(encoded)), Message)


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(data)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"type": "unknown", "request_id": "r"},
        {"type": "abort", "request_id": "r"},
        {"type": "abort", "request_id": 7, "epoch": 0},
        {"type": "abort", "request_id": "r", "epoch": "0"},
        {"type": "piece", "request_id": "r", "epoch": 0, "edge": "e", "sequence": 0, "last": True, "ref": []},
    ],
    ids=str,
)
def test_unknown_tags_missing_fields_and_wrong_types_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(msgspec.msgpack.encode(fields))


def test_nesting_without_end_is_refused() -> None:
    start = msgspec.msgpack.encode({"type": "ready", "stage": "s", "index": 0, "generation": 0, "address": "a"})
    assert start[0] == 0x85
    nested = b"\x86" + start[1:] + b"\xa5facts\x81\xa1a" + b"\x91" * 100_000
    with pytest.raises(msgspec.MsgspecError):
        decode(nested)
