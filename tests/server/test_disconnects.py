"""A client that goes away, at every phase and in both manners, ends its request everywhere and nobody else's."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.server.settings import ServerSettings
from tests.plans import sim_plan
from tests.server.serving import MODEL, Served, served

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SPOKEN: dict[str, Any] = {**CHAT, "modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
SPEECH: dict[str, Any] = {"model": MODEL, "input": "hi", "response_format": "pcm"}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "whole spoken chat": ("/v1/chat/completions", SPOKEN),
    "spoken chat stream": ("/v1/chat/completions", {**SPOKEN, "stream": True}),
    "raw speech": ("/v1/audio/speech", SPEECH),
    "speech events": ("/v1/audio/speech", {**SPEECH, "stream_format": "sse"}),
}
STUCK_AT_ONCE, STUCK_LATER = 1, 2
"""Seeds of requests that come to a stop."""
STREAMS = [name for name in REQUESTS if "whole" not in name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One slot a stage; chosen requests come to a stop before the first piece, or in the middle of the answer."""
    at_output = {STUCK_AT_ONCE: 0, STUCK_LATER: 2}
    stages: dict[str, dict[str, Any]] = {
        stage: {
            "slots": 1,
            "faults": [{"action": "stuck", "at_output": n, "when": {key: s}} for s, n in at_output.items()],
        }
        for stage, key in (("think", "sampling.seed"), ("talk", "seed"))
    }
    stages["talk"]["num_outputs"] = 6
    with served(sim_plan(stages=stages), tmp_path_factory.mktemp("disconnects")) as one:
        yield one


class Client:
    """A connection of our own, to leave in the manner we want."""

    def __init__(self, server: Served) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)

    def ask(self, name: str, *, seed: int, share: float = 1.0) -> None:
        path, body = REQUESTS[name]
        content = json.dumps(body | {"seed": seed}).encode()
        head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(content)}"]
        self._socket.sendall("\r\n".join([*head, "", ""]).encode() + content[: int(share * len(content))])

    def read_until(self, mark: bytes) -> None:
        got = b""
        while mark not in got:
            piece = self._socket.recv(65536)
            assert piece, got
            got += piece

    def leave(self, manner: str) -> None:
        if manner == "reset":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


def settled(server: Served) -> bool:
    status = server.deployment.status()
    bound = sum(row["bound"] for row in status["stages"])
    return status["open_requests"] == status["queued_requests"] == bound == 0


def num_open(server: Served) -> int:
    return int(server.deployment.status()["open_requests"])


@pytest.fixture(params=["close", "reset"])
def manner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def aborted(server: Served) -> float:
    return server.terminals("chat", "aborted") + server.terminals("speech", "aborted")


def accepted(server: Served) -> float:
    counter = server.deployment.telemetry.accepted
    return sum(s.value for m in counter.collect() for s in m.samples if s.name.endswith("_total"))


def test_during_the_upload(server: Served, manner: str) -> None:
    before = accepted(server)
    client = Client(server)
    client.ask("whole chat", seed=0, share=0.5)
    client.leave(manner)
    server.until(lambda: settled(server))
    assert accepted(server) == before


@pytest.mark.parametrize("name", REQUESTS)
def test_before_the_first_output(server: Served, manner: str, name: str) -> None:
    before = aborted(server)
    client = Client(server)
    client.ask(name, seed=STUCK_AT_ONCE)
    server.until(lambda: num_open(server) == 1)
    client.leave(manner)
    server.until(lambda: settled(server))
    assert aborted(server) == before + 1


@pytest.mark.parametrize("name", STREAMS)
def test_in_the_middle_of_a_stream(server: Served, manner: str, name: str) -> None:
    before = aborted(server)
    client = Client(server)
    client.ask(name, seed=STUCK_LATER)
    client.read_until(b"word1 " if "chat" in name else b"\r\n\r\n")
    client.leave(manner)
    server.until(lambda: settled(server))
    assert aborted(server) == before + 1


def test_while_it_waits_for_a_slot(server: Served, manner: str) -> None:
    first, second = Client(server), Client(server)
    first.ask("chat stream", seed=STUCK_LATER)
    server.until(lambda: num_open(server) == 1)
    second.ask("whole chat", seed=0)
    server.until(lambda: server.deployment.status()["queued_requests"] == 1)
    second.leave(manner)
    server.until(lambda: server.deployment.status()["queued_requests"] == 0)
    assert num_open(server) == 1
    first.read_until(b"word1 ")
    first.leave(manner)
    server.until(lambda: settled(server))


def test_with_a_whole_answer_half_made(server: Served, manner: str) -> None:
    before = aborted(server)
    client = Client(server)
    client.ask("whole spoken chat", seed=STUCK_LATER)
    first_audio = {"task": "chat", "modality": "audio"}
    name = "omnictl_first_output_seconds_count"
    count = server.deployment.metrics.get_sample_value(name, first_audio) or 0
    server.until(lambda: server.deployment.metrics.get_sample_value(name, first_audio) == count + 1)
    client.leave(manner)
    server.until(lambda: settled(server))
    assert aborted(server) == before + 1


def test_a_client_that_stops_reading_is_given_up(tmp_path: Path) -> None:
    """More audio than the sockets hold, and nobody takes it: the request ends and its memory is free."""
    plan = sim_plan(stages={"wave": {"output_bytes": 4 << 20, "interval_s": 0.2}})
    with served(plan, tmp_path, ServerSettings(write_timeout_s=0.2)) as server:
        client = Client(server)
        try:
            client.ask("raw speech", seed=0)
            server.until(lambda: server.terminals("speech", "aborted") == 1)
            server.until(lambda: settled(server))
        finally:
            client.leave("reset")


def test_the_next_client_is_served(server: Served) -> None:
    client = Client(server)
    client.ask("chat stream", seed=0)
    client.read_until(b"word3 ")
    client.leave("close")
    server.until(lambda: settled(server))
