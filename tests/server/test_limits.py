"""Bodies that are too large or never end, texts that are too long."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import APIStatusError

from runtime.server.settings import ServerSettings
from tests.deploy import PATIENCE_S
from tests.gate import Gate
from tests.plans import sim_plan
from tests.server.serving import MODEL, Served, served

MAX_BODY, MAX_TEXT = 100_000, 1000
HELD = 1
"""Seed of a request that stands at the gate after its first word."""
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PATHS = ["/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, gate: Gate) -> Iterator[Served]:
    limits = {"max_body_bytes": MAX_BODY, "max_text_chars": MAX_TEXT, "max_queued": 1, "queue_timeout_s": 0.2}
    held = {"slots": 1, "faults": [gate.fault(1, **{"sampling.seed": HELD})]}
    with served(sim_plan(limits=limits, stages={"think": held}), tmp_path_factory.mktemp("limits")) as one:
        yield one


def check_too_large(reply: httpx.Response) -> None:
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "payload_too_large"
    assert f"at most {MAX_BODY} bytes (limit max_body_bytes)" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_a_declared_length_is_refused_at_once(server: Served, path: str) -> None:
    with server.http() as http:
        check_too_large(http.post(path, content=b"x" * (MAX_BODY + 1), headers={"content-type": "application/json"}))


@pytest.mark.parametrize("num_pieces", [11, 2000])
def test_an_undeclared_length_is_refused_while_it_arrives(server: Served, num_pieces: int) -> None:
    pieces = (b" " * 10_000 for _ in range(num_pieces))
    with server.http() as http:
        reply = http.post("/v1/chat/completions", content=pieces, headers={"content-type": "application/json"})
        check_too_large(reply)


def test_a_form_is_refused_while_it_arrives(server: Served) -> None:
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    pieces = (head if number == 0 else b"x" * 10_000 for number in range(30))
    with server.http() as http:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        check_too_large(http.post("/v1/audio/transcriptions", content=pieces, headers=headers))


def test_the_limit_itself_is_allowed(server: Served) -> None:
    body = json.dumps(CHAT).encode()
    with server.http() as http:
        padded = body + b" " * (MAX_BODY - len(body))
        headers = {"content-type": "application/json"}
        assert http.post("/v1/chat/completions", content=padded, headers=headers).status_code == 200


def test_the_sdk_gets_the_status_and_not_a_broken_connection(server: Served) -> None:
    clip = {"type": "input_audio", "input_audio": {"data": "A" * 8_000_000, "format": "wav"}}
    with server.openai() as openai:
        for _ in range(3):
            with pytest.raises(APIStatusError) as caught:
                openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [clip]}])  # type: ignore
            assert caught.value.status_code == 413
            with pytest.raises(APIStatusError) as caught:
                openai.audio.transcriptions.create(model=MODEL, file=("a.wav", b"x" * 8_000_000))
            assert caught.value.status_code == 413


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(sim_plan(), tmp_path_factory.mktemp("impatient"), ServerSettings(body_idle_timeout_s=0.3)) as one:
        yield one


@pytest.mark.parametrize("body", [b'{"model": ', b""])
def test_an_upload_that_stands_still_is_given_up(impatient: Served, body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=PATIENCE_S) as connection:
        head = [b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"content-type: application/json"]
        connection.sendall(b"\r\n".join([*head, b"content-length: 99", b"", body]))
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/audio/speech", {"model": MODEL, "input": "x" * (MAX_TEXT + 1)}, "input"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * 600}] * 2}, "messages"),
    ],
    ids=["speech", "chat"],
)
def test_long_text_is_refused_with_the_limit(server: Served, path: str, body: dict[str, Any], param: str) -> None:
    with server.http() as http:
        error = http.post(path, json=body).json()["error"]
    assert error["param"] == param
    assert "at most 1000 (limit max_text_chars)" in error["message"]


def test_text_of_the_limit_is_allowed(server: Served) -> None:
    with server.http() as http:
        reply = http.post("/v1/audio/speech", json={"model": MODEL, "input": "x" * MAX_TEXT})
        assert reply.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_server_says_when_to_come_again(server: Served, gate: Gate, stream: bool) -> None:
    """429 with Retry-After, for streams too; the request that runs is not harmed."""
    held = {**CHAT, "stream": True, "seed": HELD}
    with server.http() as http, http.stream("POST", "/v1/chat/completions", json=held) as running:
        pieces = running.iter_raw()
        next(pieces)
        with server.http() as other:
            refused = other.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        gate.open()
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
