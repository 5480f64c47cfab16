"""One stage loop driven by hand: fencing by epoch and sequence, parking, aborts from every state, credits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.connectors import open_connectors
from runtime.connectors.arena import ShmSettings
from runtime.engines.sim import Fault, SimSettings, make_engine
from runtime.exchange import Exchange
from runtime.messages import (
    Abort,
    Aborted,
    AnyMessage,
    Close,
    Credit,
    Drain,
    Ended,
    Message,
    Output,
    Piece,
    Ref,
    Started,
    Submit,
    Target,
)
from runtime.outgoing import CLIENT_EDGE
from runtime.parking import EndedRequests, Parking
from runtime.payload import Payload, pack
from runtime.stage import StageLoop
from runtime.transport import Inbox, Outbox, address_of


class Bench:
    """A stage loop in its thread, with an inbox that plays the server and one that plays the consumer."""

    def __init__(self, folder: Path, **sim: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.exchange = Exchange(open_connectors(shm=ShmSettings(folder)))
        self.server = Inbox(self.context, address_of(folder, "server"))
        self.consumer = Inbox(self.context, address_of(folder, "next"))
        self.address = address_of(folder, "stage")
        inbox = Inbox(self.context, self.address)
        defaults: dict[str, Any] = {"first_output_s": 0.0, "interval_s": 0.0, "num_outputs": 2, "output_bytes": 100_000}
        self.loop = StageLoop(
            stage="s",
            index=0,
            engine=make_engine(SimSettings(**(defaults | sim)), "s"),
            inbox=inbox,
            outbox=Outbox(self.context),
            exchange=self.exchange,
            server=self.server.address,
        )
        self.outbox = Outbox(self.context)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()
        self._inbox = inbox

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.outbox.send(self.address, message)

    def submit(
        self,
        request_id: str,
        epoch: int = 0,
        *,
        capacity_bytes: int = 1 << 20,
        mode: str = "chunked",
        consumer: Inbox | None = None,
    ) -> None:
        address = (consumer or self.consumer).address
        targets = [
            Target(CLIENT_EDGE, "text", "chunked", "shm", self.server.address, 1 << 20),
            Target("s->n", "latents", mode, "shm", address, capacity_bytes),
        ]
        self.send(Submit(request_id, epoch, {}, ["request"], targets))

    def piece(
        self, request_id: str, sequence: int = 0, *, epoch: int = 0, last: bool = True, ref: Ref | None = None
    ) -> None:
        packed = pack(Payload("text", request_id, meta={"text": "x"}))
        ref = ref or Ref("shm", size_bytes=packed.size_bytes, inline=packed.to_bytes())
        self.send(Piece(request_id, epoch, "request", sequence, last, ref, self.server.address))

    def heard(self, kind: type[AnyMessage], inbox: Inbox | None = None, timeout_s: float = 100.0) -> Any:
        """The next message of a kind; others are passed over."""
        inbox = inbox or self.server
        while inbox.wait(timeout_s):
            for message in inbox.drain(1):
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__}")

    def quiet(self, inbox: Inbox, kind: type[AnyMessage], timeout_s: float = 0.15) -> bool:
        while inbox.wait(timeout_s):
            if any(isinstance(message, kind) for message in inbox.drain(1)):
                return False
        return True

    def close(self) -> None:
        self.send(Drain())
        self.thread.join(100)
        assert not self.thread.is_alive(), "the loop did not drain"
        for closing in (self.server, self.consumer, self._inbox, self.outbox, self.loop._outbox, self.exchange):
            closing.close()
        self.context.term()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_started_outputs_ended_in_this_order(bench: Bench) -> None:
    bench.submit("a")
    bench.piece("a")
    assert bench.heard(Started).request_id == "a"
    assert [bench.heard(Output).sequence for _ in range(2)] == [0, 1]
    assert bench.heard(Ended).reason == "stop"
    pieces = [bench.heard(Piece, bench.consumer) for _ in range(3)]
    assert [(p.sequence, p.last) for p in pieces] == [(0, False), (1, False), (2, True)]


def test_data_before_its_submit_is_parked(bench: Bench) -> None:
    bench.piece("a")
    assert bench.quiet(bench.server, Started)
    bench.submit("a")
    assert bench.heard(Ended).request_id == "a"


def test_an_abort_that_overtakes_its_submit_wins(bench: Bench) -> None:
    bench.send(Abort("a", 0))
    assert bench.heard(Aborted).request_id == "a"
    bench.submit("a")
    bench.piece("a")
    assert bench.heard(Credit)
    assert bench.quiet(bench.server, Started)
    assert bench.loop.stats().dropped_pieces == 2


def test_older_epochs_are_dropped_and_newer_ones_replace(bench: Bench) -> None:
    bench.submit("a", epoch=2)
    bench.piece("a", epoch=1)
    bench.submit("a", epoch=1)
    bench.submit("a", epoch=2)
    assert bench.quiet(bench.server, Started)
    bench.submit("a", epoch=3)
    bench.piece("a", epoch=2)
    bench.piece("a", epoch=3)
    assert bench.heard(Ended).epoch == 3
    assert bench.loop.stats().dropped_pieces == 4


def test_repeated_and_late_pieces_are_dropped(bench: Bench) -> None:
    bench.submit("a")
    bench.piece("a", 0, last=False)
    bench.piece("a", 0, last=False)
    bench.piece("a", 1, last=False)
    bench.piece("a", 0, last=False)
    bench.piece("a", 2, last=True)
    ended = bench.heard(Ended)
    assert ended.usage["outputs"] == 6
    bench.piece("a", 3)
    bench.heard(Credit)
    assert bench.loop.stats().dropped_pieces == 3


def test_an_abort_is_the_last_word(bench: Bench) -> None:
    bench.submit("a", capacity_bytes=100_000)
    bench.piece("a", 0, last=False)
    bench.heard(Piece, bench.consumer)
    bench.send(Abort("a", 0))
    bench.heard(Aborted)
    assert bench.quiet(bench.server, Output)
    assert bench.quiet(bench.consumer, Piece)
    assert all(health.used_bytes == 0 for health in bench.exchange.health())


def test_a_full_edge_holds_the_producer_until_credit_comes(bench: Bench) -> None:
    bench.submit("a", capacity_bytes=150_000)
    bench.piece("a")
    first = bench.heard(Piece, bench.consumer)
    assert bench.quiet(bench.consumer, Piece), "the second payload does not fit"
    assert bench.exchange.take(first.ref).tensors["data"].shape == (100_000,)
    bench.send(Credit(first.edge, first.ref))
    second = bench.heard(Piece, bench.consumer)
    bench.send(Credit(second.edge, second.ref))
    assert bench.heard(Piece, bench.consumer).last


def test_a_payload_larger_than_the_edge_passes_alone(bench: Bench) -> None:
    bench.submit("a", capacity_bytes=10)
    bench.piece("a")
    for _ in range(2):
        piece = bench.heard(Piece, bench.consumer)
        bench.send(Credit(piece.edge, piece.ref))
    assert bench.heard(Piece, bench.consumer).last


def test_whole_edges_send_when_the_stage_has_ended(bench: Bench) -> None:
    bench.submit("a", mode="whole")
    bench.piece("a", 0, last=False)
    bench.heard(Output)
    assert bench.quiet(bench.consumer, Piece)
    bench.send(Piece("a", 0, "request", 1, True, inline_empty(), ""))
    assert [bench.heard(Piece, bench.consumer).last for _ in range(3)] == [False, False, True]


def inline_empty() -> Ref:
    packed = pack(Payload("text", "a"))
    return Ref("shm", size_bytes=packed.size_bytes, inline=packed.to_bytes())


def test_a_ref_that_cannot_be_read_fails_its_request_only(bench: Bench) -> None:
    """F049: an error, at once, and not a wait."""
    bench.submit("a")
    bench.submit("b")
    bench.piece("a", ref=Ref("shm", "omnictl-1-1-00000000-0", 1, 0, 64))
    bench.piece("b")
    ended = {e.request_id: e for e in (bench.heard(Ended), bench.heard(Ended))}
    assert ended["a"].error["class"] == "ConnectorError"
    assert ended["b"].error is None


def test_a_fault_in_one_request_leaves_the_next_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, faults=[Fault("raise", 1, when={})], num_outputs=1)
    bench.submit("a")
    bench.piece("a")
    assert bench.heard(Ended).error is None
    bench.close()


def test_a_gap_in_the_input_is_an_error_and_not_a_wait(bench: Bench) -> None:
    bench.submit("a")
    bench.piece("a", 0, last=False)
    bench.piece("a", 2)
    assert "pieces before number 2 are lost" in bench.heard(Ended).error["message"]


def test_input_that_could_not_be_kept_fails_its_request(bench: Bench) -> None:
    """Pieces that were parked for too long are gone: the Submit that comes then must not wait for them."""
    bench.loop._parking = Parking(timeout_s=0.0)
    bench.piece("a")
    bench.heard(Credit)
    bench.submit("a")
    assert bench.heard(Ended).error["class"] == "ConnectorError"


def test_numpy_views_do_not_leave_the_arena(bench: Bench) -> None:
    """What a consumer takes is its own: reuse of the producer's memory cannot change it."""
    bench.submit("a")
    bench.piece("a")
    piece = bench.heard(Piece, bench.consumer)
    taken = bench.exchange.take(piece.ref)
    before = taken.tensors["data"].copy()
    bench.send(Close("a", 0), Credit(piece.edge, piece.ref))
    bench.submit("b")
    bench.piece("b")
    bench.heard(Ended)
    assert np.array_equal(taken.tensors["data"], before)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["submit", "piece", "last", "abort", "close"]), st.integers(0, 3), st.integers(0, 2)),
    max_size=60,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS)
def test_any_order_of_events_leaves_nothing(tmp_path_factory: pytest.TempPathFactory, events: list[Any]) -> None:
    """F032: from any state an abort ends in nothing; the loop drains, holds no memory and parks nothing."""
    bench = Bench(tmp_path_factory.mktemp("s"))
    for number, (event, request, epoch) in enumerate(events):
        request_id = f"r{request}"
        match event:
            case "submit":
                bench.submit(request_id, epoch)
            case "piece" | "last":
                bench.piece(request_id, number, epoch=epoch, last=event == "last")
            case "abort":
                bench.send(Abort(request_id, epoch))
            case "close":
                bench.send(Close(request_id, epoch))
    for request in range(4):
        bench.send(Abort(f"r{request}", 9))
    for _ in range(4 + sum(event == "abort" for event, _, _ in events)):
        bench.heard(Aborted)
    assert bench.loop._jobs == {}
    assert bench.loop.engine.stats()["running"] == bench.loop.engine.stats()["queued"] == 0
    assert all(health.used_bytes == 0 for health in bench.exchange.health())
    bench.close()


def piece_of(request_id: str, sequence: int) -> Piece:
    return Piece(request_id, 0, "e", sequence, False, Ref("shm"), "")


def test_parking_is_bounded_and_gives_up() -> None:
    parking = Parking(max_pieces=3, timeout_s=0.0)
    assert [parking.put(piece_of("a", n)) for n in range(3)] == [[], [], []]
    assert [p.sequence for p in parking.put(piece_of("b", 0))] == [0, 1, 2]
    assert [p.request_id for p in parking.expired()] == ["b"]
    assert parking.next_expiry_s() is None


def test_ended_requests_are_bounded() -> None:
    """F036: a storm of aborts of unknown requests neither grows without end nor forgets the latest."""
    ended = EndedRequests(limit=100)
    for number in range(20_000):
        ended.add(f"r{number}", 0)
    ended.add("x", 4)
    assert len(ended) == 100
    assert ended.covers("x", 4)
    assert not ended.covers("x", 5)
    assert ended.covers("r19999", 0)
