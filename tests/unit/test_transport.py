"""Inbox and outbox: what was collected leaves together, in order, and is read one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from runtime.messages import Abort, Drain, Message, encode, encode_batch
from runtime.transport import Inbox, Outbox, address_of


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def inbox(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> Iterator[Inbox]:
    inbox = Inbox(context, address_of(tmp_path, "in"))
    yield inbox
    inbox.close()


@pytest.fixture
def outbox(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Outbox]:
    outbox = Outbox(context)
    yield outbox
    outbox.close()


def aborts(*numbers: int) -> list[Message]:
    return [Abort(f"r{number}", 0) for number in numbers]


def test_a_batch_is_one_transfer_and_is_read_one_by_one(inbox: Inbox, outbox: Outbox) -> None:
    for message in aborts(0, 1, 2):
        outbox.collect(inbox.address, message)
    outbox.send(inbox.address, Drain())
    assert inbox.wait(100)
    assert list(inbox.drain(9)) == [Drain()], "nothing leaves before the flush"
    outbox.flush()
    outbox.flush()
    assert inbox.wait(100)
    assert list(inbox.drain(1)) == aborts(0)
    assert inbox.wait(0), "what was not read yet is there"
    assert list(inbox.drain(9)) == aborts(1, 2)
    assert not inbox.wait(0)


def test_a_damaged_batch_is_dropped_and_the_next_one_is_read(
    inbox: Inbox, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    socket = context.socket(zmq.PUSH)
    socket.connect(inbox.address)
    for data in (encode_batch(aborts(1, 2))[:-3], b"\x91\x01", encode_batch(aborts(3, 4)), encode(Drain())):
        socket.send(data)
    read: list[Message] = []
    while len(read) < 3 and inbox.wait(100):
        read += inbox.drain(9)
    socket.close()
    assert read == [*aborts(3, 4), Drain()]
    assert inbox.num_damaged == 2
