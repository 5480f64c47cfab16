"""The trace of a request over HTTP: its parts add up to what it took, and nothing comes before its cause."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.conftest import NUM_PIECES, THINK_FAILS
from tests.server.serving import MODEL

SPOKEN = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "modalities": ["text", "audio"],
    "audio": {"format": "pcm16"},
}


def trace_of(http: httpx.Client, answer: httpx.Response) -> dict[str, Any]:
    response = http.get(f"/v1/omnictl/traces/{answer.headers['x-request-id']}")
    assert response.status_code == 200
    document: dict[str, Any] = response.json()
    return document


@pytest.mark.parametrize("stream", [False, True])
def test_the_parts_add_up_and_are_in_the_order_of_causes(http: httpx.Client, stream: bool) -> None:
    trace = trace_of(http, http.post("/v1/chat/completions", json={**SPOKEN, "stream": stream}))
    assert trace["state"] == "done"
    assert abs(trace["unaccounted_share"]) <= 0.05, trace
    total_ms = sum(part["ms"] for part in trace["path"])
    assert total_ms == pytest.approx(trace["wall_ms"] * (1 - trace["unaccounted_share"]), rel=0.01)
    rows = {row["name"]: row for row in trace["rows"]}
    think, talk, wave = rows["think"], rows["talk"], rows["wave"]
    causes = [
        rows["admission"]["end_ms"],
        rows["server -> think"]["start_ms"],
        think["first_input_ms"],
        think["began_ms"],
        think["first_output_ms"],
        talk["first_input_ms"],
        talk["began_ms"],
        talk["first_output_ms"],
        wave["first_input_ms"],
        wave["began_ms"],
        wave["first_output_ms"],
        rows["client: audio"]["first_ms"],
        rows["client: audio"]["last_ms"],
        rows["http: answer"]["end_ms"],
    ]
    assert causes == sorted(causes)
    assert rows["client: text"]["pieces"] == rows["client: audio"]["pieces"] == NUM_PIECES
    assert rows["talk -> wave"]["pieces"] == NUM_PIECES + 1, "the last piece of an edge is empty"
    assert all(row["start_ms"] <= row["end_ms"] <= trace["wall_ms"] for row in rows.values())
    assert all(row["first_hop_ms"] >= 0 <= row["last_hop_ms"] for row in rows.values() if row["kind"] == "edge")


def test_the_id_of_a_completion_names_its_trace_and_the_list_has_it(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={**SPOKEN, "modalities": ["text"], "audio": None})
    by_completion = http.get(f"/v1/omnictl/traces/{answer.json()['id']}").json()
    assert by_completion["request_id"] == answer.headers["x-request-id"]
    assert {row["name"] for row in by_completion["rows"] if row["kind"] == "stage"} == {"think"}
    listed = {line["request_id"]: line for line in http.get("/v1/omnictl/traces").json()["data"]}
    line = listed[by_completion["request_id"]]
    assert line == {key: by_completion[key] for key in line}


def test_a_request_that_failed_shows_how_far_it_came(http: httpx.Client) -> None:
    trace = trace_of(http, http.post("/v1/chat/completions", json={**SPOKEN, "seed": THINK_FAILS}))
    assert trace["state"] == "failed"
    rows = {row["name"]: row for row in trace["rows"]}
    assert rows["client: text"]["pieces"] == 3
    assert rows["think"]["first_output_ms"] is not None


def test_an_unknown_request_has_no_trace(http: httpx.Client) -> None:
    response = http.get("/v1/omnictl/traces/chatcmpl-0123")
    assert response.status_code == 404
    assert "omnictl trace" in response.json()["error"]["message"]
