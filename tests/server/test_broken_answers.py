"""Answers that fail: before the first byte, in the middle, and after headers that went out early (F128, F103)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import APIError, InternalServerError, OpenAI

from runtime.server.settings import ServerSettings
from tests.gate import Gate
from tests.plans import sim_plan
from tests.server.conftest import THINK_FAILS, THINK_REFUSES, WAVE_FAILS, WAVE_FAILS_AT_ONCE
from tests.server.serving import MODEL, Served, served

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SPOKEN: dict[str, Any] = {**CHAT, "modalities": ["text", "audio"]}
SPEECH: dict[str, Any] = {"model": MODEL, "input": "hi", "response_format": "pcm"}


def events(body: str) -> list[dict[str, Any]]:
    assert "[DONE]" not in body
    return [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line.startswith("data: ")]


def test_a_stream_that_breaks_ends_with_an_error_event(http: httpx.Client) -> None:
    reply = http.post("/v1/chat/completions", json={**CHAT, "stream": True, "seed": THINK_FAILS})
    assert reply.status_code == 200
    found = events(reply.text)
    assert [e["choices"][0]["delta"]["content"] for e in found[:-1]] == ["word0 ", "word1 ", "word2 "]
    assert found[-1]["error"]["code"] == "stage_error"
    assert found[-1]["error"]["message"] == "stage think: simulated failure"


def test_the_sdk_raises_for_a_stream_that_breaks(openai: OpenAI) -> None:
    with pytest.raises(APIError, match="simulated failure"):
        list(openai.chat.completions.create(**CHAT, stream=True, seed=THINK_FAILS))
    with pytest.raises(InternalServerError, match="simulated failure"):
        openai.chat.completions.create(**CHAT, seed=THINK_FAILS)


def test_a_stream_that_breaks_in_its_audio(http: httpx.Client) -> None:
    reply = http.post("/v1/chat/completions", json={**SPOKEN, "stream": True, "seed": WAVE_FAILS})
    found = events(reply.text)
    audio = [e for e in found if "choices" in e and "audio" in e["choices"][0]["delta"]]
    assert len(audio) == 2
    assert found[-1]["error"]["message"] == "stage wave: simulated failure"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_byte_has_an_honest_status(http: httpx.Client, stream: bool) -> None:
    reply = http.post("/v1/chat/completions", json={**CHAT, "stream": stream, "seed": THINK_REFUSES})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("audio_format", ["pcm", "wav", "mp3", "flac", "opus", "aac"])
def test_a_raw_body_that_breaks_is_cut_off(http: httpx.Client, audio_format: str) -> None:
    ask = {**SPEECH, "response_format": audio_format, "seed": WAVE_FAILS}
    got: list[bytes] = []
    with http.stream("POST", "/v1/audio/speech", json=ask) as reply:
        assert reply.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            got.extend(reply.iter_raw())
    assert b"".join(got)


def test_a_speech_event_stream_that_breaks(http: httpx.Client) -> None:
    reply = http.post("/v1/audio/speech", json={**SPEECH, "stream_format": "sse", "seed": WAVE_FAILS})
    kinds = [e["type"] for e in events(reply.text)]
    assert kinds == ["speech.audio.delta"] * 2 + ["error"]


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_speech_that_breaks_at_once_has_an_honest_status(http: httpx.Client, stream_format: str) -> None:
    reply = http.post("/v1/audio/speech", json={**SPEECH, "stream_format": stream_format, "seed": WAVE_FAILS_AT_ONCE})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "stage_error")


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its vocoder answers, with no sample in the answer; headers go out at once."""
    plan = sim_plan(stages={"wave": {"output_bytes": 0}})
    with served(plan, tmp_path_factory.mktemp("silent")) as one:
        yield one


def test_audio_that_is_asked_for_and_absent_is_an_error(silent: Served) -> None:
    with silent.http() as http:
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        whole = http.post("/v1/chat/completions", json=SPOKEN)
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "stage_error")
        streamed = events(http.post("/v1/chat/completions", json={**SPOKEN, "stream": True}).text)
        assert "audio was asked for" in streamed[-1]["error"]["message"]
        for ask in (SPEECH, {**SPEECH, "response_format": "mp3"}, {**SPEECH, "stream_format": "sse"}):
            assert http.post("/v1/audio/speech", json=ask).status_code == 500


FAILS, GOES_ON = 1, 2
"""Seeds of requests that stand at the gate before their first output."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory, gate: Gate) -> Iterator[Served]:
    """Its first outputs come after the gate is opened, long after the headers and some comments."""
    stages = {
        stage: {
            "faults": [gate.fault(0, **{key: FAILS}), gate.fault(0, **{key: GOES_ON})]
            + [{"action": "raise", "when": {key: FAILS}}]
        }
        for stage, key in (("think", "sampling.seed"), ("wave", "seed"))
    }
    settings = ServerSettings(headers_after_s=0.05, keepalive_s=0.05)
    with served(sim_plan(stages=stages), tmp_path_factory.mktemp("slow"), settings) as one:
        yield one


def test_headers_go_out_early_and_silence_is_filled(slow: Served, gate: Gate) -> None:
    """F120: a proxy sees life long before the first piece; the SDK sees nothing of it."""
    ask = {**CHAT, "stream": True, "seed": GOES_ON}
    with slow.http() as http, http.stream("POST", "/v1/chat/completions", json=ask) as reply:
        body, pieces = b"", reply.iter_raw()
        while len(body) < len(b": keep-alive\n\n" * 2):
            body += next(pieces)
        gate.open()
        body += b"".join(pieces)
    assert body.startswith(b": keep-alive\n\n: keep-alive\n\n")
    assert body.endswith(b"data: [DONE]\n\n")
    with slow.openai() as openai:
        chunks = openai.chat.completions.create(**CHAT, stream=True, seed=GOES_ON)
        gate.open()
        assert next(chunks).choices[0].delta.content == "word0 "
        chunks.close()


def test_a_failure_after_early_headers(slow: Served, gate: Gate) -> None:
    with slow.http() as http:
        ask = {**CHAT, "stream": True, "seed": FAILS}
        with http.stream("POST", "/v1/chat/completions", json=ask) as reply:
            assert reply.status_code == 200
            gate.open()
            assert [e["error"]["code"] for e in events(reply.read().decode())] == ["stage_error"]
        with http.stream("POST", "/v1/audio/speech", json={**SPEECH, "seed": FAILS}) as reply:
            assert reply.status_code == 200
            gate.open()
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                reply.read()
