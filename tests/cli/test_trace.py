"""`omnictl trace` against a real server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from omnictl.cli import app
from omnictl.state import Store
from runtime.errors import ConfigError, NotFound, NotRunning
from tests.cli.conftest import deployment, identity
from tests.plans import sim_plan
from tests.server.serving import MODEL, Served, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(sim_plan(), tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.fixture
def request_id(server: Served, store: Store) -> str:
    """Of an answer that was just given by the deployment on record."""
    store.prepare("sim", "{}")
    store.save(deployment("sim", identity(os.getpid()), port=server.port))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    with server.http() as http:
        return str(http.post("/v1/chat/completions", json=body).headers["x-request-id"])


def trace(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments])


def document(*arguments: str) -> Any:
    result = trace(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_waterfall_for_people(request_id: str) -> None:
    result = trace(request_id)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"request {request_id}  chat  done")
    (think,) = [line for line in lines if line.startswith("think  ")]
    assert "█" in think
    assert "first output at" in think
    assert any(line.startswith("unaccounted") for line in lines)


def test_the_document_is_that_of_the_server(request_id: str) -> None:
    by_id = document(request_id, "--json")
    assert by_id == document("--last", "--json") == document(f"chatcmpl-{request_id}", "--json")
    assert by_id["request_id"] == request_id
    listed = document("--json")
    assert listed["name"] == "sim"
    assert listed["traces"][0]["request_id"] == request_id
    assert request_id in trace().stdout


def test_chrome_events_cover_the_rows(request_id: str) -> None:
    rows = {row["name"]: row for row in document(request_id, "--json")["rows"]}
    events = [e for e in document(request_id, "--format", "chrome")["traceEvents"] if e["ph"] == "X"]
    assert {event["name"] for event in events} == set(rows)
    for event in events:
        assert event["ts"] == round(rows[event["name"]]["start_ms"] * 1000)
        assert event["dur"] >= 0


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("abc",), NotFound, "no trace of request 'abc'"),
        (("abc", "--last"), ConfigError, "--last"),
        (("--format", "chrome"), ConfigError, "give REQUEST_ID or --last"),
        (("--last", "--format", "chrome", "--json"), ConfigError, "no --json"),
    ],
)
def test_what_cannot_be_shown(request_id: str, arguments: tuple[str, ...], error: type[Exception], said: str) -> None:
    raised = trace(*arguments).exception
    assert isinstance(raised, error)
    assert said in str(raised)


def test_a_deployment_that_does_not_run_has_no_traces(store: Store) -> None:
    mine = identity(os.getpid())
    store.prepare("sim", "{}")
    store.save(deployment("sim", msgspec.structs.replace(mine, start_ticks=mine.start_ticks - 1)))
    assert isinstance(trace("--last").exception, NotRunning)
