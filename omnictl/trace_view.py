"""A request's trace, as the server tells it, for people and for trace viewers. Knows the document, not the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnictl import output

BAR_WIDTH = 40
LIST_COLUMNS = ("request", "task", "state", "started", "ms")

Trace = Mapping[str, Any]


def list_row(trace: Trace) -> tuple[object, ...]:
    started = str(trace["started_at"]).partition(".")[0]
    return trace["request_id"], trace["task"], trace["state"], started, f"{trace['wall_ms']:.1f}"


def show(trace: Trace) -> None:
    """The time line, then the parts that add up."""
    output.write(f"request {trace['request_id']}  {trace['task']}  {trace['state']}  {trace['wall_ms']:.1f} ms\n\n")
    rows = [_row(row, trace["wall_ms"]) for row in trace["rows"]]
    output.print_table(("time line", "from ms", "took ms", "", ""), rows)
    output.write("\n")
    parts = [(part["part"], f"{part['ms']:.1f}", f"{part['share']:.1%}") for part in trace["path"]]
    parts.append(("unaccounted", "", f"{trace['unaccounted_share']:.1%}"))
    output.print_table(("what it waited for, one after the other", "ms", "share"), parts)


def _row(row: Trace, wall_ms: float) -> tuple[str, ...]:
    took_ms = row["end_ms"] - row["start_ms"]
    return row["name"], f"{row['start_ms']:.1f}", f"{took_ms:.1f}", _bar(row, wall_ms), _details(row)


def _bar(row: Trace, wall_ms: float) -> str:
    """A stage's bar is light until its engine begins to work on the request."""
    began_ms = row.get("began_ms") or row["start_ms"]
    columns = [_column(at_ms, wall_ms) for at_ms in (row["start_ms"], began_ms, row["end_ms"])]
    start, began, end = columns[0], columns[1], max(columns[2], columns[0] + 1)
    bar = " " * start + "░" * (began - start) + "█" * (end - max(began, start))
    return f"|{bar:<{BAR_WIDTH}}|"


def _column(at_ms: float, wall_ms: float) -> int:
    share = at_ms / wall_ms if wall_ms else 0.0
    return min(BAR_WIDTH - 1, max(0, round(share * BAR_WIDTH)))


def _details(row: Trace) -> str:
    match row["kind"]:
        case "stage":
            times = {"first output at": row["first_output_ms"], "engine": row["engine_ms"], "idle": row["idle_ms"]}
            times |= {"held": row["held_ms"]} if row["held_ms"] else {}
            return ", ".join(f"{name} {ms:.1f}" for name, ms in times.items() if ms is not None)
        case "edge":
            return f"{row['pieces']} pieces, first {row['first_hop_ms']:.1f}, last {row['last_hop_ms']:.1f} on the way"
        case "client":
            return f"{row['pieces']} pieces, first at {row['first_ms']:.1f}"
    return ""


def chrome_events(trace: Trace) -> dict[str, Any]:
    """The trace event format: a complete event a row, each kind of row a thread."""
    kinds = list(dict.fromkeys(row["kind"] for row in trace["rows"]))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": kind}}
        for number, kind in enumerate(kinds)
    ]
    for row in trace["rows"]:
        start_us, end_us = (round(row[key] * 1000) for key in ("start_ms", "end_ms"))
        more = {key: value for key, value in row.items() if key not in ("name", "kind", "start_ms", "end_ms")}
        event = {"ph": "X", "name": row["name"], "ts": start_us, "dur": end_us - start_us, "pid": 1}
        events.append({**event, "tid": kinds.index(row["kind"]), "args": more})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"request_id": trace["request_id"]}}
