"""Transcriptions with the official SDK. The simulated ear hears one word and no times; what real ears say of
times is rendered in test_transcripts.py.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import BadRequestError, InternalServerError, OpenAI

from tests.server.serving import MODEL

CLIP = ("clip.wav", b"not looked at by the server")


@pytest.mark.parametrize(
    ("response_format", "expected"), [("text", "word0\n"), ("srt", ""), ("vtt", "WEBVTT\n")], ids=["text", "srt", "vtt"]
)
def test_formats_that_are_text(openai: OpenAI, response_format: Any, expected: str) -> None:
    heard = openai.audio.transcriptions.create(model=MODEL, file=CLIP, response_format=response_format)
    assert heard == expected


def test_json_is_the_default(openai: OpenAI) -> None:
    heard = openai.audio.transcriptions.create(model=MODEL, file=CLIP)
    assert heard.text == "word0"
    assert heard.usage is not None
    assert heard.usage.type == "duration"


def test_verbose_json(openai: OpenAI) -> None:
    heard = openai.audio.transcriptions.create(
        model=MODEL,
        file=CLIP,
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        language="en",
        prompt="a name",
        temperature=0.5,
    )
    assert (heard.text, heard.segments) == ("word0", [])


def test_a_stream_of_events(openai: OpenAI) -> None:
    events = list(openai.audio.transcriptions.create(model=MODEL, file=CLIP, stream=True))
    assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]
    assert events[-1].text == "word0"  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_ear_says_no_to(openai: OpenAI, stream: bool) -> None:
    """F103, F106: the kind of an error of a stage survives, in a stream as well."""
    with pytest.raises(BadRequestError, match="stage ear"):
        openai.audio.transcriptions.create(model=MODEL, file=CLIP, prompt="refuse", stream=stream)
    with pytest.raises(InternalServerError, match="stage ear"):
        openai.audio.transcriptions.create(model=MODEL, file=CLIP, prompt="fail", stream=stream)


def part(name: str, value: str) -> tuple[str, tuple[None, str]]:
    return name, (None, value)


BAD_FORMS: dict[str, tuple[str | None, list[Any]]] = {
    "no file": ("file", [part("model", MODEL)]),
    "a file that is text": ("file", [part("model", MODEL), part("file", "text")]),
    "an empty file": ("file", [part("model", MODEL), ("file", ("a.wav", b""))]),
    "another file": ("clip", [part("model", MODEL), ("clip", CLIP)]),
    "two files": (None, [part("model", MODEL), ("file", CLIP), ("file", CLIP)]),
    "no model": ("model", [("file", CLIP)]),
    "two models": ("model", [part("model", MODEL), part("model", MODEL), ("file", CLIP)]),
    "a prompt that is a file": ("prompt", [part("model", MODEL), ("prompt", CLIP)]),
}


@pytest.mark.parametrize("case", BAD_FORMS)
def test_forms_that_are_not_what_they_should_be(http: httpx.Client, case: str) -> None:
    param, parts = BAD_FORMS[case]
    reply = http.post("/v1/audio/transcriptions", files=parts)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text


@pytest.mark.parametrize(
    ("content_type", "status"),
    [("application/json", 415), ("", 415), ("multipart/form-data", 400), ("multipart/form-data; boundary=x", 400)],
)
def test_bodies_that_are_no_form(http: httpx.Client, content_type: str, status: int) -> None:
    reply = http.post("/v1/audio/transcriptions", content=b"{}", headers={"content-type": content_type})
    assert reply.status_code == status, reply.text
    assert "error" in reply.json()
