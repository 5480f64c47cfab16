"""A full edge holds the requests that go there, and nobody else: a slow consumer does not stop its producer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.engines.base import StageWork
from runtime.engines.module import ModuleEngine
from runtime.engines.sim import SimSettings, make_engine
from runtime.messages import Abort, Aborted, Credit, Ended, Piece
from runtime.payload import Payload
from runtime.transport import Inbox, address_of
from tests.unit.test_module_engine import Echo
from tests.unit.test_stage import Bench

LOCKSTEP = {"step_s": 0.0001}
NUM_OUTPUTS = 5


@pytest.fixture(params=[{}, LOCKSTEP], ids=["own clocks", "lockstep"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(tmp_path, num_outputs=NUM_OUTPUTS, **request.param)
    yield bench
    bench.close()


@pytest.fixture
def neighbour(bench: Bench, tmp_path: Path) -> Iterator[Inbox]:
    """A second consumer of the same stage."""
    inbox = Inbox(bench.context, address_of(tmp_path, "neighbour"))
    yield inbox
    inbox.close()


def passed_on(bench: Bench, inbox: Inbox) -> Piece:
    """The next piece, whose consumer is done with it at once."""
    piece: Piece = bench.heard(Piece, inbox)
    bench.send(Credit(piece.edge, piece.ref))
    return piece


def test_a_neighbour_goes_on_while_an_edge_is_full(bench: Bench, neighbour: Inbox) -> None:
    bench.submit("slow", capacity_bytes=100_000)
    bench.piece("slow")
    first = bench.heard(Piece, bench.consumer)
    bench.submit("quick", capacity_bytes=100_000, consumer=neighbour)
    bench.piece("quick")
    pieces = [passed_on(bench, neighbour) for _ in range(NUM_OUTPUTS + 1)]
    assert [(p.sequence, p.last) for p in pieces] == [(n, n == NUM_OUTPUTS) for n in range(NUM_OUTPUTS + 1)]
    ended = bench.heard(Ended)
    assert ended.request_id == "quick", "the slow one is still held"
    assert ended.trace.life.held_s < ended.trace.ended_s - ended.trace.submitted_s
    bench.send(Credit(first.edge, first.ref))
    pieces = [first, *(passed_on(bench, bench.consumer) for _ in range(NUM_OUTPUTS))]
    assert [(p.sequence, p.last) for p in pieces] == [(n, n == NUM_OUTPUTS) for n in range(NUM_OUTPUTS + 1)]
    ended = bench.heard(Ended)
    assert ended.request_id == "slow"
    assert ended.trace.life.held_s > 0


def test_what_is_held_makes_no_more_than_one_output_ahead(bench: Bench, neighbour: Inbox) -> None:
    """Memory is bounded: what waits for room is what one step made."""
    bench.submit("slow", capacity_bytes=100_000)
    bench.piece("slow")
    first = bench.heard(Piece, bench.consumer)
    bench.submit("quick", capacity_bytes=100_000, consumer=neighbour)
    bench.piece("quick")
    while not passed_on(bench, neighbour).last:
        pass
    held = dict(bench.loop._outgoing.held)
    assert {request_id: one.num_entries for request_id, one in held.items()} == {"slow": 1}
    bench.send(Credit(first.edge, first.ref))
    while not passed_on(bench, bench.consumer).last:
        pass


def test_an_aborted_request_is_held_no_more(bench: Bench) -> None:
    bench.submit("slow", capacity_bytes=100_000)
    bench.piece("slow")
    bench.heard(Piece, bench.consumer)
    bench.send(Abort("slow", 0))
    assert bench.heard(Aborted).trace is not None
    assert bench.loop._outgoing.held == {}
    bench.submit("next", capacity_bytes=100_000)
    bench.piece("next")
    assert passed_on(bench, bench.consumer).request_id == "next"
    while not passed_on(bench, bench.consumer).last:
        pass


def fed(engine: Any, request_id: str, edge: str = "request") -> None:
    engine.submit(StageWork(request_id, 0, {}, frozenset({edge}), frozenset({"text"})))
    engine.feed(request_id, Payload("text", request_id, edge=edge, last=True, meta={"text": "x"}))


def ends(engine: Any) -> list[str]:
    ended = []
    while engine.next_step_s() == 0.0:
        ended += [output.request_id for output in engine.step() if output.end]
    return ended


@pytest.mark.parametrize("kind", ["module", "own clocks", "lockstep"])
def test_an_engine_has_nothing_to_do_for_who_is_held(kind: str) -> None:
    settings = SimSettings(
        first_output_s=0.0, interval_s=0.0, num_outputs=2, **(LOCKSTEP if kind == "lockstep" else {})
    )
    engine: Any = ModuleEngine(Echo()) if kind == "module" else make_engine(settings, "s")
    fed(engine, "a")
    fed(engine, "b")
    engine.hold(frozenset({"a", "unknown"}))
    assert ends(engine) == ["b"]
    assert engine.next_step_s() is None
    engine.hold(frozenset())
    assert ends(engine) == ["a"]
