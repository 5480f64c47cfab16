"""Every field of every endpoint against values that it must not take: never 200, never 500, and the error names
the field (F102, F103, F105, F087). The tables must cover the schemas, so a new field cannot be forgotten.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from runtime.server.chat.schema import (
    AudioOutput,
    ChatRequest,
    ContentPart,
    ImageUrl,
    InputAudio,
    MediaUrl,
    Message,
    ProcessorOptions,
    StageSampling,
    StreamOptions,
)
from runtime.server.speech.schema import SpeechRequest
from runtime.server.transcriptions.schema import TranscriptionForm
from runtime.server.wire import WireModel
from tests.server.serving import MODEL

NAN, INFINITY, HUGE = float("nan"), float("inf"), 10**30
LONG = "x" * 100_000
NOT_TEXT: list[Any] = [1, 1.5, True, [], {}, ["x"], {"x": 1}]
NOT_A_NAME = [*NOT_TEXT, "", " ", "nope", LONG]
NOT_A_NUMBER: list[Any] = ["", "1", "x", True, [], {}, [1], NAN, INFINITY, -INFINITY]
NOT_A_COUNT = [*NOT_A_NUMBER, 1.5, HUGE, -HUGE]
NOT_A_BOOL: list[Any] = ["", "true", 0, 1, [], {}]
NOT_AN_OBJECT: list[Any] = ["", "x", 1, True, [], ["x"], {"nope": 1}]

CHAT: dict[str, list[Any]] = {
    "model": NOT_A_NAME,
    "messages": ["", "hi", 1, True, [], {}, ["hi"], [[]], [{}], [{"content": "hi"}], [{"role": "user"}]],
    "modalities": ["", "text", 1, [], {}, ["image"], ["text", "text"], ["text", "audio", "text"], [1], [None]],
    "audio": ["", "wav", 1, True, [], {"voice": "tone"}],  # also for a request that asks for no audio
    "stream": NOT_A_BOOL,
    "stream_options": [*NOT_AN_OBJECT, {}],
    "temperature": [*NOT_A_NUMBER, -0.1, 2.1, HUGE],
    "top_p": [*NOT_A_NUMBER, 0, -1, 1.1],
    "top_k": [*NOT_A_COUNT, -2],
    "min_p": [*NOT_A_NUMBER, -0.1, 1.1],
    "seed": [*NOT_A_COUNT, -1, 2**63],
    "stop": ["", 1, True, {}, [1], [""], ["a"] * 5, LONG],
    "presence_penalty": [*NOT_A_NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NOT_A_NUMBER, -2.1, 2.1],
    "repetition_penalty": [*NOT_A_NUMBER, 0, -1, 2.1],
    "max_tokens": [*NOT_A_COUNT, 0, -1],
    "max_completion_tokens": [*NOT_A_COUNT, 0, -1],
    # talk: nothing to do where no audio is asked for
    "stage_params": ["", 1, True, [], {"thnk": {}}, {"wave": {}}, {"think": 1}, {"think": {"nope": 1}}, {"talk": {}}],
    "mm_processor_kwargs": [*NOT_AN_OBJECT, {"fps": 1}, {"use_audio_in_video": False}],  # there is no video
}
SPEECH: dict[str, list[Any]] = {
    "model": NOT_A_NAME,
    "input": [*NOT_TEXT, "", " ", "\n\t", LONG],
    "voice": NOT_A_NAME,
    "response_format": [*NOT_TEXT, "", "WAV", "xyz", "ogg"],
    "speed": [*NOT_A_NUMBER, 0, 0.24, 4.01, -1],
    "stream_format": [*NOT_TEXT, "", "SSE", "json"],
    "seed": [*NOT_A_COUNT, -1, 2**63],
}
TRANSCRIPTION: dict[str, list[str]] = {
    "model": ["", " ", "nope", LONG],
    "language": ["", "english", "EN", "e", "en-US", "1"],
    "prompt": ["", " ", LONG],
    "temperature": ["", "x", "-0.1", "1.1", "nan", "inf", "1e999"],
    "response_format": ["", "JSON", "xml", "diarized_json"],
    "stream": ["", "maybe", "2"],
    "timestamp_granularities": ["segment", "word", ""],  # json, the default, has no times
}
MESSAGE: dict[str, list[Any]] = {
    "role": [*NOT_TEXT, "", "tool", "function", "User"],
    "content": [None, "", " ", 1, True, {}, [], [1], ["hi"], [{}], [{"type": "text", "text": ""}]],
}
PART: dict[str, list[Any]] = {
    "type": [*NOT_TEXT, "", "image_url", "input_audio", "video"],
    "text": [*NOT_TEXT, None, "", " "],
    # in a part of type text
    "input_audio": [{"data": "eHg=", "format": "wav"}, 1, ""],
    **{name: [{"url": "data:;base64,eHg="}, 1, "", {}] for name in ("audio_url", "image_url", "video_url")},
}
URL: dict[str, list[Any]] = {"url": [*NOT_TEXT, "", " ", "x", "file:///x", "ftp://x", "http://", "data:audio/wav,x"]}
CLIP: dict[str, list[Any]] = {
    "data": [*NOT_TEXT, "", " ", "=", "a", "abc", "!!!!", "eHg=\n", "data:audio/wav;base64,eHg="],
    "format": [*NOT_TEXT, "", "WAV", "flac", "ogg"],
}
AUDIO: dict[str, list[Any]] = {
    "voice": NOT_A_NAME,
    "format": [*NOT_TEXT, "", "WAV", "pcm", "ogg"],
}
OPTIONS: dict[str, list[Any]] = {"include_usage": NOT_A_BOOL}
PROCESSOR: dict[str, list[Any]] = {"use_audio_in_video": NOT_A_BOOL, "fps": [*NOT_A_NUMBER, 0, -1, 61]}
STAGE = {name: CHAT[name] for name in StageSampling.model_fields}

CHAT_BASE: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SPEECH_BASE: dict[str, Any] = {"model": MODEL, "input": "hi", "voice": "tone"}


@pytest.mark.parametrize(
    ("schema", "table"),
    [
        (ChatRequest, CHAT),
        (SpeechRequest, SPEECH),
        (TranscriptionForm, TRANSCRIPTION),
        (Message, MESSAGE),
        (ContentPart, PART),
        (InputAudio, CLIP),
        (AudioOutput, AUDIO),
        (StreamOptions, OPTIONS),
        (MediaUrl, URL),
        (ImageUrl, URL),
        (ProcessorOptions, PROCESSOR),
        (StageSampling, STAGE),
    ],
)
def test_the_tables_cover_the_schemas(schema: type[WireModel], table: dict[str, list[Any]]) -> None:
    assert table.keys() == schema.model_fields.keys()


def check_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    reply = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert reply.status_code in (400, 404), (body, reply.text)
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 2000
    if "NaN" in json.dumps(body) or "Infinity" in json.dumps(body):
        assert error["param"] is None, "numbers that JSON does not have make the body no JSON"
    else:
        assert error["param"].startswith(param), (body, error)
        assert param in error["message"]


@pytest.mark.parametrize("field", CHAT)
def test_chat_fields(http: httpx.Client, field: str) -> None:
    for value in CHAT[field]:
        check_refused(http, "/v1/chat/completions", {**CHAT_BASE, field: value}, field)


@pytest.mark.parametrize("field", SPEECH)
def test_speech_fields(http: httpx.Client, field: str) -> None:
    for value in SPEECH[field]:
        check_refused(http, "/v1/audio/speech", {**SPEECH_BASE, field: value}, field)


@pytest.mark.parametrize("field", TRANSCRIPTION)
def test_transcription_fields(http: httpx.Client, field: str) -> None:
    for value in TRANSCRIPTION[field]:
        data = {"model": MODEL, field: value}
        reply = http.post("/v1/audio/transcriptions", data=data, files={"file": ("a.wav", b"x")})
        assert reply.status_code in (400, 404), (value, reply.text)
        assert reply.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize("field", MESSAGE)
def test_message_fields(http: httpx.Client, field: str) -> None:
    for value in MESSAGE[field]:
        message = {"role": "user", "content": "hi", field: value}
        check_refused(http, "/v1/chat/completions", {**CHAT_BASE, "messages": [message]}, f"messages[0].{field}")


@pytest.mark.parametrize("field", PART)
def test_part_fields(http: httpx.Client, field: str) -> None:
    for value in PART[field]:
        part = {"type": "text", "text": "hi", field: value}
        body = {**CHAT_BASE, "messages": [{"role": "user", "content": [part]}]}
        check_refused(http, "/v1/chat/completions", body, "messages[0].content")


@pytest.mark.parametrize("field", CLIP)
def test_clip_fields(http: httpx.Client, field: str) -> None:
    for value in CLIP[field]:
        part = {"type": "input_audio", "input_audio": {"data": "eHh4", "format": "wav", field: value}}
        body = {**CHAT_BASE, "messages": [{"role": "user", "content": [part]}]}
        check_refused(http, "/v1/chat/completions", body, f"messages[0].content[0].input_audio.{field}")


@pytest.mark.parametrize("field", AUDIO)
def test_audio_fields(http: httpx.Client, field: str) -> None:
    for value in AUDIO[field]:
        audio = {"voice": "tone", "format": "wav", field: value}
        body = {**CHAT_BASE, "modalities": ["text", "audio"], "audio": audio}
        check_refused(http, "/v1/chat/completions", body, f"audio.{field}")


def test_addresses(http: httpx.Client) -> None:
    for value in URL["url"]:
        part = {"type": "audio_url", "audio_url": {"url": value}}
        body = {**CHAT_BASE, "messages": [{"role": "user", "content": [part]}]}
        check_refused(http, "/v1/chat/completions", body, "messages[0].content[0].audio_url")


@pytest.mark.parametrize("field", STAGE)
def test_stage_fields(http: httpx.Client, field: str) -> None:
    for value in STAGE[field]:
        body = {**CHAT_BASE, "stage_params": {"think": {field: value}}}
        check_refused(http, "/v1/chat/completions", body, f"stage_params.think.{field}")


@pytest.mark.parametrize("field", PROCESSOR)
def test_processor_fields(http: httpx.Client, field: str) -> None:
    for value in PROCESSOR[field]:
        body = {**CHAT_BASE, "mm_processor_kwargs": {field: value}}
        check_refused(http, "/v1/chat/completions", body, f"mm_processor_kwargs.{field}")


def test_stream_options(http: httpx.Client) -> None:
    for value in NOT_A_BOOL:
        body = {**CHAT_BASE, "stream": True, "stream_options": {"include_usage": value}}
        check_refused(http, "/v1/chat/completions", body, "stream_options.include_usage")


@pytest.mark.parametrize("field", ["model", "messages"])
def test_chat_needs(http: httpx.Client, field: str) -> None:
    for body in ({k: v for k, v in CHAT_BASE.items() if k != field}, {**CHAT_BASE, field: None}):
        check_refused(http, "/v1/chat/completions", body, field)


@pytest.mark.parametrize("field", ["model", "input"])
def test_speech_needs(http: httpx.Client, field: str) -> None:
    for body in ({k: v for k, v in SPEECH_BASE.items() if k != field}, {**SPEECH_BASE, field: None}):
        check_refused(http, "/v1/audio/speech", body, field)


UNHONOURED: dict[str, Any] = {
    "n": 2,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "logprobs": True,
    "top_logprobs": 1,
    "logit_bias": {"1": 1},
    "response_format": {"type": "json_object"},
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "priority",
    "reasoning_effort": "high",
    "verbosity": "high",
    "prediction": {"type": "content", "content": "x"},
    "moderation": {"model": "x"},
    "prompt_cache_key": "x",
    "prompt_cache_options": {"ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "x",
    "user": "x",
    "web_search_options": {},
    "parallel_tool_calls": "yes",
}


def test_the_unhonoured_table_covers_the_schema() -> None:
    assert UNHONOURED.keys() == ChatRequest.neutral.keys()


@pytest.mark.parametrize("field", UNHONOURED)
def test_fields_that_we_know_and_do_not_honour(http: httpx.Client, field: str) -> None:
    reply = http.post("/v1/chat/completions", json={**CHAT_BASE, field: UNHONOURED[field]})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "unsupported_value"
    assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize("field", ["chunking_strategy", "include[]", "keywords", "known_speaker_names[]", "languages"])
def test_form_fields_that_we_do_not_honour(http: httpx.Client, field: str) -> None:
    data = {"model": MODEL, field: "x"}
    reply = http.post("/v1/audio/transcriptions", data=data, files={"file": ("a.wav", b"x")})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "unsupported_value"
    assert reply.json()["error"]["param"] == field.removesuffix("[]")


def test_instructions_are_not_honoured(http: httpx.Client) -> None:
    reply = http.post("/v1/audio/speech", json={**SPEECH_BASE, "instructions": "whisper"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "instructions")


@pytest.mark.parametrize(
    ("path", "base"), [("/v1/chat/completions", CHAT_BASE), ("/v1/audio/speech", SPEECH_BASE)], ids=["chat", "speech"]
)
def test_an_unknown_field_gets_the_nearest_name(http: httpx.Client, path: str, base: dict[str, Any]) -> None:
    reply = http.post(path, json={**base, "modle": "x"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "modle"
    assert "did you mean 'model'?" in reply.json()["error"]["message"]


def test_all_problems_are_told_at_once(http: httpx.Client) -> None:
    reply = http.post("/v1/chat/completions", json={**CHAT_BASE, "top_p": 2, "seed": -1})
    assert "top_p" in reply.json()["error"]["message"]
    assert "seed" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model":' + b"9" * 5000 + b"}"]
)
def test_bodies_that_are_no_json_object(http: httpx.Client, path: str, body: bytes) -> None:
    reply = http.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("body: ")


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_bodies_of_another_type(http: httpx.Client, content_type: str) -> None:
    """A web page can send these to a server on its visitor's machine without asking; it cannot send JSON."""
    content = json.dumps(CHAT_BASE)
    reply = http.post("/v1/chat/completions", content=content, headers={"content-type": content_type})
    assert reply.status_code == 415
    assert reply.json()["error"]["code"] == "unsupported_media_type"


def test_the_server_is_well_after_all_that(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", json=CHAT_BASE).status_code == 200
    assert http.get("/ready").status_code == 200
