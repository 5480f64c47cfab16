"""Where the time of a request went, from stamps made by hand: every millisecond in the part that it belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from runtime import waterfall
from runtime.errors import NotFound
from runtime.graph import SubGraph, select
from runtime.messages import Spent, StageTrace, Stamps
from runtime.plan import Modality
from runtime.tracing import RequestTrace, TraceStore
from tests.plans import sim_plan

TEXT, AUDIO = Modality.TEXT, Modality.AUDIO
MS = 1e-3


def graph(*modalities: Modality, inputs: tuple[Modality, ...] = (TEXT,)) -> SubGraph:
    return select(sim_plan(), "chat", modalities, inputs)


def at(*times_ms: float) -> Stamps:
    return Stamps(times_ms[0] * MS, times_ms[-1] * MS, len(times_ms))


def stage(
    submitted_ms: float,
    ended_ms: float,
    *,
    received: dict[str, Stamps],
    sent: dict[str, Stamps] | None = None,
    began_ms: float | None = None,
    tail_ms: tuple[float, float, float] = (0, 0, 0),
) -> StageTrace:
    """tail_ms: engine, idle and held since the input was complete."""
    trace = StageTrace(0, submitted_ms * MS, received, sent or {})
    trace.complete_s = max((stamps.last_s for stamps in received.values()), default=0.0)
    trace.ended_s = ended_ms * MS
    trace.began_s = None if began_ms is None else began_ms * MS
    trace.tail = Spent(*(ms * MS for ms in tail_ms))
    return trace


def request(modalities: tuple[Modality, ...] = (TEXT,), **more: Any) -> RequestTrace:
    """Came in at 1000 ms, asked for at 1002, admitted at 1005."""
    times = {"asked_s": 1002 * MS, "admitted_s": 1005 * MS, "received_s": 1000 * MS}
    return RequestTrace("r1", "chat", graph(*modalities), **(times | more))


def parts(trace: RequestTrace) -> dict[str, float]:
    return {part["part"]: part["ms"] for part in waterfall.document(trace)["path"]}


def text_answer() -> RequestTrace:
    trace = request()
    trace.stages["think"] = stage(
        1006, 1050, received={"request": at(1007)}, sent={"client": at(1030, 1049)}, began_ms=1010, tail_ms=(40, 0, 0)
    )
    trace.heard["think"] = 1052 * MS
    trace.state, trace.over_s, trace.sent_s = "done", 1053 * MS, 1060 * MS
    return trace


def test_one_stage_is_split_into_what_happened_there() -> None:
    document = waterfall.document(text_answer())
    assert document["wall_ms"] == 60
    assert {part["part"]: part["ms"] for part in document["path"]} == {
        "http: read and check": 2,
        "admission": 3,
        "server -> think": 2,
        "think: queued": 3,
        "think: engine": 37,
        "think: messages": 3,
        "think -> server": 2,
        "ends of other stages": 1,
        "http: answer": 7,
    }
    assert document["unaccounted_share"] == 0


def test_an_engine_that_idles_with_its_input_complete_is_nobodys_part() -> None:
    trace = text_answer()
    trace.stages["think"].tail = Spent(20 * MS, 20 * MS, 0.0)
    assert parts(trace)["think: engine"] == 17
    assert waterfall.document(trace)["unaccounted_share"] == pytest.approx(20 / 60, abs=1e-4)


def test_a_full_edge_is_a_part_of_its_own() -> None:
    trace = text_answer()
    trace.stages["think"].tail = Spent(20 * MS, 20 * MS, 25 * MS)
    found = parts(trace)
    assert found["think: waits for room on an edge"] == 25
    assert found["think: engine"] == 12, "5 of the 25 ms the engine worked for others"
    assert waterfall.document(trace)["unaccounted_share"] == 0


def spoken_answer() -> RequestTrace:
    """The talker gets its last word at 1031 and speaks until 1080."""
    trace = request((TEXT, AUDIO))
    trace.stages["think"] = stage(
        1006, 1030, received={"request": at(1006)}, sent={"think->talk": at(1010, 1030)}, tail_ms=(23, 0, 0)
    )
    trace.stages["talk"] = stage(
        1006, 1080, received={"think->talk": at(1011, 1031)}, sent={"talk->wave": at(1020, 1079)}, tail_ms=(45, 0, 0)
    )
    trace.stages["wave"] = stage(
        1006, 1090, received={"talk->wave": at(1021, 1082)}, sent={"client": at(1040, 1089)}, tail_ms=(7, 0, 0)
    )
    trace.heard |= {"think": 1031 * MS, "talk": 1081 * MS, "wave": 1091 * MS}
    trace.arrived["audio"], trace.handled["audio"] = at(1041, 1090), at(1042, 1091)
    trace.state, trace.over_s, trace.sent_s = "done", 1091 * MS, 1100 * MS
    return trace


def test_a_chain_waits_for_the_last_piece_of_each_producer() -> None:
    trace = spoken_answer()
    found = parts(trace)
    assert found["think: engine"] == 23
    assert found["think -> talk"] == 1
    assert found["talk: engine"] == 45, "what it made before its input was complete overlapped with the thinker"
    assert found["talk -> wave"] == 2
    assert found["wave: engine"] == 7
    assert sum(found.values()) == 100
    assert waterfall.document(trace)["unaccounted_share"] == 0


def test_a_consumer_may_be_quicker_than_its_producers_note_of_the_end() -> None:
    trace = spoken_answer()
    trace.stages["think"].ended_s = 1033 * MS
    assert "think -> talk" not in parts(trace)
    assert waterfall.document(trace)["unaccounted_share"] == 0


def test_rows_tell_when_pieces_went() -> None:
    rows = {row["name"]: row for row in waterfall.document(spoken_answer())["rows"]}
    assert rows["talk -> wave"] == {
        "name": "talk -> wave",
        "kind": "edge",
        "start_ms": 20,
        "end_ms": 82,
        "pieces": 2,
        "first_hop_ms": 1,
        "last_hop_ms": 3,
    }
    assert rows["client: audio"]["first_ms"] == 42
    talk = rows["talk"]
    assert (talk["first_input_ms"], talk["last_input_ms"], talk["first_output_ms"]) == (11, 31, 20)
    assert [row["start_ms"] for row in rows.values()] == sorted(row["start_ms"] for row in rows.values())


def test_of_several_inputs_the_last_one_counts() -> None:
    trace = RequestTrace("r1", "chat", graph(TEXT, inputs=(TEXT, AUDIO)), asked_s=0.0, admitted_s=0.0)
    trace.stages["ear"] = stage(1, 30, received={"request": at(2)}, tail_ms=(28, 0, 0))
    trace.stages["think"] = stage(31, 50, received={"request": at(32), "ear->think": at(31)}, tail_ms=(18, 0, 0))
    trace.heard |= {"ear": 30 * MS, "think": 50 * MS}
    trace.over("done")
    assert "ear: engine" not in parts(trace)
    trace.stages["think"].received["ear->think"] = at(33)
    assert parts(trace)["ear: engine"] == 28


def test_a_request_that_runs_or_failed_shows_what_is_known() -> None:
    trace = request()
    assert waterfall.document(trace)["state"] == "running"
    assert parts(trace) == {"http: read and check": 2, "admission": 3}
    trace.state, trace.over_s = "failed", 1105 * MS
    document = waterfall.document(trace)
    assert document["wall_ms"] == 105
    assert document["unaccounted_share"] == pytest.approx(100 / 105, abs=1e-4)


def test_the_store_keeps_the_newest_and_says_how_to_go_on() -> None:
    store = TraceStore(limit=2)
    for number in range(4):
        store.open(RequestTrace(f"r{number}", "chat", graph(TEXT), asked_s=0.0))
    assert [trace.request_id for trace in store.recent()] == ["r3", "r2", "r1", "r0"], "open ones are all kept"
    for number in (3, 0, 1):
        store.close(f"r{number}")
    assert [trace.request_id for trace in store.recent()] == ["r2", "r1", "r0"]
    assert store.find("chatcmpl-r1").request_id == "r1"
    with pytest.raises(NotFound, match=r"no trace of request 'r3'.*2 newer ones.*kept_traces") as caught:
        store.find("r3")
    assert "omnictl trace" in str(caught.value.hint)


def test_http_times_belong_to_the_request_that_came_of_them() -> None:
    store = TraceStore(limit=2)
    store.received("r1")
    store.received("probe")
    trace = RequestTrace("r1", "chat", graph(TEXT), asked_s=0.0)
    store.open(trace)
    assert trace.received_s is not None
    store.close("r1")
    for request_id in ("r1", "probe"):
        store.answered(request_id)
        store.gone(request_id)
    assert trace.sent_s is not None
    assert store._received == {}
