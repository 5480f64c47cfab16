"""Speech with the official SDK and with plain HTTP: formats, types, voices, streams."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.gate import Gate
from tests.server.conftest import WAVE_IS_HELD
from tests.server.listening import MAX_CODEC_DELAY, SIM_SAMPLES, kind_of, num_samples
from tests.server.serving import MODEL

ASK: dict[str, Any] = {"model": MODEL, "input": "hello", "voice": "tone"}
TYPES = {
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "opus": "audio/ogg;codecs=opus",
    "aac": "audio/aac",
    "pcm": "audio/pcm;rate=24000;channels=1",
}


@pytest.mark.parametrize("audio_format", TYPES)
def test_each_format_is_what_its_type_says(openai: OpenAI, audio_format: Any) -> None:
    """F099, F119"""
    reply = openai.audio.speech.with_raw_response.create(**ASK, response_format=audio_format)
    assert reply.headers["content-type"] == TYPES[audio_format]
    audio = reply.content
    assert kind_of(audio) == audio_format
    exact = audio_format in ("wav", "flac", "pcm")
    assert SIM_SAMPLES <= num_samples(audio) <= SIM_SAMPLES + (0 if exact else MAX_CODEC_DELAY)


@pytest.mark.parametrize("asked", [{}, {"response_format": None}])
def test_the_default_format_describes_itself(http: httpx.Client, asked: dict[str, Any]) -> None:
    """F119: a client that leaves the field out gets what players know."""
    reply = http.post("/v1/audio/speech", json={**ASK, **asked})
    assert reply.headers["content-type"] == "audio/mpeg"
    assert kind_of(reply.content) == "mp3"


def test_a_body_is_streamed_and_not_buffered(http: httpx.Client, gate: Gate) -> None:
    """F120: pieces leave as they are made, with the headers that proxies need: the first one comes while the second
    is held back."""
    held = {**ASK, "response_format": "pcm", "seed": WAVE_IS_HELD}
    with http.stream("POST", "/v1/audio/speech", json=held) as reply:
        assert reply.headers["x-accel-buffering"] == "no"
        assert reply.headers["cache-control"] == "no-store"
        assert "content-length" not in reply.headers
        pieces = reply.iter_raw()
        first = next(pieces)
        gate.open()
        assert len(first + b"".join(pieces)) == 2 * SIM_SAMPLES


def test_events_carry_the_same_audio(http: httpx.Client) -> None:
    raw = http.post("/v1/audio/speech", json={**ASK, "response_format": "wav"}).content
    reply = http.post("/v1/audio/speech", json={**ASK, "response_format": "wav", "stream_format": "sse"})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if line]
    assert [e["type"] for e in events] == ["speech.audio.delta"] * (len(events) - 1) + ["speech.audio.done"]
    assert b"".join(base64.b64decode(e["audio"]) for e in events[:-1]) == raw
    assert events[-1]["usage"].keys() == {"input_tokens", "output_tokens", "total_tokens"}


def test_every_listed_voice_speaks(http: httpx.Client) -> None:
    """F118"""
    listed = http.get("/v1/audio/voices").json()
    assert [voice["id"] for voice in listed["data"]] == ["tone", "default", "alloy"]
    assert listed["default"] == "tone"
    assert {v["id"]: v["name"] for v in listed["voices"]} == {name: name for name in ("tone", "default", "alloy")}
    for voice in [v["id"] for v in listed["data"]] + [None, {"id": "tone"}, "TONE", "Alloy"]:
        assert http.post("/v1/audio/speech", json={**ASK, "voice": voice}).status_code == 200


@pytest.mark.parametrize("voice", ["nova", "", " tone", {"id": "x"}])
def test_an_unknown_voice_is_refused_with_the_list(http: httpx.Client, voice: Any) -> None:
    """F117: no silent fallback."""
    reply = http.post("/v1/audio/speech", json={**ASK, "voice": voice})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "voice"
    assert "voices: tone, default, alloy" in reply.json()["error"]["message"]


@pytest.mark.parametrize("speed", [0.25, 1, 4.0])
def test_speeds(http: httpx.Client, speed: float) -> None:
    assert http.post("/v1/audio/speech", json={**ASK, "speed": speed}).status_code == 200
