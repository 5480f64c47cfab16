"""A trace as a document: rows on a time line, and the path: the parts one after the other that made the request
take as long as it did, with the share of its time that no part explains. Pure.

The path is walked from the end. What the last stage did after its input was complete is its own; before that it
waited for the producer whose last piece came last, and so on up to the client.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from runtime.messages import StageTrace, Stamps
from runtime.outgoing import CLIENT_EDGE
from runtime.plan import REQUEST_INPUT
from runtime.tracing import RequestTrace

Part = tuple[str, float]
"""Name, seconds."""


def summary(trace: RequestTrace) -> dict[str, Any]:
    """One line of a list."""
    began_s, ended_s = _bounds(trace)
    return {
        "request_id": trace.request_id,
        "task": trace.task,
        "state": trace.state,
        "started_at": datetime.fromtimestamp(trace.began_at - (trace.admitted_s - began_s), UTC).isoformat(),
        "wall_ms": _ms(ended_s - began_s),
    }


def document(trace: RequestTrace) -> dict[str, Any]:
    """All of it; times are milliseconds since the request came in."""
    began_s, ended_s = _bounds(trace)
    wall_s = ended_s - began_s
    path = [(name, seconds) for name, seconds in _path(trace, began_s, ended_s) if seconds > 0]
    rest_s = wall_s - sum(seconds for _, seconds in path)
    rows = sorted(_rows(trace, began_s, ended_s), key=lambda row: (row["start_ms"], row["end_ms"]))
    return {
        **summary(trace),
        "unaccounted_share": round(rest_s / wall_s, 4) if wall_s else 0.0,
        "path": [{"part": name, "ms": _ms(s), "share": round(s / wall_s, 4)} for name, s in path],
        "rows": rows,
    }


def _bounds(trace: RequestTrace) -> tuple[float, float]:
    """From the first byte to the last one where it came by HTTP, else from the asking to the terminal."""
    began_s = trace.asked_s if trace.received_s is None else trace.received_s
    if trace.over_s is None:
        return began_s, time.monotonic()
    return began_s, max(trace.over_s, trace.sent_s or 0.0)


# ---- the path ------------------------------------------------------------------------------------------------


def _path(trace: RequestTrace, began_s: float, ended_s: float) -> Iterator[Part]:
    yield "http: read and check", trace.asked_s - began_s
    yield "admission", trace.admitted_s - trace.asked_s
    chain = _chain(trace)
    if not chain:
        return
    before_s, before = trace.admitted_s, "server"
    for stage, after in zip(chain, [*chain[1:], None], strict=True):
        one = trace.stages[stage]
        yield f"{before} -> {stage}", _input_s(one) - before_s
        # a consumer may have the last piece before its producer has noted its own end
        before_s = one.ended_s if after is None else min(one.ended_s, _input_s(trace.stages[after]))
        yield from _own_parts(stage, one, before_s)
        before = stage
    heard_s = trace.heard[before]
    yield f"{before} -> server", heard_s - before_s
    if trace.over_s is not None:
        yield "ends of other stages", trace.over_s - heard_s
        yield "http: answer", ended_s - max(trace.over_s, heard_s)


def _chain(trace: RequestTrace) -> list[str]:
    """The stages on the path, first to last."""
    finals = [stage for stage in trace.graph.finals.values() if stage in trace.stages]
    if not trace.stages:
        return []
    chain = [max(finals or trace.stages, key=lambda stage: trace.stages[stage].ended_s)]
    producers = {edge.name: edge.source for edge in trace.graph.edges}
    while True:
        received = trace.stages[chain[0]].received
        edge = max(received, key=lambda name: received[name].last_s, default=REQUEST_INPUT)
        if producers.get(edge) not in trace.stages:
            return chain
        chain.insert(0, producers[edge])


def _input_s(stage: StageTrace) -> float:
    return stage.complete_s or stage.submitted_s


def _own_parts(name: str, stage: StageTrace, ended_s: float) -> Iterator[Part]:
    """What a stage did once its input was complete. While a request is queued or held the engine works for others,
    or is idle; idle for any other reason is nobody's part."""
    spent = stage.tail if stage.complete_s else stage.life
    length_s = ended_s - _input_s(stage)
    queued_s = min(spent.engine_s, max(0.0, (stage.began_s or 0.0) - _input_s(stage)))
    held_s = min(spent.held_s, spent.engine_s - queued_s + spent.idle_s)
    yield f"{name}: queued", queued_s
    yield f"{name}: engine", spent.engine_s - queued_s - max(0.0, held_s - spent.idle_s)
    yield f"{name}: waits for room on an edge", held_s
    yield f"{name}: messages", length_s - spent.engine_s - spent.idle_s


# ---- rows ----------------------------------------------------------------------------------------------------


def _rows(trace: RequestTrace, began_s: float, ended_s: float) -> Iterator[dict[str, Any]]:
    def row(name: str, kind: str, start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
        return {"name": name, "kind": kind, "start_ms": _ms(start_s - began_s), "end_ms": _ms(end_s - began_s), **more}

    if trace.received_s is not None:
        yield row("http: read and check", "server", began_s, trace.asked_s)
    yield row("admission", "server", trace.asked_s, trace.admitted_s)
    for name, stage in trace.stages.items():
        yield row(name, "stage", stage.submitted_s, stage.ended_s, **_stage_details(stage, began_s))
    for name, sent, received in _hops(trace):
        hops = {"first_hop_ms": _ms(received.first_s - sent.first_s), "last_hop_ms": _ms(received.last_s - sent.last_s)}
        yield row(name, "edge", sent.first_s, received.last_s, pieces=received.count, **hops)
    for modality, handled in trace.handled.items():
        arrived = trace.arrived[modality]
        hops = {"first_ms": _ms(handled.first_s - began_s), "last_ms": _ms(handled.last_s - began_s)}
        yield row(f"client: {modality}", "client", arrived.first_s, handled.last_s, pieces=handled.count, **hops)
    if trace.over_s is not None and trace.sent_s is not None:
        yield row("http: answer", "server", trace.over_s, ended_s)


def _stage_details(stage: StageTrace, began_s: float) -> dict[str, Any]:
    times = {
        "first_input": min((s.first_s for s in stage.received.values()), default=None),
        "last_input": stage.complete_s or None,
        "began": stage.began_s,
        "first_output": min((s.first_s for s in stage.sent.values()), default=None),
        "last_output": max((s.last_s for s in stage.sent.values()), default=None),
    }
    spent = {"engine": stage.life.engine_s, "idle": stage.life.idle_s, "held": stage.life.held_s}
    return {
        "replica": stage.index,
        **{f"{name}_ms": None if at_s is None else _ms(at_s - began_s) for name, at_s in times.items()},
        **{f"{name}_ms": _ms(seconds) for name, seconds in spent.items()},
    }


def _hops(trace: RequestTrace) -> Iterator[tuple[str, Stamps, Stamps]]:
    """Name, when its pieces were put, when they were received: for every way that pieces of the request went."""
    for stage, fed in trace.fed.items():
        if stage in trace.stages and REQUEST_INPUT in trace.stages[stage].received:
            yield f"server -> {stage}", fed, trace.stages[stage].received[REQUEST_INPUT]
    for edge in trace.graph.edges:
        source, target = trace.stages.get(edge.source), trace.stages.get(edge.target)
        if source and target and edge.name in source.sent and edge.name in target.received:
            yield f"{edge.source} -> {edge.target}", source.sent[edge.name], target.received[edge.name]
    for modality, stage in trace.graph.finals.items():
        if stage in trace.stages and CLIENT_EDGE in trace.stages[stage].sent and modality in trace.arrived:
            yield f"{stage} -> server", trace.stages[stage].sent[CLIENT_EDGE], trace.arrived[modality]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
